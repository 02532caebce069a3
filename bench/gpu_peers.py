"""Attention libraries that `gpu-speed` and `gpu-decode` compare, in one process and on the same tensors.

Each is found by an import, or FlashAttention-3 by the path of its compiled library. None is part of this
repository.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
#: The largest relative RMS error of a result, twice what rounding to the dtype leaves.
BOUNDS = {"bf16": 0.01, "f16": 0.002, "e4m3": 0.1}


class Cell:
    """The tensors and options of one call: normal numbers, none of which is drawn twice."""

    def __init__(self, cell: dict[str, Any], device: str) -> None:
        self.dtype = cell["dtype"]
        self.causal = bool(cell["causal"])
        self.window = (cell["window"] - 1, 0) if cell.get("window") else (-1, -1)
        self.deterministic = bool(cell.get("deterministic"))
        self.backward = cell["pass"] == "backward"
        self.batch, self.seqlen, self.heads = cell["batch"], cell["seqlen"], cell["heads"]
        self.head_dim = cell["head_dim"]
        heads_kv = cell.get("heads_kv", self.heads)
        generator = torch.Generator(device).manual_seed(1)
        drawn = torch.float16 if self.dtype == "f16" else torch.bfloat16
        self.q, self.k, self.v, self.dout = (
            torch.randn(
                self.batch,
                self.seqlen,
                heads,
                self.head_dim,
                device=device,
                dtype=drawn,
                generator=generator,
            )
            .add_(mean)
            .to(DTYPES[self.dtype])
            for heads, mean in (
                (self.heads, 0.0),
                (heads_kv, 0.0),
                (heads_kv, cell.get("v_mean", 0.0)),
                (self.heads, 0.0),
            )
        )

    @property
    def flops(self) -> float:
        """Of a call; causal counts as half of the pairs, a backward pass as 2.5 forward ones."""
        n = self.seqlen
        pairs = n * n / (2 if self.causal else 1)
        if self.window[0] >= 0:
            width = min(self.window[0] + 1, n)
            pairs = width * (width + 1) / 2 + (n - width) * width
        return (10.0 if self.backward else 4.0) * self.batch * self.heads * self.head_dim * pairs

    def expected(self) -> tuple[tuple[Any, ...], torch.Tensor]:
        """A sample of rows of the output, as an index of it, and their values in fp64."""
        b, h = self.batch - 1, self.heads - 1
        rows = torch.linspace(0, self.seqlen - 1, min(self.seqlen, 128), device=self.q.device).long()
        q, k, v = (x[b, :, h * x.shape[2] // self.heads].to(torch.float64) for x in (self.q, self.k, self.v))
        scores = q[rows] @ k.T * self.head_dim**-0.5
        distance = rows[:, None] - torch.arange(self.seqlen, device=rows.device)
        if self.causal:
            scores.masked_fill_(distance < 0, -math.inf)
        if self.window[0] >= 0:
            scores.masked_fill_(distance > self.window[0], -math.inf)
        return (b, rows, h), scores.softmax(-1) @ v


@dataclass
class Library:
    """One that computes attention. A cell that it does not have ends in an exception."""

    name: str
    version: str
    source: str  #: what was imported or loaded, without a path
    forward: Callable[..., torch.Tensor]  #: of the cell, q, k and v
    #: Of the cell; returns the call. None: autograd's.
    gradients: Callable[[Cell], Callable[[], Any]] | None = None
    has_backward: bool = True

    def call(self, cell: Cell) -> Callable[[], Any]:
        """What is timed: a call that returns out, or dq, dk and dv."""
        if not cell.backward:
            return lambda: self.forward(cell, cell.q, cell.k, cell.v)
        if not self.has_backward:
            raise NotImplementedError(f"{self.name} has no backward pass")
        if self.gradients is not None:
            return self.gradients(cell)
        tensors = [x.detach().requires_grad_() for x in (cell.q, cell.k, cell.v)]
        out = self.forward(cell, *tensors)
        return lambda: torch.autograd.grad(out, tensors, cell.dout, retain_graph=True)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def tandem_library(_path: Path | None) -> Library:
    tandem = importlib.import_module("tandem")

    def forward(cell: Cell, q: Any, k: Any, v: Any) -> torch.Tensor:
        precision = "fp8" if cell.dtype == "e4m3" else "exact"
        return tandem.attention(q, k, v, causal=cell.causal, window=cell.window, precision=precision)

    def gradients(cell: Cell) -> Callable[[], Any]:
        options = {"causal": cell.causal, "window": cell.window}
        out, lse = tandem.attention(cell.q, cell.k, cell.v, return_lse=True, **options)
        options["deterministic"] = cell.deterministic
        return lambda: tandem.attention_backward(cell.dout, cell.q, cell.k, cell.v, out, lse, **options)[:3]

    return Library("tandem", tandem.__version__, "tandem", forward, gradients)


def by_schema(op: Any, given: dict[str, Any]) -> Any:
    """Calls an operator of FlashAttention-3 by its schema: releases and vLLM's copy differ in arguments."""
    usual = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True}
    usual |= {"attention_chunk": 0, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
    usual |= {"deterministic": False, **given}
    return op(*(usual.get(argument.name) for argument in op.default._schema.arguments))


def load_fa3(path: Path | None) -> tuple[Any, str, str]:
    """FlashAttention-3's operators, their version and source, by import without a path. `path`: the .so of
    the public source's build or of vLLM's wheel, or a folder that has it."""
    if path is None:
        for module in ("flash_attn_3._C", "vllm.vllm_flash_attn._vllm_fa3_C"):
            try:
                importlib.import_module(module)
            except ImportError:
                continue
            version, source = version_of(module.split(".")[0]), module
            break
        else:
            raise ImportError(
                "neither flash_attn_3 nor vllm can be imported, and no --peer fa3=PATH is given"
            )
    else:
        found = [path] if path.is_file() else [*path.rglob("_vllm_fa3_C*.so"), *path.rglob("_C*.so")]
        if not found:
            raise ImportError("the folder has neither _C*.so nor _vllm_fa3_C*.so")
        torch.ops.load_library(str(found[0].resolve()))
        version = "sha256 " + hashlib.sha256(found[0].read_bytes()).hexdigest()[:12]
        source = found[0].name
    for name in ("flash_attn_3", "_vllm_fa3_C"):
        if hasattr(getattr(torch.ops, name), "fwd"):
            return getattr(torch.ops, name), version, source
    raise ImportError(f"{source} registers no operators of FlashAttention-3")


def fa3_step(path: Path | None) -> Callable[..., torch.Tensor]:
    """One query a sequence by FlashAttention-3, which splits the keys as it likes: of q, k, v and lengths."""
    operators, *_ = load_fa3(path)
    return lambda q, k, v, used: by_schema(
        operators.fwd,
        {"q": q, "k": k, "v": v, "seqused_k": used, "softmax_scale": q.shape[3] ** -0.5, "num_splits": 0},
    )[0]


def fa3(path: Path | None) -> Library:
    operators, version, source = load_fa3(path)

    def options(cell: Cell) -> dict[str, Any]:
        left, right = cell.window
        given = {"is_causal": cell.causal, "window_size_left": left, "window_size_right": right}
        return {**given, "softmax_scale": cell.head_dim**-0.5}

    def forward(cell: Cell, q: Any, k: Any, v: Any) -> torch.Tensor:
        return by_schema(operators.fwd, {**options(cell), "q": q, "k": k, "v": v})[0]

    def gradients(cell: Cell) -> Callable[[], Any]:
        given = {**options(cell), "q": cell.q, "k": cell.k, "v": cell.v}
        out, lse, *_ = by_schema(operators.fwd, given)
        given |= {"dout": cell.dout, "out": out, "softmax_lse": lse}

        def call() -> tuple[torch.Tensor, ...]:
            made = {"dq": torch.empty_like(cell.q), "dk": torch.empty_like(cell.k)}
            made["dv"] = torch.empty_like(cell.v)
            by_schema(operators.bwd, {**given, **made})
            return tuple(made.values())

        return call

    return Library("fa3", version, source, forward, gradients, hasattr(operators, "bwd"))


def fa4(_path: Path | None) -> Library:
    attend = importlib.import_module("flash_attn.cute").flash_attn_func

    def forward(cell: Cell, q: Any, k: Any, v: Any) -> torch.Tensor:
        window = tuple(None if side < 0 else side for side in cell.window)
        out = attend(q, k, v, causal=cell.causal and window[0] is None, window_size=window)
        return out[0] if isinstance(out, tuple) else out

    return Library("fa4", version_of("flash-attn-4"), "flash_attn.cute", forward)


def sdpa(name: str, backend: str, version: str) -> Library:
    """torch.nn.functional.scaled_dot_product_attention, held to one backend."""

    def forward(cell: Cell, q: Any, k: Any, v: Any) -> torch.Tensor:
        if cell.window != (-1, -1) or cell.dtype == "e4m3":
            raise NotImplementedError(f"{name} has no windows and no 8 bits through PyTorch")
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                is_causal=cell.causal,
                enable_gqa=q.shape[2] != k.shape[2],
            ).transpose(1, 2)

    return Library(name, version, f"PyTorch, {backend}", forward)


