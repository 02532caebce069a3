"""Into how many chunks of heads the strategy "gather" divides K and V."""

from __future__ import annotations

from tandem.distributed import _routes
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask

#: Operations of a forward pass below which one chunk is quicker: 7 ms of an H200. Each chunk is some twenty
#: launches from Python, 0.3 ms, and smaller kernels, and hides less than 0.1 ms of sending there.
_SMALL = 4e12


@kept_with_layout
def chunk_count(layout: Layout, mask: Mask, heads_kv: int, per_pair: int) -> int:
    """As many as ranks, so that two of them are about as large as two ranks' K and V; one of each head where
    there are fewer. One alone where that is no more than two ranks' K and V and the work is small. The same
    on every rank. ``per_pair``: batch * heads_q * (head_dim_qk + head_dim_v)."""
    most = min(heads_kv, layout.ranks)
    needed = max(a + layout.rows(r) for r, a in enumerate(_routes.received(layout, mask)))
    pairs = max(layout.pairs(window=(mask.left, mask.right)))
    if needed * layout.ranks <= 2 * layout.total and 2 * pairs * per_pair < _SMALL:
        return 1
    return most


def chunks(count: int, heads_kv: int) -> list[tuple[int, int]]:
    """The heads of K and V of each chunk."""
    bounds = [heads_kv * i // count for i in range(count + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
