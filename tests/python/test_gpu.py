"""CUDA tensors through the Python package: results, gradients, streams, graphs, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import tandem
import torch
from test_forward import qkv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")

Tensors = tuple[torch.Tensor, ...]

QUERIES, KEYS = 200, 300
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 50)},
    "causal window": {"causal": True, "window": (90, -1)},
}
LENGTHS: dict[str, dict[str, torch.Tensor]] = {
    "dense": {},
    "seqused": {"seqused_q": torch.tensor([200, 77]), "seqused_k": torch.tensor([150, 300])},
    "packed": {
        "cu_seqlens_q": torch.tensor([0, 130, 130, 380], dtype=torch.int32),  # 20 rows past the end
        "cu_seqlens_k": torch.tensor([0, 210, 240, 600], dtype=torch.int32),
    },
}
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, sink": {"softcap": 3.0, "sink": torch.tensor([-1.0, 0.5, 2.0, 7.0])},
}


def inputs(head_dim: int, head_dim_v: int, dtype: torch.dtype, packed: bool = False) -> Tensors:
    tensors = qkv(2, QUERIES, KEYS, 4, 2, head_dim, head_dim_v, dtype)
    return tuple(t.flatten(0, 1) for t in tensors) if packed else tensors


def cuda(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().cuda().requires_grad_() for t in tensors]


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """Result, LSE and all gradients, one through the LSE too, by the contract's accuracy rule."""
    given = {name: cuda(value) for name, value in options.items()}
    inputs = leaves(q, k, v)
    if "sink" in given:
        given["sink"].requires_grad_()
        inputs.append(given["sink"])
    out, lse = tandem.attention(*inputs[:3], return_lse=True, **given)
    assert out.is_cuda and lse.is_cuda and out.dtype == q.dtype and lse.dtype == torch.float32
    expected_out, expected_lse = oracle.exact(q, k, v, **options)
    oracle.assert_close(out.detach().cpu(), expected_out, oracle.eager(q, k, v, **options)[0])
    oracle.assert_close(lse.detach().cpu(), expected_lse)

    dout, dlse = torch.randn(out.shape).to(q.dtype), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), inputs, (dout.cuda(), dlse.cuda()))
    expected = oracle.gradients(oracle.exact, q, k, v, dout, dlse, **options)
    same = yardsticks(expected, q, k, v, dout, dlse, **options)
    for gradient, reference, yardstick in zip(got, expected, same, strict=True):
        oracle.assert_close(gradient.cpu(), reference, *yardstick)


