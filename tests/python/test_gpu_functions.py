"""Functions of scores and mask functions on CUDA tensors, by the contract's accuracy rule: no further from
the formula in float64 than twice PyTorch's result in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import tandem
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning"),
]

BATCH, HEADS, QUERIES, KEYS = 2, 4, 300, 420
Function = Callable[..., Any]


def functions(device: str) -> dict[str, tuple[Function | None, Function | None]]:
    """Score and mask functions by name, which read tensors on `device`."""
    random = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device)

    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], device=device)
    document = (torch.arange(KEYS) // 97).to(device)
    bias, table = randn(BATCH, HEADS, QUERIES, KEYS), randn(HEADS, QUERIES + KEYS)
    seen = (torch.rand(QUERIES, KEYS, generator=random) > 0.3).to(device)
    prefix = torch.tensor([50, 201], device=device)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "causal": (None, causal),
        "sliding window": (None, lambda b, h, q, k: (q >= k) & (q - k < 64)),
        "document": (None, lambda b, h, q, k: document[q] == document[k]),
        "prefix LM": (None, lambda b, h, q, k: (k < prefix[b]) | (q >= k)),
        "mask tensor": (None, lambda b, h, q, k: seen[q, k]),
        "ALiBi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), None),
        "relative bias": (lambda s, b, h, q, k: s + table[h, q - k + KEYS - 1], None),
        "bias tensor": (lambda s, b, h, q, k: s + bias[b, h, q, k], None),
        "softcap": (lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0), None),
        "ALiBi, softcap, causal": (
            lambda s, b, h, q, k: 5.0 * torch.tanh((s + slopes[h] * (k - q)) / 5.0),
            causal,
        ),
        "-inf": (lambda s, b, h, q, k: torch.where((q + k) % 3 == 0, -float("inf"), s), None),
        "blind queries": (None, lambda b, h, q, k: (q > 130) & (k > 7)),
    }


NAMES = tuple(functions("cpu"))


def plain(q: Any, k: Any, v: Any, name: str) -> torch.Tensor:
    """The formula in the tensors' dtype."""
    score_mod, mask_mod = functions("cpu")[name]
    return oracle.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)[0]


def results(attention: Function, dout: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(name: str, dtype: torch.dtype, head_dim: int) -> None:
    random = torch.Generator().manual_seed(5)

    def randn(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(BATCH, rows, heads, head_dim, generator=random).to(dtype)

    inputs = randn(QUERIES, HEADS), randn(KEYS, 2), randn(KEYS, 2)
    dout = randn(QUERIES, HEADS)
    exact = results(lambda *t: plain(*t, name), dout.double(), *(t.double() for t in inputs))
    same = results(lambda *t: plain(*t, name), dout, *inputs)
    score_mod, mask_mod = functions("cuda")[name]
    own = results(
        lambda *t: tandem.attention(*t, score_mod=score_mod, mask_mod=mask_mod),
        dout.cuda(),
        *(t.cuda() for t in inputs),
    )
    for what, result, of_torch, wanted in zip(("out", "dq", "dk", "dv"), own, same, exact, strict=True):
        error = (result.cpu().double() - wanted).abs().max().item()
        allowed = 2 * (of_torch.double() - wanted).abs().max().item() + 3e-5
        assert error <= allowed, what


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "causal", "document", "ALiBi", "softcap"])
def test_dropout_keeps_what_the_cpu_keeps(name: str, dtype: torch.dtype) -> None:
    """The same entries: the two results are as close as two roundings, which another pattern is not."""

    def of(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        random = torch.Generator().manual_seed(5)
        rows = (QUERIES, HEADS), (KEYS, 2), (KEYS, 2), (QUERIES, HEADS)
        *inputs, dout = (torch.randn(BATCH, *of, 64, generator=random).to(device, dtype) for of in rows)
        score_mod, mask_mod = functions(device).get(name, (None, None))
        options = {"score_mod": score_mod, "mask_mod": mask_mod, "dropout_p": 0.3, "dropout_seed": seed}
        return results(lambda *t: tandem.attention(*t, **options), dout, *inputs)

    expected = of("cpu", 7)
    for result, same, other in zip(of("cuda", 7), expected, of("cuda", 8), strict=True):
        largest = same.abs().max().item()
        assert (result.cpu() - same).abs().max().item() < 0.03 * largest
        assert (other.cpu() - same).abs().max().item() > 0.1 * largest


LONG = 1100  # queries and keys: from here on the warpgroups of the backward kernel take turns


def long_functions(device: str) -> dict[str, tuple[Function | None, Function | None]]:
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], device=device)
    table = torch.randn(HEADS, 2 * LONG, generator=torch.Generator().manual_seed(3)).to(device)

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < 70) | (q >= k)

    return {
        "prefix LM": (None, prefix),
        "by head": (None, lambda b, h, q, k: (h % 2 == 1) | (k < 8)),
        "ALiBi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), None),
        "ALiBi, causal": (lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k),
        "softcap, prefix LM": (lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0), prefix),
        "relative, prefix LM": (lambda s, b, h, q, k: s + table[h, q - k + LONG], prefix),
        "-inf": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), None),
    }


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", tuple(long_functions("cpu")))
def test_long_sequences(name: str, head_dim: int) -> None:
    """What the CPU gives, as close as two roundings."""

    def of(device: str) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(5)
        inputs = [
            torch.randn(1, LONG, heads, head_dim, generator=random).to(device, torch.bfloat16)
            for heads in (HEADS, 2, 2, HEADS)
        ]
        score_mod, mask_mod = long_functions(device)[name]
        return results(
            lambda *t: tandem.attention(*t, score_mod=score_mod, mask_mod=mask_mod), inputs[3], *inputs[:3]
        )

    for result, same in zip(of("cuda"), of("cpu"), strict=True):
        assert (result.cpu() - same).abs().max().item() < 0.02 * same.abs().max().item()