def cudnn(_path: Path | None) -> Library:
    if not torch.backends.cudnn.is_available():
        raise ImportError("PyTorch has no cuDNN here")
    return sdpa("cudnn", "CUDNN_ATTENTION", str(torch.backends.cudnn.version()))


def fa2(_path: Path | None) -> Library:
    return sdpa("fa2", "FLASH_ATTENTION", torch.__version__)


@functools.lru_cache(maxsize=1)
def block_mask(causal: bool, left: int, seqlen: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_b: Any, _h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= left) if left >= 0 else q >= k

    return create_block_mask(visible, None, None, seqlen, seqlen, device) if causal or left >= 0 else None


def flex_flash(_path: Path | None) -> Library:
    """FlexAttention compiled to its FLASH backend, which is FlashAttention-4's code."""
    importlib.import_module("flash_attn.cute")
    attend = torch.compile(importlib.import_module("torch.nn.attention.flex_attention").flex_attention)

    def forward(cell: Cell, q: Any, k: Any, v: Any) -> torch.Tensor:
        mask = block_mask(cell.causal, cell.window[0], cell.seqlen, str(q.device))
        return attend(
            *(x.transpose(1, 2) for x in (q, k, v)),
            block_mask=mask,
            enable_gqa=q.shape[2] != k.shape[2],
            kernel_options={"BACKEND": "FLASH"},
        ).transpose(1, 2)

    return Library("flex-flash", torch.__version__, "torch.nn.attention.flex_attention, FLASH", forward)