def yardsticks(
    expected: list[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> list[list[torch.Tensor]]:
    """For each gradient what eager and fused PyTorch make of it. The sink's has one element a head, whose
    error is a matter of luck: it is taken of eight more problems, whose inputs differ in the last place."""
    eager = oracle.gradients(oracle.eager, q, k, v, *rest, **options)
    fused = oracle.gradient_yardsticks(q, k, v, *rest, **options)
    same = [[a, *b] for a, b in zip(eager, fused, strict=True)]
    if "sink" in options:
        step = torch.finfo(q.dtype).eps / 2
        for _ in range(8):
            near = [t * (1 + step * torch.randint(-1, 2, t.shape)).to(t.dtype) for t in (q, k, v)]
            exact = oracle.gradients(oracle.exact, *near, *rest, **options)[3]
            found = oracle.gradients(oracle.eager, *near, *rest, **options)[3]
            same[3].append(expected[3] + (found - exact))
    return same


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_features_crossed(mask: str, lengths: str, scores: str) -> None:
    tensors = inputs(64, 64, torch.bfloat16, lengths == "packed")
    check(*tensors, **MASKS[mask], **LENGTHS[lengths], **SCORES[scores])


@pytest.mark.parametrize("lengths", ["dense", "seqused"])
@pytest.mark.parametrize("heads_last", [False, True])
def test_one_query(lengths: str, heads_last: bool) -> None:
    """A step of generation: heads that share keys become rows of one tile, in either layout."""
    q, k, v = qkv(3, 1, 500, 8, 2, 128, 128, torch.bfloat16)
    options: dict[str, Any] = {"causal": True}
    if lengths == "seqused":
        options["seqused_k"] = torch.tensor([500, 0, 123])
    expected = oracle.exact(q, k, v, **options)
    tensors = [t.cuda() for t in (q, k, v)]
    if heads_last:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    given = {name: cuda(value) for name, value in options.items()}
    out, lse = tandem.attention(*tensors, return_lse=True, **given)
    oracle.assert_close(out.cpu(), expected[0], oracle.eager(q, k, v, **options)[0])
    oracle.assert_close(lse.cpu(), expected[1])
    assert "heads that share keys" in tandem.explain(*tensors, **given)


@pytest.mark.parametrize("packed", [False, True])
def test_only_needed_gradients(packed: bool) -> None:
    """Each alone has the bits that it has among all, and nothing else is written."""
    tensors = leaves(*inputs(64, 64, torch.bfloat16, packed))
    options = {name: cuda(t) for name, t in LENGTHS["packed" if packed else "seqused"].items()}

    def gradients(*wanted: torch.Tensor) -> Tensors:
        inputs = [t if any(t is w for w in wanted) else t.detach() for t in tensors]
        out = tandem.attention(*inputs, causal=True, deterministic=True, **options)
        return torch.autograd.grad(out.square().sum(), wanted)

    everything = gradients(*tensors)
    for t, expected in zip(tensors, everything, strict=True):
        assert torch.equal(gradients(t)[0], expected)
    for pair in ((0, 1), (0, 2), (1, 2)):
        for got, i in zip(gradients(*(tensors[i] for i in pair)), pair, strict=True):
            assert torch.equal(got, everything[i])


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    """PyTorch raises where something waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_synchronisation")
def test_a_training_step_does_not_synchronise() -> None:
    q, k, v = (t.detach().requires_grad_() for t in torch.randn(3, 400, 4, 64, device="cuda").bfloat16())
    cu = torch.arange(0, 401, 100, device="cuda")
    tandem.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True).backward(torch.ones_like(q))


def test_work_goes_to_the_current_stream() -> None:
    tensors = leaves(*inputs(128, 128, torch.bfloat16))

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        out = tandem.attention(q, k, v, deterministic=True)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    expected = step(*tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a launch elsewhere would read what is not yet there
        got = step(*(t * 1.0 for t in tensors))
    stream.synchronize()
    assert torch.cuda.current_device() == 0
    oracle.assert_equal(got, expected)


def test_tensors_of_two_devices_are_refused() -> None:
    q, k, v = qkv(head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(tandem.InvalidArgumentError, match="^k is on"):
        tandem.attention(q.cuda(), k, v)


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Tensors:
    """A forward and a backward pass: the result and the gradients."""
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True, deterministic=True, **options)
    return (out, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)))


@pytest.mark.parametrize("precision", ["exact", "int8"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_cuda_graphs(packed: bool, precision: str) -> None:
    """A captured training step, replayed on other values, and of packed sequences at other lengths."""
    tensors = leaves(*inputs(64, 64, torch.bfloat16, packed))
    options: dict[str, Any] = {"precision": precision}
    if packed:
        options |= {name: cuda(value) for name, value in LENGTHS["packed"].items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*tensors, **options)  # kernels are found before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*tensors, **options)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for t in tensors:
                t.copy_(torch.randn(t.shape))
        if packed:
            options["cu_seqlens_q"].copy_(torch.tensor([0, 10 + seed, 100, 400]))
            options["cu_seqlens_k"].copy_(torch.tensor([0, 300 + seed, 400, 590]))
        graph.replay()
        oracle.assert_equal(captured, step(*tensors, **options))


def test_compile_without_graph_breaks() -> None:
    """Inductor's code for a step with attention in it, one graph for every length."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = tandem.attention(q * 2, k, v, causal=True, return_lse=True, deterministic=True)
        return out.float().square().sum() + lse.sigmoid().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for length in (70, 130, 300):
        tensors = leaves(*qkv(2, length, length, 4, 2, 64, dtype=torch.bfloat16))
        expected = torch.autograd.grad(function(*tensors), tensors)
        got = torch.autograd.grad(compiled(*tensors), tensors)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_autocast_converts_q_k_and_v() -> None:
    tensors = leaves(*inputs(64, 64, torch.float32))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = tandem.attention(*tensors, causal=True)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in tensors)


def test_as_an_implementation_of_pytorchs_function() -> None:
    registry = pytest.importorskip("torch.nn.attention")
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no registry of flash attention implementations")
    import tandem.flash_attn

    tandem.flash_attn.register_with_torch()
    q, k, v = leaves(*(t.transpose(1, 2) for t in qkv(2, 200, 200, 4, 4, 64, dtype=torch.bfloat16)))
    results = []
    for ours in (False, True):
        if ours:
            registry.activate_flash_attention_impl("tandem")
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        if ours:
            registry.restore_flash_attention_impl()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
