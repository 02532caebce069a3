"""Attention's gradients with the operands of each product rounded as a recipe says, and all else exact.

Sums are in the tensors' dtype (f64 in the study), so that nothing but the named roundings shows. Tensors are
(..., rows, channels): leading dimensions are batch and KV heads, and the query heads of a KV head stand
behind one another in the rows of q.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # rows of a scale block, and both sides of a tile of P and dS


@dataclass(frozen=True)
class Format:
    """What a value is rounded to: `mantissa` bits behind the point, or whole numbers if it has none."""

    name: str
    limit: float
    mantissa: int | None = None
    least: int = 0  #: exponent of the smallest normal number

    def round(self, x: Tensor, stochastic: bool = False) -> Tensor:
        """To nearest, ties to even, or at random to one of both neighbours with x as the mean; saturated."""
        x = x.float().clamp(-self.limit, self.limit)
        if self.mantissa is None:
            return (x + torch.rand_like(x)).floor() if stochastic else x.round()
        exponent = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^floor(log2 |x|)
        quantum = exponent.clamp_(min=2.0**self.least).mul_(2.0**-self.mantissa)
        x = x / quantum
        x = (x + torch.rand_like(x)).floor_() if stochastic else x.round_()
        return x.mul_(quantum)


E4M3, E5M2 = Format("e4m3", 448, 3, -6), Format("e5m2", 57344, 2, -14)
S8, U8 = Format("s8", 127), Format("u8", 255)
BF16 = Format("bf16", float(torch.finfo(torch.bfloat16).max), 7, -126)

#: What shares a scale. `block`: 128 rows, of P and dS a tile of 128 x 128; `row`: a row (of that tile);
#: `column`: a channel of 128 rows, or a column of the tile; `one`: no scale, since values fit the format.
Group = Literal["one", "tensor", "block", "row", "column"]


class Operand(NamedTuple):
    format: Format
    group: Group
    stochastic: bool = False


class Pair(NamedTuple):
    """The operands of a product. `rotated`: channels are multiplied by random signs and a Hadamard matrix. S
    and dP are the same for it; the other products undo it on their result."""

    a: Operand
    b: Operand
    rotated: bool = False


@dataclass(frozen=True)
class Recipe:
    """A product that is None has exact operands."""

    s: Pair | None = None  #: Q and K
    pv: Pair | None = None  #: the forward pass's P and V
    dp: Pair | None = None  #: dO and V
    dv: Pair | None = None  #: P and dO
    dq: Pair | None = None  #: dS and K
    dk: Pair | None = None  #: dS and Q
    smooth_k: bool = False  #: K's mean is removed: S changes by a constant a row, and rows of dS add up to 0
    smooth_v: bool = False  #: V's mean is removed from V and O: dP and delta change by the same
    #: delta is the sum of dO * O, of the dO that dP's product rounded * O, or of P * dP
    delta: Literal["out", "rounded", "sum"] = "out"
    out: Format | None = BF16  #: what the forward pass rounded O to
    #: P, dS and what they meet have no scales found in them, but factors of rows that are known before
    #: (`Attention.factors`)
    folded: bool = False


class Factors(NamedTuple):
    """What operands are multiplied by before they are rounded: P and dS a number a query, others a row."""

    p: Tensor | None = None
    do: Tensor | None = None
    ds: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


@functools.cache
def rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs and a Hadamard matrix over sqrt(size): orthogonal."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < size:
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (signs * hadamard / size**0.5).to(device, dtype)


def rotate(x: Tensor) -> Tensor:
    return x @ rotation(x.shape[-1], x.dtype, x.device)


def unrotate(x: Tensor) -> Tensor:
    return x @ rotation(x.shape[-1], x.dtype, x.device).T


def largest(tiles: Tensor, group: Group) -> Tensor:
    """Of each group's magnitudes, from (..., row blocks, rows, column blocks, columns)."""
    if group == "tensor":
        return torch.linalg.vector_norm(tiles, torch.inf)
    dims = {"block": (-3, -1), "row": (-1,), "column": (-3,)}[group]
    return torch.linalg.vector_norm(tiles, torch.inf, dims, keepdim=True)


