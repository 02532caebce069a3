"""Functions of the user's own, a bias and dropout under torch.compile: one graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import tandem
import torch
from tandem import _call, flash_attn2
from tandem.torch import _operators
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

HEADS, ROWS, DIM = 2, 20, 8
BIAS = torch.randn(HEADS, 2 * ROWS)
LIMIT = 5
SCALE = np.float64(0.25)
NUMBERS = np.array([0.5, 2.0])
DOCUMENTS = torch.tensor([0] * 7 + [1] * 13)


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.randn(HEADS))
        self.limit = 3

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(i - j < self.limit, s + self.slopes[h] * (i - j), -float("inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tandem.flex_attention(q, k, v, self.score)


class Object:
    slope = 0.5

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.slope + self.tensor[h, i]


def closures(number: int, tensor: Tensor) -> dict[str, Callable[..., Any]]:
    def shifted(s: Any, h: Any, i: Any) -> Any:
        return s + tensor[h, i]

    def stopped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            factor = tensor[h, i]
        return s * factor + s.detach()

    table = Table()
    cube = tensor.expand(3, HEADS, ROWS)
    one = torch.tensor([[0.7]])
    half = tensor.detach().half()
    functional = torch.nn.functional
    return {
        "nothing": lambda s, b, h, i, j: s * 2,
        "no score": lambda s, b, h, i, j: i - j,
        "operators": lambda s, b, h, i, j: (
            1 - s**2 / 3 + (-s) * 2 ** (-4 * (h + 1)) - (i // 3) % 2 + (i ^ j & 1)
        ),
        "methods": lambda s, b, h, i, j: s.tanh().clamp(-1, max=0.5) + (i - j).float().abs().type_as(s),
        "functions": lambda s, b, h, i, j: functional.gelu(s, approximate="tanh") + functional.silu(s),
        "logic": lambda s, b, h, i, j: torch.where((i >= j) & ~(j == 3) | (h == 0), s, -math.inf),
        "a row of a tensor": lambda s, b, h, i, j: s + cube[1][h][j],
        "a tensor that is made": lambda s, b, h, i, j: s + (tensor * 2).T[i, h],
        "one number in a tensor": lambda s, b, h, i, j: s * one + tensor[1, 2],
        "halves": lambda s, b, h, i, j: torch.clamp(s + half[h, i], min=torch.finfo(s.dtype).min),
        "indices": lambda s, b, h, i, j: s + tensor[h, (DOCUMENTS[i] + tensor.shape[1] - 1) % tensor.size(1)],
        "a stop": stopped,
        "a global tensor": lambda s, b, h, i, j: s + BIAS[h, i - j + ROWS - 1],
        "a global number": lambda s, b, h, i, j: torch.where(i - j < LIMIT, s, -float("inf")),
        "a number of NumPy": lambda s, b, h, i, j: s * SCALE,
        "a number in an array of NumPy": lambda s, b, h, i, j: s * NUMBERS[1],
        "a closed tensor": lambda s, b, h, i, j: s + tensor[h, i],
        "a closed number": lambda s, b, h, i, j: torch.where(i - j < number, s, -float("inf")),
        "a default": lambda s, b, h, i, j, t=tensor: s + t[h, i],
        "a helper": lambda s, b, h, i, j: shifted(s, h, i),
        "a method": table.score,
        "a module's parameter": lambda s, b, h, i, j: s + table.slopes[h],
        "an object": Object(tensor),
        "a partial's argument": functools.partial(lambda t, s, b, h, i, j: s + t[h, i], tensor),
    }


LEARNED = torch.randn(HEADS, ROWS, requires_grad=True)
FUNCTIONS = closures(3, LEARNED)


def inputs(rows: int = ROWS, batch: int = 1) -> list[Tensor]:
    return [torch.randn(batch, HEADS, rows, DIM, requires_grad=True) for _ in range(3)]


def results(
    function: Callable[..., Any], tensors: Sequence[Tensor], others: Sequence[Tensor] = ()
) -> list[Any]:
    """What a function makes of tensors, and its gradients by these and others."""
    made = function(*tensors)
    made = made if isinstance(made, tuple) else (made,)
    leaves = [*tensors, *others]
    loss = torch.stack([x.square().sum() for x in made]).sum()
    return [*made, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def same(compiled: Any, function: Any, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
    """The same bits, forward and backward."""
    expected, found = (results(f, tensors, others) for f in (function, compiled))
    for x, y in zip(expected, found, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


def graph(function: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph(name: str) -> None:
    """Whatever a function reads."""
    call = lambda *t: tandem.flex_attention(*t, FUNCTIONS[name])  # noqa: E731
    same(graph(call), call, inputs(), [LEARNED])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_backends(backend: str) -> None:
    """A function is made in what is compiled, and reads a tensor that is made there."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        tensor = q[0, :, :, 0] * 2
        score = lambda s, b, h, i, j: s + tensor[h, i] * LEARNED[h, j]  # noqa: E731
        mask = lambda b, h, i, j: (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])  # noqa: E731
        return tandem.flex_attention(q * 2, k, v, score, mask, return_lse=True)

    same(graph(call, backend), call, inputs(), [LEARNED])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_arrays_of_all_pairs(backend: str) -> None:
    bias = torch.randn(HEADS, ROWS, ROWS, requires_grad=True)
    slopes = torch.randn(1, HEADS, requires_grad=True)
    mask = torch.rand(ROWS, ROWS) < 0.8
    sink = torch.randn(HEADS, requires_grad=True)

    def call(*tensors: Tensor) -> Any:
        given: dict[str, Any] = {"bias": bias, "alibi_slopes": slopes, "mask": mask, "sink": sink}
        score = lambda s, b, h, i, j: s * slopes[b, h]  # noqa: E731
        q, k, v = (t.transpose(1, 2) for t in tensors)
        return tandem.attention(q, k, v, score_mod=score, softcap=5.0, window=(9, 2), **given)

    same(graph(call, backend), call, inputs(), [bias, slopes, sink])