def test_other_tensors_of_a_function_take_the_compiled_kernel() -> None:
    """What a function reads is a parameter: a call with another bias gives another result, at once."""
    q, k, v = (
        torch.randn(BATCH, n, HEADS, 64, device="cuda", dtype=torch.float16) for n in (QUERIES, KEYS, KEYS)
    )
    biases = [torch.randn(HEADS, QUERIES, KEYS, device="cuda") for _ in range(2)]
    first, second = (tandem.attention(q, k, v, bias=bias) for bias in biases)
    assert not torch.equal(first, second)
    assert torch.equal(first, tandem.attention(q, k, v, bias=biases[0]))


def test_other_numbers_of_a_function_take_the_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature that each step of a training changes, and a prefix: each has its own result."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    inputs = [torch.randn(BATCH, n, HEADS, 64).to(torch.float16) for n in (QUERIES, KEYS, KEYS)]
    compiled = set()
    for temperature, prefix in ((0.37, 40), (0.38, 90), (-2.5, 7)):

        def attention(*tensors: torch.Tensor, t: float = temperature, n: int = prefix) -> Any:
            return tandem.attention(
                *tensors,
                score_mod=lambda s, b, h, i, j: s * torch.sigmoid(s * t) / t,
                mask_mod=lambda b, h, i, j: (j < n) | (i >= j),
            )

        own = results(attention, inputs[0].cuda(), *(t.cuda() for t in inputs))
        expected = results(attention, inputs[0], *inputs)
        for result, of_cpu in zip(own, expected, strict=True):
            assert (result.cpu() - of_cpu).abs().max().item() < 0.03 * of_cpu.abs().max().item()
        compiled.add(len(list(tmp_path.iterdir())))
    assert len(compiled) == 1 and compiled != {0}


@pytest.mark.parametrize("head_dim", [64, 192])
def test_what_a_function_reads_has_the_gradients_of_the_cpu(head_dim: int) -> None:
    def of(device: str) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(5)
        rows = (QUERIES, HEADS), (KEYS, 2), (KEYS, 2), (QUERIES, HEADS)
        q, k, v, dout = (
            torch.randn(BATCH, *of, head_dim, generator=random).to(device, torch.bfloat16) for of in rows
        )
        bias = torch.randn(HEADS, QUERIES, KEYS, generator=random).to(device).requires_grad_()
        slopes = torch.rand(HEADS, generator=random).to(device).requires_grad_()
        table = torch.randn(HEADS, 32, generator=random).to(device).requires_grad_()

        # ALiBi favours the keys about the diagonal, where the table's buckets are: if a row saw one bucket
        # alone, gradients of its pairs would add up to 0, of which the roundings of out are what is left.
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + table[h, (q_idx + KEYS - QUERIES - kv_idx).abs().clamp(max=31)]

        out = tandem.attention(q, k, v, score_mod=score_mod, bias=bias, alibi_slopes=slopes)
        return list(torch.autograd.grad(out, (bias, slopes, table), dout))

    for name, own, expected in zip(("bias", "slopes", "table"), of("cuda"), of("cpu"), strict=True):
        error = (own.cpu() - expected).abs().max().item()
        assert error < 0.03 * expected.abs().max().item(), name


def test_deterministic_gradients_have_the_same_bits() -> None:
    score_mod, mask_mod = functions("cuda")["ALiBi, softcap, causal"]
    inputs = [
        torch.randn(BATCH, n, HEADS, 64, device="cuda", dtype=torch.float16) for n in (QUERIES, KEYS, KEYS)
    ]
    dout = torch.randn_like(inputs[0])

    def attention(*tensors: torch.Tensor) -> Any:
        return tandem.attention(*tensors, score_mod=score_mod, mask_mod=mask_mod, deterministic=True)

    first = results(attention, dout, *inputs)
    for again in (results(attention, dout, *inputs) for _ in range(5)):
        assert all(map(torch.equal, first, again))