LIBRARIES: dict[str, Callable[[Path | None], Library]] = {
    "tandem": tandem_library,
    "fa3": fa3,
    "fa4": fa4,
    "cudnn": cudnn,
    "fa2": fa2,
    "flex-flash": flex_flash,
}


def named_path(text: str) -> tuple[str, Path]:
    """--peer NAME=PATH"""
    name, _, path = text.partition("=")
    if name not in LIBRARIES or not Path(path).exists():
        raise argparse.ArgumentTypeError(
            f"{text} is not NAME=PATH, of a known library and a path that exists"
        )
    return name, Path(path)


def found(paths: dict[str, Path], without: list[str]) -> tuple[list[Library], dict[str, str]]:
    """What loads here, and of the others why not."""
    libraries, missing = [], {}
    for name, load in LIBRARIES.items():
        if name in without:
            continue
        try:
            libraries.append(load(paths.get(name)))
        except Exception as error:  # whatever keeps a library from loading is a reason to go without it
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    return libraries, missing


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of what is expected."""
    expected = expected.float()
    difference = (got.float() - expected).square_().mean().sqrt()
    return float(difference / expected.square().mean().sqrt())


def checked(cell: Cell, calls: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], list[str]]:
    """Relative errors: of Tandem's output from fp64, of everybody else's results from Tandem's; and whose are
    wrong, so that no time of theirs is shown. Raises RuntimeError if Tandem's are."""
    results = {name: call() for name, call in calls.items()}
    ours = results.pop("tandem")
    errors, bound = {}, BOUNDS[cell.dtype]
    if not cell.backward:
        index, expected = cell.expected()
        errors["tandem"] = relative_error(ours[index], expected)
        if not errors["tandem"] <= bound:
            raise RuntimeError(f"Tandem's result is wrong by {errors['tandem']:.1e}, more than {bound}")
        ours, results = (ours,), {name: (result,) for name, result in results.items()}
    for name, result in results.items():
        errors[name] = max(map(relative_error, result, ours))
    return errors, [name for name in results if not errors[name] <= 2 * bound]


def errors_of_sums(libraries: list[Library], device: str) -> list[dict[str, Any]]:
    """Relative errors of calls on e4m3 tensors from fp64 where the mean of V is 1, so that sums over the keys
    grow: accumulators of tensor cores keep 13 bits of a sum in FP8."""
    found = []
    for head_dim in (64, 128, 256):
        for seqlen in (2048, 16384):
            cell = {"pass": "forward", "dtype": "e4m3", "batch": 1, "heads": 2, "seqlen": seqlen}
            inputs = Cell({**cell, "head_dim": head_dim, "causal": 0, "v_mean": 1.0}, device)
            index, expected = inputs.expected()
            errors = {}
            for library in libraries:
                try:
                    errors[library.name] = relative_error(library.call(inputs)()[index], expected)
                except Exception:  # it does not take e4m3
                    continue
            found.append({"head_dim": head_dim, "seqlen": seqlen, "v_mean": 1.0, "error": errors})
    return found


def compile_kernels(cell: dict[str, Any]) -> None:
    """Runs Tandem once, which leaves the cell's kernels in the cache on disk."""
    tandem_library(None).call(Cell(cell, "cuda"))()
    torch.cuda.synchronize()