def rounded(x: Tensor, operand: Operand, most: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values times scale, and the scale that each value has. `most` is the tensor's largest magnitude, where
    x is a part of it. The quotient is an f32 one, as the quantiser's."""
    if operand.group == "one":
        return operand.format.round(x, operand.stochastic).to(x), torch.ones(()).to(x)
    sides = (min(BLOCK, x.shape[-2]), min(BLOCK, x.shape[-1]))
    tiles = x.unflatten(-2, (-1, sides[0])).unflatten(-1, (-1, sides[1]))
    scale = (largest(tiles, operand.group) if most is None else most).float() / operand.format.limit
    scale = scale.where(scale > 2.0**-100, 1.0)
    values = operand.format.round(tiles.float() / scale, operand.stochastic)
    return (values.to(x) * scale.to(x)).reshape(x.shape), scale.to(x)


def second(x: Tensor, pair: Pair | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The second operand of a product over its rows, and the scales of these rows if each has one: they are
    constant over no sum, and so join the first operand before that is rounded."""
    if pair is None:
        return x, None
    x = rotate(x) if pair.rotated else x
    if factors is not None:
        return rounded(x * factors, pair.b)[0] / factors, None
    values, scale = rounded(x, pair.b)
    return values, scale.reshape(*x.shape[:-1], 1) if pair.b.group == "row" else None


def first(x: Tensor, pair: Pair | None, joined: Tensor | None, most: Tensor | None = None) -> Tensor:
    if pair is None:
        return x
    if joined is None:
        return rounded(x, pair.a, most)[0]
    return rounded(x * joined, pair.a, most)[0] / joined


def s8_scale(x: Tensor) -> Tensor:
    """Each row's scale in s8 by block; 0 of zeros."""
    blocks = x.unflatten(-2, (-1, min(BLOCK, x.shape[-2])))
    scale = blocks.abs().amax((-2, -1), keepdim=True) / S8.limit
    return scale.expand(*blocks.shape[:-1], 1).flatten(-3, -2)


def power_of_two(x: Tensor) -> Tensor:
    """The smallest that is at least x; 1 of 0."""
    return x.where(x > 0, 1.0).log2().ceil().exp2()


def over_channels(a: Tensor, b: Tensor, pair: Pair | None) -> tuple[Tensor, Tensor]:
    """The operands of a product over channels, rotated alike."""
    if pair is None:
        return a, b
    if pair.rotated:
        a, b = rotate(a), rotate(b)
    return rounded(a, pair.a)[0], rounded(b, pair.b)[0]


def undo(x: Tensor, pair: Pair | None) -> Tensor:
    return unrotate(x) if pair is not None and pair.rotated else x


class Attention:
    """A layer's attention by a recipe. `window`: keys before and behind its own that a row sees, -1 all."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, window: tuple[int, int] = (-1, 0)
    ) -> None:
        self.q, self.k, self.v, self.recipe, self.window = q, k, v, recipe, window
        self.scale = q.shape[-1] ** -0.5
        self.tokens = k.shape[-2]
        self.k_centred = k - k.mean(-2, keepdim=True) if recipe.smooth_k else k
        self.v_mean = v.mean(-2, keepdim=True) if recipe.smooth_v else torch.zeros_like(v[..., :1, :])
        self.s_operands = over_channels(q, self.k_centred, recipe.s)
        self.v_operand, self.v_rows = second(v, recipe.pv)
        self.outs: Tensor | None = None  #: what the forward pass has left, if it has run

    def chunks(self, chunk: int) -> Iterator[tuple[slice, slice]]:
        """Rows of q, `chunk` of one head, and the blocks of keys that they see."""
        left, right = self.window
        for start in range(0, self.q.shape[-2], min(chunk, self.tokens)):
            rows = slice(start, start + min(chunk, self.tokens))
            at = start % self.tokens
            begin = max(0, at - left) // BLOCK * BLOCK if left >= 0 else 0
            end = at + rows.stop - start + right if right >= 0 else self.tokens
            yield rows, slice(begin, min(self.tokens, -(-end // BLOCK) * BLOCK))

    def weights(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """exp(s - the row's largest), and the sum of each row."""
        q, k = self.s_operands
        left, right = self.window
        at = torch.arange(rows.start, rows.stop, device=q.device) % self.tokens
        distance = torch.arange(keys.start, keys.stop, device=q.device) - at[:, None]
        hidden = ((distance > right) & (right >= 0)) | ((-distance > left) & (left >= 0))
        s = (q[..., rows, :] @ k[..., keys, :].mT).mul_(self.scale).masked_fill_(hidden, -torch.inf)
        p = s.sub_(s.amax(-1, keepdim=True)).exp_()
        return p, p.sum(-1, keepdim=True)

    def out_of(self, p: Tensor, total: Tensor, keys: slice) -> Tensor:
        pair = self.recipe.pv
        joined = None if self.v_rows is None else self.v_rows[..., keys, :].mT
        out = undo(first(p, pair, joined, p_most(pair, p)) @ self.v_operand[..., keys, :], pair) / total
        return out if self.recipe.out is None else self.recipe.out.round(out).to(out)

    def out(self, chunk: int) -> Tensor:
        outs = [self.out_of(*self.weights(rows, keys), keys) for rows, keys in self.chunks(chunk)]
        self.outs = torch.cat(outs, -2)
        return self.outs

    def p_and_ds(
        self, dout: Tensor, operands: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> tuple[Tensor, Tensor]:
        """P, and dS without the logits' scale."""
        p, total = self.weights(rows, keys)
        out = self.out_of(p, total, keys) if self.outs is None else self.outs[..., rows, :]
        out = out - self.v_mean
        p = p.div_(total)
        left, right = operands[0][..., rows, :], operands[1][..., keys, :]
        dp = left @ right.mT
        match self.recipe.delta:
            case "out":
                delta = (dout[..., rows, :] * out).sum(-1, keepdim=True)
            case "rounded":
                turned = self.recipe.dp is not None and self.recipe.dp.rotated
                delta = (left * (rotate(out) if turned else out)).sum(-1, keepdim=True)
            case "sum":
                delta = (p * dp).sum(-1, keepdim=True)
        return p, dp.sub_(delta).mul_(p)

    def factors(self, dout: Tensor, chunk: int) -> Factors:
        """Of a row r, the root of P's largest value but for a power of two, divides P and dS and multiplies
        what they meet: the largest becomes a number that e4m3 has. What else is in the factors is by block or
        by KV head."""
        most = torch.cat([1 / self.weights(*at)[1] for at in self.chunks(chunk)], -2)
        r = most / (most.log2() / 2).round().exp2()
        v = s8_scale(rotate(self.v)).amax(-2, keepdim=True)
        ds = r * s8_scale(rotate(dout)) * v.where(v > 0, 1.0)  # over which dS is rounded
        do_norms, q_norms = dout.norm(dim=-1, keepdim=True), self.q.norm(dim=-1, keepdim=True) * r
        of_do = power_of_two((do_norms * r).amax(-2, keepdim=True) / E4M3.limit)
        blocks = [x.unflatten(-2, (-1, min(BLOCK, self.tokens))).amax(-2) for x in (do_norms, q_norms)]
        of_q = power_of_two((blocks[0] * blocks[1]).amax(-2, keepdim=True) * v / S8.limit / E4M3.limit)
        return Factors(
            p=256 / r,
            do=r / of_do,
            ds=2.0**-10 / ds.where(ds > 0, 1.0),
            q=ds / of_q,
            k=2 / s8_scale(rotate(self.k_centred)).clamp_min(2.0**-100),
        )

    def gradients(self, dout: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV. Of dS with one scale a tensor the largest magnitude is found by a pass before."""
        recipe = self.recipe
        operands = over_channels(dout, self.v - self.v_mean, recipe.dp)
        factors = self.factors(dout, chunk) if recipe.folded else Factors()
        do, do_rows = second(dout, recipe.dv, factors.do)
        q, q_rows = second(self.q, recipe.dk, factors.q)
        k, k_rows = second(self.k_centred, recipe.dq, factors.k)
        if recipe.folded:
            do_rows, q_rows = factors.p, factors.ds
        most = None
        if is_tensor(recipe.dq) or is_tensor(recipe.dk):
            each = [largest(self.p_and_ds(dout, operands, *at)[1], "tensor") for at in self.chunks(chunk)]
            most = torch.stack(each).amax()
        dq = torch.empty_like(self.q)
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        for rows, keys in self.chunks(chunk):
            p, ds = self.p_and_ds(dout, operands, rows, keys)
            p_dv = first(p, recipe.dv, part(do_rows, rows), p_most(recipe.dv, p))
            ds_dk = first(ds, recipe.dk, part(q_rows, rows), most if is_tensor(recipe.dk) else None)
            k_joined = part(factors.ds, rows) if k_rows is None else k_rows[..., keys, :].mT
            ds_dq = first(ds, recipe.dq, k_joined, most if is_tensor(recipe.dq) else None)
            dv[..., keys, :] += p_dv.mT @ do[..., rows, :]
            dk[..., keys, :] += ds_dk.mT @ q[..., rows, :]
            dq[..., rows, :] = ds_dq @ k[..., keys, :]
        return undo(dq, recipe.dq) * self.scale, undo(dk, recipe.dk) * self.scale, undo(dv, recipe.dv)


def part(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[..., rows, :]


def is_tensor(pair: Pair | None) -> bool:
    return pair is not None and pair.a.group == "tensor"


def p_most(pair: Pair | None, p: Tensor) -> Tensor | None:
    """P's largest magnitude, known beforehand, where P has one scale a tensor."""
    return torch.ones(()).to(p) if is_tensor(pair) else None