def test_packed_sequences_and_flash_attention() -> None:
    slopes = torch.randn(HEADS, requires_grad=True)
    cu = torch.tensor([0, 5, ROWS], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        packed = (t[0].transpose(0, 1) for t in (q, k, v))
        score = lambda s, b, h, i, j: s * slopes[h]  # noqa: E731
        out = tandem.attention(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, score_mod=score, causal=True)
        plain = (t.transpose(1, 2) for t in (q, k, v))
        return out + flash_attn2.flash_attn_func(*plain, alibi_slopes=slopes, causal=True)[0]

    same(graph(call), call, inputs(), [slopes])


def test_a_module_and_its_state() -> None:
    module = Table()
    same(graph(module), module, inputs(), [module.slopes])
    exported = torch.export.export(module, tuple(inputs()), strict=True).module()
    tensors = inputs()
    torch.testing.assert_close(exported(*tensors), module(*tensors), rtol=0, atol=0)


@pytest.fixture
def many_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@pytest.mark.usefixtures("many_graphs")
def test_no_result_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that change, also those that Dynamo then takes for variable, and tensors in their places."""
    state = Object(torch.randn(HEADS, ROWS))
    numbers: list[Any] = [1, 0.5]
    array = np.array([0.5, 2.0])

    def call(q: Tensor, k: Tensor, v: Tensor, limit: Any, factor: Any) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = (i - j < limit) & (h != numbers[0]) | (j == LIMIT)
            return torch.where(seen, s * factor, -1.0) * array[0] + state(s, b, h, i, j) * numbers[1]

        return tandem.flex_attention(q, k, v, functools.partial(score))

    compiled, tensors = graph(call), inputs()

    def expect(limit: Any = 3, factor: Any = 0.5) -> None:
        expected, found = (f(*tensors, limit, factor) for f in (call, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    for limit, factor in ((3, 0.5), (4, 0.25), (5, 0.125), (-1, 3.5), (3, 1e-3), (3, 2), (2.5, 0.5)):
        expect(limit, factor)
    for number in (0, 1, 0.3, 0.4):
        numbers[int(isinstance(number, float))] = number
        expect()
    for slope in (0.25, 0.75):
        state.slope = slope
        expect()
    for limit in (6, 7):
        monkeypatch.setitem(globals(), "LIMIT", limit)
        expect()
    state.tensor.zero_()
    expect()
    state.tensor = torch.randn(HEADS, ROWS)
    expect()
    array[0] = 3.0
    expect()


def test_one_graph_for_all_lengths() -> None:
    """And batches, also where what a function reads is as long."""
    graphs = []

    def counter(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        score = lambda s, b, h, i, j: s + bias[h, i, j] * BIAS[h, i - j + ROWS]  # noqa: E731
        out = tandem.flex_attention(q, k, v, score, lambda b, h, i, j: i >= j)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return out + tandem.attention(q, k, v, bias=bias).transpose(1, 2)

    compiled = graph(call, counter, dynamic=True)
    for batch, rows in ((3, 20), (4, 17), (5, 12)):
        tensors = [*inputs(rows, batch), torch.randn(HEADS, rows, rows)]
        assert torch.equal(compiled(*tensors), call(*tensors))
    assert len(graphs) == 1


def block_masks() -> dict[str, Any]:
    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])

    made = create_block_mask(causal, None, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=8)
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    lengths = {"BLOCK_SIZE": (8, 8), "seq_lengths": (ROWS, ROWS)}
    by_head = create_block_mask(
        lambda b, h, i, j: i >= j + h, 1, HEADS, ROWS, ROWS, device="cpu", BLOCK_SIZE=8
    )
    return {
        "of a function": made,
        "of documents": create_block_mask(documents, None, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=8),
        "of each head": by_head,
        "of fewer blocks": BlockMask.from_kv_blocks(
            made.kv_num_blocks.clamp(max=1), made.kv_indices, None, None, mask_mod=causal, **lengths
        ),
        "with full blocks": BlockMask.from_kv_blocks(*lists, mask_mod=documents, **lengths),
        "of blocks alone": BlockMask.from_kv_blocks(*lists, mask_mod=noop_mask, **lengths),
    }


@pytest.mark.usefixtures("many_graphs")
def test_block_masks() -> None:
    """Made outside, one after another given to what is compiled: results, and gradients but for rounding,
    since a graph reads the lists of blocks even if they say no more than the mask function."""
    compiled = graph(tandem.flex_attention)
    for mask in (*block_masks().values(), *block_masks().values()):
        call = functools.partial(compiled, block_mask=mask)
        tensors = inputs()
        expected = results(functools.partial(tandem.flex_attention, block_mask=mask), tensors)
        torch.testing.assert_close(results(call, tensors), expected, rtol=1e-5, atol=1e-5)


def test_the_backward_function() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
        options: Any = {"score_mod": lambda s, b, h, i, j: s + LEARNED.detach()[h, i]}
        out, lse = tandem.attention(q, k, v, return_lse=True, **options)
        return tandem.attention_backward(torch.ones_like(out), q, k, v, out, lse, **options)

    tensors = inputs()
    oracle.assert_equal(graph(call)(*tensors), call(*tensors))


def in_place(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    s += LEARNED[h, i]
    return s


#: A function that Dynamo does not follow, and what its error tells.
BREAKS: dict[str, tuple[Callable[..., Any], str]] = {
    "in place": (in_place, r"torch.add_ changes a tensor in place.*use torch.add"),
    "unseen": (lambda s, b, h, i, j: torch.nn.functional.tanh(s), r"call torch.tanh"),
    "data": (lambda s, b, h, i, j: s + s.data, r"detach\(\)"),
    "numbers of a tensor": (lambda s, b, h, i, j: s * 2 if BIAS.sum() > 0 else s, "branching"),
    "no graph": (torch.compiler.disable(lambda s, b, h, i, j: s * 3), "disable"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_graph_break(name: str) -> None:
    function, message = BREAKS[name]
    call = lambda *t: tandem.flex_attention(*t, function) * 2  # noqa: E731
    tensors = inputs()
    with pytest.raises(Exception, match=f"(?s){message}"):
        graph(call)(*tensors)
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        same(compiled, call, tensors, [LEARNED])


def test_a_graph_break_of_checkpointing_and_dropout() -> None:
    """Checkpointing wants one setting of PyTorch for one graph."""
    attend = lambda *t: tandem.flex_attention(*t, FUNCTIONS["a closed tensor"])  # noqa: E731
    checkpointed = lambda *t: checkpoint(attend, *t, use_reentrant=False) * 2  # noqa: E731
    same(torch.compile(checkpointed, backend="aot_eager"), checkpointed, inputs(), [LEARNED])
    torch.compiler.reset()
    setting = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    with torch._dynamo.config.patch({setting: True}):
        same(graph(checkpointed), checkpointed, inputs(), [LEARNED])

    def dropout(*tensors: Tensor) -> Any:
        q, k, v = (t.transpose(1, 2) for t in tensors)
        bias = LEARNED[:, :, None]
        return tandem.attention(q, k, v, bias=bias, dropout_p=0.5, dropout_seed=3)

    with pytest.raises(Exception, match="no part of a graph: leave fullgraph=True"):
        graph(dropout)(*inputs())
    torch.compiler.reset()
    same(torch.compile(dropout, backend="aot_eager"), dropout, inputs(), [LEARNED])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_mod": lambda s, b, h, i, j: s if i > j else -s}, "a condition depends on"),
        ({"score_mod": lambda s, b, h, i, j: torch.lgamma(s)}, "torch.lgamma is called on a score"),
        ({"score_mod": lambda s, b, h, i, j: s + LEARNED}, r"shape \(2, 20\) is used whole"),
        ({"score_mod": lambda s, b, h, i, j: s.reshape(1).unbind()[0]}, "reshape"),
        ({"score_mod": lambda s, b, h, i, j: s + BIAS.double()[h, i]}, "dtype float64; convert"),
        ({"bias": torch.randn(3, ROWS)}, r"shape \(3, 20\), which does not broadcast"),
        ({"bias": np.zeros((ROWS, ROWS), np.float32)}, r"NumPy|numpy|pass a torch.Tensor"),
        ({"alibi_slopes": torch.randn(5)}, r"must be \(heads_q,\) = \(2,\)"),
        ({"mask": torch.randn(ROWS)}, "pass numbers to be added as bias"),
    ],
)
def test_errors_are_those_of_plain_calls(options: dict[str, Any], message: str) -> None:
    call = lambda *t: tandem.attention(*(x.transpose(1, 2) for x in t), **options)  # noqa: E731
    for compiled in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises((tandem.TandemError, TypeError, AttributeError), match=message):
            compiled(*inputs())
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s){message}|branching"):
        graph(call)(*inputs())


def test_opcheck() -> None:
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in inputs())
    options: Any = _operators.flat(_call.Call())
    texts, learned = ("add(s, t0[h, q])", "lt(t1[k], 1)"), LEARNED.detach()
    operators = torch.ops.tandem
    forward = (q, k, v, None, *options, *texts, [LEARNED, DOCUMENTS])
    torch.library.opcheck(operators.attention_with_functions, forward)
    out, lse, _ = (t.detach() for t in operators.attention_with_functions(*forward))
    plain = (torch.ones_like(out), None, *(t.detach() for t in (q, k, v)), None, out, lse, None)
    backward = (*plain, *options, *texts, [learned, DOCUMENTS], [True, False], True, False, True, False)
    torch.library.opcheck(operators.attention_with_functions_backward, backward)
    with FlopCounterMode(display=False) as counter:
        operators.attention_with_functions_backward(*backward)
    assert counter.get_total_flops() == 4 * 2 * ROWS * ROWS * HEADS * DIM  # without dK
