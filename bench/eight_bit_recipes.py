"""The recipes that the study of gradients in 8 bits compares (`eight_bit_gradients.Recipe`), by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from eight_bit_gradients import BF16, E4M3, E5M2, S8, U8, Format, Group, Operand, Pair, Recipe
from eight_bit_tables import PRODUCTS

FORMATS = (E4M3, E5M2, S8)

#: Groups of the operands of a product, by what scales are called. `line`: the smallest that no sum crosses.
#: `joined`: the second operand of dV, dQ and dK has the row scales that its copy for S or dP has, and they
#: are multiplied into P or dS before that is rounded.
SCALES: dict[str, dict[str, tuple[Group, Group]]] = {
    "tensor": {name: ("tensor", "tensor") for name in PRODUCTS},
    "block": {name: ("block", "block") for name in PRODUCTS},
    "line": {
        "s": ("row", "row"),
        "dp": ("row", "row"),
        "dv": ("column", "column"),
        "dq": ("row", "column"),
        "dk": ("column", "column"),
    },
    "joined": {
        "s": ("row", "row"),
        "dp": ("row", "row"),
        "dv": ("column", "row"),
        "dq": ("row", "row"),
        "dk": ("column", "row"),
    },
}


def pair(product: str, format: Format, scales: str, b: Format | None = None, rotated: bool = False) -> Pair:
    """`format` is that of both operands, or of the first if `b` is given. P in 8-bit integers is u8."""
    groups = SCALES[scales][product]
    a = U8 if format is S8 and product == "dv" else format
    return Pair(Operand(a, groups[0]), Operand(b or format, groups[1]), rotated)


def alone() -> dict[str, dict[str, Recipe]]:
    """Recipes with one product in 8 bits, by product and by format and scales."""
    exact = Recipe(out=None)
    found: dict[str, dict[str, Recipe]] = {}
    for product in PRODUCTS:
        of = found[product] = {}
        for format in FORMATS:
            for scales in SCALES:
                if scales == "joined" and product in ("s", "dp"):
                    continue
                of[f"{format.name}, {scales}"] = replace(exact, **{product: pair(product, format, scales)})
            turned = {product: pair(product, format, "line", rotated=True)}
            mended = replace(exact, **turned)
            if product == "s":
                mended = replace(mended, smooth_k=True)
            if product == "dp":
                of[f"{format.name}, line, V's mean"] = replace(
                    exact, smooth_v=True, dp=pair("dp", format, "line")
                )
                mended = replace(mended, smooth_v=True, delta="rounded")
            if product == "dq":
                of[f"{format.name}, line, K's mean"] = replace(
                    exact, smooth_k=True, dq=pair("dq", format, "line")
                )
            of[f"{format.name}, mended"] = mended
    return found


def one_copy(
    format: Format,
    operands: Group,
    tiles: str,
    mended: bool = True,
    sixteen_bits: tuple[str, ...] = (),
    stochastic: bool = False,
    gradients: Format | None = None,
    scores: Format | None = None,
) -> Recipe:
    """Q, K, V and dO are rounded once, with scales by `operands`, and all products read these values, the
    forward pass's too (docs/numerics.md has its recipes). P and dS have scales as `tiles` says.

    `mended`: rotation where the forward pass has it (Q and K, and V with s8; dO as V), K's mean removed, and
    delta from the rounded dO. As V is the forward's, rows of dS then add up to 0 before they are rounded.
    Products that `sixteen_bits` names ("s", "dp") stay in 16 bits. If given, `gradients` is the format of dO
    and dS, and `scores` that of Q and K for Q K^T, whose copies for dK and dQ then have other values.
    """
    of_gradients = gradients or format
    rotates_v = mended and format is S8
    p = U8 if format is S8 else format
    p_forward: Group = "row" if format is S8 and operands != "tensor" else "tensor"

    def product(a: Format, b: Format, name: str) -> Pair:
        group = SCALES[tiles][name][0] if name in ("dv", "dq", "dk") else operands
        turned = rotates_v if name in ("dp", "dv") else mended
        return Pair(Operand(a, group, stochastic and name in ("dq", "dk")), Operand(b, operands), turned)

    in_eight = {
        "s": product(scores or format, scores or format, "s"),
        "pv": Pair(Operand(p, p_forward), Operand(format, operands), rotates_v),
        "dp": product(of_gradients, format, "dp"),
        "dv": product(p, of_gradients, "dv"),
        "dq": product(of_gradients, format, "dq"),
        "dk": product(of_gradients, format, "dk"),
    }
    for name in sixteen_bits:
        del in_eight[name]
    delta: Literal["out", "rounded"] = "rounded" if mended and "dp" in in_eight else "out"
    return Recipe(**in_eight, smooth_k=mended, delta=delta)


def folded() -> Recipe:
    """S and dP of the int8 forward pass's values and of dO alike; the other products' operands in e4m3, whose
    range takes the place of scales that only all of a tile would tell: a kernel rounds what it has."""
    product = Pair(Operand(E4M3, "one"), Operand(E4M3, "one"))
    turned = product._replace(rotated=True)
    return replace(one_copy(S8, "block", "line"), dv=turned, dq=turned, dk=turned, folded=True)


def sixteen() -> Recipe:
    """The 16-bit kernel: P and dS rounded to bf16, as q, k, v and dO are from the start."""
    product = Pair(Operand(BF16, "one"), Operand(BF16, "one"))
    return Recipe(pv=product, dv=product, dq=product, dk=product)


def together() -> dict[str, Recipe]:
    """Whole recipes, by the format of products, the scales, and what mends them."""
    best = one_copy(S8, "block", "line")
    unturned = replace(one_copy(S8, "block", "line", mended=False), smooth_k=True, delta="rounded")
    return {
        "bf16": sixteen(),
        "e4m3, tensor": one_copy(E4M3, "tensor", "tensor", mended=False),
        "e4m3, e5m2, tensor": one_copy(E4M3, "tensor", "tensor", mended=False, gradients=E5M2),
        "e4m3, block": one_copy(E4M3, "block", "block", mended=False),
        "e4m3, block, mended": one_copy(E4M3, "block", "block"),
        "e4m3, row, mended": one_copy(E4M3, "row", "line"),
        "e4m3, block, mended, dP 16": one_copy(E4M3, "block", "block", sixteen_bits=("dp",)),
        "e4m3, block, mended, S 16": one_copy(E4M3, "block", "block", sixteen_bits=("s",)),
        "e4m3, block, mended, S s8": one_copy(E4M3, "block", "block", scores=S8),
        "s8, tensor": one_copy(S8, "tensor", "tensor", mended=False),
        "s8, block": one_copy(S8, "block", "block", mended=False),
        "s8, block, mended": one_copy(S8, "block", "block"),
        "s8, line": one_copy(S8, "block", "line", mended=False),
        "s8, line, mended": best,
        "s8, line, mended, but rotation": unturned,
        "s8, line, mended, but K's mean": replace(best, smooth_k=False),
        "s8, line, mended, but delta": replace(best, delta="out"),
        "s8, line, mended, and V's mean": replace(best, smooth_v=True),
        "s8, line, mended, delta of P dP": replace(best, delta="sum"),
        "s8, line, mended, stochastic": one_copy(S8, "block", "line", stochastic=True),
        "s8, line, mended, dP 16": one_copy(S8, "block", "line", sixteen_bits=("dp",)),
        "s8, row, mended": one_copy(S8, "row", "line"),
        "s8, P and dS e4m3": folded(),
    }


def learning() -> dict[str, Recipe]:
    """What models are trained by. `bf16` and `exact` show how far two runs part without 8 bits."""
    every = {"exact": Recipe(out=None), **together()}
    names = ("bf16", "s8, line, mended", "e4m3, e5m2, tensor", "s8, tensor", "exact")
    return {name: every[name] for name in names}
