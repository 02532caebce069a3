"""A layout's work and traffic as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tandem._errors import InvalidArgumentError
from tandem.distributed import _routes
from tandem.distributed._layout import Layout
from tandem.distributed._mask import Mask

_LABEL, _BAR, _GAP, _LINE, _TOP = 64, 200, 24, 22, 44  # pixels
_COLOURS = ("#3b6ea5", "#c98a2b", "#7a9a4f")


def draw(
    layout: Layout, *, causal: bool = False, window: tuple[int, int] = (-1, -1), row_bytes: int = 0
) -> str:
    """What `balance` prints as bars, an SVG: of each rank the visible pairs of query and key, a line being
    their mean, and the rows of K and V that it receives and sends with the strategy "gather".

    Args:
      layout: which rank holds which rows.
      causal, window: as for `context_parallel_attention`.
      row_bytes: of a row of K and V of all heads, ``heads_kv * (head_dim_qk + head_dim_v)`` times the bytes
        of an element: traffic is then labelled in MB. 0: in rows.

    Returns:
      The text of an SVG file. In a notebook ``IPython.display.SVG(draw(layout))`` shows it.

    Raises:
      InvalidArgumentError: row_bytes is below 0.
    """
    if row_bytes < 0:
        raise InvalidArgumentError(f"row_bytes is {row_bytes}; it must be at least 0")
    mask = Mask.of(causal, window)
    unit = "MB" if row_bytes else "rows"
    columns = {
        "visible pairs": layout.pairs(causal=causal, window=window),
        f"{unit} received": _routes.received(layout, mask),
        f"{unit} sent": _routes.sent(layout, mask),
    }
    width = _LABEL + len(columns) * (_BAR + _GAP)
    height = _TOP + layout.ranks * _LINE + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(4, 16, f"{layout.kind}, {layout.total} rows on {layout.ranks} ranks"),
    ]
    lines += [_text(4, _TOP + r * _LINE + 15, f"rank {r}") for r in range(layout.ranks)]
    for i, (name, values) in enumerate(columns.items()):
        x = _LABEL + i * (_BAR + _GAP)
        scale = row_bytes / 1e6 if i and row_bytes else 1.0
        lines.append(_text(x, _TOP - 8, name))
        lines += _bars(x, values, scale, _COLOURS[i])
    pairs = columns["visible pairs"]
    mean = _LABEL + _BAR * sum(pairs) / layout.ranks / max(1, *pairs)
    lines.append(f'<path d="M{mean:.1f} {_TOP}V{height - 8}" stroke="black" stroke-dasharray="3 3"/>')
    return "\n".join((*lines, "</svg>\n"))


def _bars(x: int, values: Sequence[int], scale: float, colour: str) -> list[str]:
    """A bar a rank, the longest of full length, with its number."""
    most, lines = max(1, *values), []
    for r, value in enumerate(values):
        y = _TOP + r * _LINE
        lines.append(
            f'<rect x="{x}" y="{y + 3}" width="{_BAR * value / most:.1f}" height="{_LINE - 6}" '
            f'fill="{colour}" fill-opacity="0.6"/>'
        )
        lines.append(_text(x + 4, y + 15, f"{value}" if scale == 1.0 else f"{value * scale:.2f}"))
    return lines


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
