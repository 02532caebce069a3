"""What runs where: the tables of docs/support.md and README.md, from plans.

    python scripts/support.py          writes the tables between their markers
    python scripts/support.py --check  says whether they are what plans say; a test runs this

A plan needs no GPU: `tandem.explain` is asked on described tensors, for every GPU that it knows by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import tandem
import torch

ROOT = Path(__file__).resolve().parents[1]
WHERE = {
    "CPU": ("cpu",),
    "Hopper (H100, H200)": ("H100", "H100 PCIe", "H200", "GH200"),
    "other NVIDIA GPUs from Ampere on": ("A100", "A10", "RTX 3090", "L4", "RTX 4090", "B200", "RTX 5090"),
}
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "s8": torch.int8,
}
WIDEST = 1024

#: What a cell may name, each with the call whose plan decides whether it does.
Cases = dict[str, Callable[[str], object]]


def array(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def runs(call: Callable[[str], object], device: str) -> bool:
    try:
        call(device)
    except (tandem.UnsupportedError, tandem.InvalidArgumentError):
        return False
    return True


def qkv(dtype: str, head_dim: int = 64, head_dim_v: int = 0) -> list[torch.Tensor]:
    shapes = (2, 256, 8, head_dim), (2, 256, 2, head_dim), (2, 256, 2, head_dim_v or head_dim)
    return [array(*shape, dtype=dtype) for shape in shapes]


def plain(dtypes: str = "f32 f16 bf16", head_dim_v: int = 0, **options: object) -> Cases:
    return {
        dtype: lambda device, dtype=dtype: tandem.explain(
            *qkv(dtype, head_dim_v=head_dim_v), device=device, **options
        )
        for dtype in dtypes.split()
    }


def gated() -> Cases:
    return {
        dtype: lambda device, dtype=dtype: tandem.explain(
            *qkv(dtype), gate=array(2, 256, 8, 64, dtype=dtype), backward=True, device=device
        )
        for dtype in ("f32", *SIXTEEN)
    }


def varlen(**options: object) -> Cases:
    lengths = {"cu_seqlens_q": integers(3), "cu_seqlens_k": integers(3)}
    return {
        dtype: lambda device, dtype=dtype: tandem.explain(
            *(x.flatten(0, 1) for x in qkv(dtype)), device=device, **lengths, **options
        )
        for dtype in ("f32", "f16", "bf16")
    }


def paged(q: str, cache: str, queries: int = 1, **options: object) -> Callable[[str], object]:
    k = array(100, 16, 2, 64, dtype=cache)
    table = {"page_table": integers(2, 8), "seqused_k": integers(2)}
    return lambda device: tandem.explain(
        array(2, queries, 8, 64, dtype=q), k, k.clone(), device=device, **table, **options
    )


def entries(dtype: str) -> Callable[[str], object]:
    k = array(9, 256, 2, 64, dtype=dtype)
    chosen = {"cache_batch_idx": integers(2), "leftpad_k": integers(2), "seqused_k": integers(2)}
    return lambda device: tandem.explain(
        array(2, 1, 8, 64, dtype=dtype), k, k.clone(), device=device, **chosen
    )


def scales(*names: str, rows: bool = False) -> dict[str, torch.Tensor]:
    return {f"{name}_scale": array(*((100, 2, 16) if rows else (1,)), dtype="f32") for name in names}


def eight_bit(rows: bool = False, **options: object) -> Cases:
    """A cache in pages beside bf16 queries: few of them, then many."""
    both = scales("k", "v", rows=rows)
    return {
        cache: lambda device, cache=cache: [
            paged("bf16", cache, n, **both, **options)(device) for n in (1, 256)
        ]
        for cache in ("e4m3", "s8")
    }


def quantized() -> Cases:
    recipes = {"e4m3": "fp8", "s8": "int8"}
    return {
        dtype: lambda device, dtype=dtype, recipe=recipe: tandem.explain(
            *qkv(dtype), device=device, precision=recipe, **scales("q", "k", "v")
        )
        for dtype, recipe in recipes.items()
    }


def recipes(**options: object) -> Cases:
    return {
        name: lambda device, name=name: tandem.explain(*qkv("bf16"), device=device, precision=name, **options)
        for name in ("fp8", "int8")
    }


def gradients_in_8_bits(device: str) -> str:
    options = {"device": device, "precision": "int8", "backward_precision": "int8"}
    for head_dim in (64, 128):
        tensors = qkv("bf16", head_dim=head_dim)
        tandem.explain(*tensors, return_max_logits=True, **options)
        explained = tandem.explain(*tensors, backward=True, **options)
    return explained


def widest(**options: object) -> Callable[[str], str]:
    """The largest head dimension of q and k, and of v where that is another."""

    def largest(device: str, of: Callable[[int], list[torch.Tensor]]) -> int:
        def fits(head_dim: int) -> bool:
            return runs(lambda where: tandem.explain(*of(head_dim), device=where, **options), device)

        return max(filter(fits, range(8, WIDEST + 9, 8)), default=0)

    def cell(device: str) -> str:
        qk = largest(device, lambda d: qkv("bf16", d, 64))
        v = largest(device, lambda d: qkv("bf16", qk, d)) if qk else 0
        if qk == 0:
            return "no"
        return f"to {qk}" if qk == v else f"to {qk}, v to {v}"

    return cell


def listed(cases: Cases) -> Callable[[str], str]:
    return lambda device: ", ".join(name for name, call in cases.items() if runs(call, device)) or "no"


def add(score: object, b: object, h: object, q_idx: object, kv_idx: object) -> object:
    return score + q_idx


MASKS = {
    "window": (64, 0),
    "causal": True,
    "softcap": 20.0,
    "sink": array(8, dtype="f32"),
    "seqused_k": integers(2),
}
DROPOUT = {"dropout_p": 0.1, "dropout_seed": 1}
SIXTEEN = ("f16", "bf16")
ROWS: dict[str, Callable[[str], str]] = {
    "**Forward**": listed(plain("f32 f16 bf16 e4m3")),
    "causal, window, softcap, sink, `seqused`, grouped heads, another head_dim of v, all at once": listed(
        plain(head_dim_v=96, **MASKS)
    ),
    "varlen (`cu_seqlens_q`, `cu_seqlens_k`)": listed(varlen(causal=True)),
    "`split_size`": listed(plain(split_size=1024)),
    "`causal_by_sequence`": listed(plain(causal_by_sequence=integers(2))),
    "`return_max_logits`": listed(plain(return_max_logits=True)),
    "`indices`, backward too": listed(plain(indices=integers(2, 256, 64), backward=True)),
    "`gate`, backward too": listed(gated()),
    "`sm_limit`, forward": listed(plain(sm_limit=8)),
    "head dimensions": widest(),
    "head dimensions with `split_size`": widest(split_size=1024),
    "**Backward**": listed(plain(backward=True)),
    "these features, all at once, backward": listed(plain(head_dim_v=96, backward=True, **MASKS)),
    "varlen, backward": listed(varlen(causal=True, backward=True)),
    "`deterministic` gradients": listed(plain(deterministic=True, backward=True)),
    "head dimensions, backward": widest(backward=True),
    "**Caches**: `cache_batch_idx`, `leftpad_k`": listed({d: entries(d) for d in ("f32", *SIXTEEN)}),
    "pages (`page_table`)": listed({d: paged(d, d, causal=True) for d in ("f32", *SIXTEEN)}),
    "pages with `split_size`": listed({d: paged(d, d, split_size=1024) for d in ("f32", *SIXTEEN)}),
    "8-bit caches beside bf16 queries, a scale by tensor or head": listed(eight_bit()),
    "8-bit caches, a scale by row": listed(eight_bit(rows=True)),
    "queries in e4m3 on a cache in e4m3": listed({"e4m3": paged("e4m3", "e4m3", **scales("q", "k", "v"))}),
    "**Functions** (`score_mod`, `mask_mod`, `bias`, `mask`, `alibi_slopes`)": listed(plain(score_mod=add)),
    "functions and dropout together, backward": listed(plain(score_mod=add, backward=True, **DROPOUT)),
    "functions on pages": listed({d: paged(d, d, score_mod=add) for d in ("f32", *SIXTEEN)}),
    "functions on 8-bit caches": listed(eight_bit(score_mod=add)),
    "functions with `causal_by_sequence`": listed(plain(score_mod=add, causal_by_sequence=integers(2))),
    "**Dropout**": listed(plain(**DROPOUT)),
    "head dimensions with functions or dropout": widest(score_mod=add, **DROPOUT),
    "**8-bit products** of f16 or bf16 tensors (`precision`)": listed(recipes()),
    "8-bit products, `strict`": listed(recipes(strict=True)),
    "gradients by 8-bit products (`backward_precision`), heads of 64, 128": listed(
        {"int8": gradients_in_8_bits}
    ),
    "8-bit products of tensors quantized before": listed(quantized()),
    "8-bit products with functions or dropout": listed(recipes(**DROPOUT)),
    "8-bit products with `causal_by_sequence`": listed(recipes(causal_by_sequence=integers(2))),
    "head dimensions of 8-bit products": widest(precision="fp8"),
}
SHORT = {
    "forward": "**Forward**",
    "backward": "**Backward**",
    "head dimensions": "head dimensions",
    "head dimensions, backward": "head dimensions, backward",
    "8-bit products": "**8-bit products** of f16 or bf16 tensors (`precision`)",
    "8-bit caches": "8-bit caches beside bf16 queries, a scale by tensor or head",
    "functions, dropout": "functions and dropout together, backward",
}


def cells(row: str) -> list[str]:
    found = []
    for devices in WHERE.values():
        said = {ROWS[row](device) for device in devices}
        if len(said) > 1:
            raise SystemExit(
                f"scripts/support.py: {row}: {', '.join(devices)} differ: {said}; give them columns"
            )
        found += said
    return found


def table(rows: dict[str, str]) -> str:
    lines = [["", *WHERE], ["---"] * (len(WHERE) + 1), *([label, *cells(row)] for label, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(text: str, made: str) -> str:
    return re.sub(
        r"(<!-- plans -->\n).*?(<!-- plans end -->)",
        lambda block: f"{block[1]}{made}\n{block[2]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    stale = []
    for name, rows in (("docs/support.md", {row: row for row in ROWS}), ("README.md", SHORT)):
        page = ROOT / name
        text = filled(page.read_text(), table(rows))
        if text != page.read_text():
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(text)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"{', '.join(stale)}: stale; run python scripts/support.py")


if __name__ == "__main__":
    main()
