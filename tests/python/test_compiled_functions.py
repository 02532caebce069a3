"""Functions of the user's own, a bias and dropout under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tandem
import torch
from torch import Tensor

HEADS, ROWS, DIM = 2, 20, 8
BIAS = torch.randn(HEADS, 2 * ROWS)
LIMIT = 5


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.randn(HEADS))

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.slopes[h] * (i - j)


def closures(number: int, tensor: Tensor) -> dict[str, Callable[..., Any]]:
    def shifted(s: Any, h: Any, i: Any) -> Any:
        return s + tensor[h, i]

    table = Table()
    return {
        "nothing": lambda s, b, h, i, j: s * 2,
        "a global tensor": lambda s, b, h, i, j: s + BIAS[h, i - j + ROWS - 1],
        "a global number": lambda s, b, h, i, j: torch.where(i - j < LIMIT, s, -float("inf")),
        "a closed tensor": lambda s, b, h, i, j: s + tensor[h, i],
        "a closed number": lambda s, b, h, i, j: torch.where(i - j < number, s, -float("inf")),
        "a default": lambda s, b, h, i, j, t=tensor: s + t[h, i],
        "a helper": lambda s, b, h, i, j: shifted(s, h, i),
        "a method": table.score,
        "a module's parameter": lambda s, b, h, i, j: s + table.slopes[h],
        "a partial's argument": functools.partial(lambda t, s, b, h, i, j: s + t[h, i], tensor),
    }


FUNCTIONS = closures(3, torch.randn(HEADS, ROWS))


def inputs() -> list[Tensor]:
    return [torch.randn(1, HEADS, ROWS, DIM) for _ in range(3)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_a_graph_break(name: str) -> None:
    """Whatever it reads, also where it is made in what is compiled."""

    def made(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensor = q[0, :, :, 0] * 2
        function = FUNCTIONS[name]
        if name == "a closed tensor":
            function = lambda s, b, h, i, j: s + tensor[h, i]  # noqa: E731
        out: Tensor = tandem.flex_attention(q * 2, k, v, function) + 1
        return out

    qkv = inputs()
    for call in (lambda *t: tandem.flex_attention(*t, FUNCTIONS[name]), made):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="eager")(*qkv), call(*qkv))
    torch._dynamo.reset()
    q, k, v = (t.transpose(1, 2) for t in qkv)
    compiled = torch.compile(tandem.attention, backend="eager")
    expected = tandem.attention(q, k, v, score_mod=FUNCTIONS[name])
    torch.testing.assert_close(compiled(q, k, v, score_mod=FUNCTIONS[name]), expected)
