"""Tables of who has which rows and work, and of what strategies cost."""

from __future__ import annotations

from tandem._errors import InvalidArgumentError
from tandem.distributed import _balance, _cost, _routes
from tandem.distributed._layout import Layout
from tandem.distributed._machine import H200, H200_HOSTS, Links, Machine, Shape
from tandem.distributed._mask import Mask


def explain(
    layout: Layout,
    *,
    heads_q: int,
    heads_kv: int,
    head_dim_qk: int,
    head_dim_v: int | None = None,
    batch: int = 1,
    itemsize: int = 2,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    strategy: str = "auto",
    machine: Machine = H200,
    within: int = 0,
    network: Machine = H200_HOSTS,
) -> str:
    """Which strategy a call of `context_parallel_attention` would take and why, and each rank's rows, work
    and traffic, as a few lines of text. Needs no process group.

    Args:
      layout: which rank holds which rows.
      heads_q, heads_kv, head_dim_qk, head_dim_v, batch: of the call's tensors.
      itemsize: bytes of an element of q, k and v.
      causal, window, strategy: as for the call.
      machine: rates of a rank. Calls take `H200` for CUDA tensors, `H200_HOSTS` where the group's ranks are
        on several hosts, and `CPU` for others.
      within: ranks of a node, for a group of two levels (a DeviceMesh of two dimensions); 0 for one level.
      network: rates across nodes; then ``machine`` has those within one.
    """
    mask = Mask.of(causal, window)
    shape = Shape(batch, heads_q, heads_kv, head_dim_qk, head_dim_v or head_dim_qk, itemsize)
    if within < 0 or within and layout.ranks % within:
        raise InvalidArgumentError(
            f"within is {within}; it must divide the layout's {layout.ranks} ranks into nodes"
        )
    links = Links(within, machine, network if within else machine)
    chosen = _cost.choose(layout, mask, shape, links, strategy)
    lines = [f"{chosen}: {'asked for' if strategy != 'auto' else 'the quickest by the model'}"]
    for e in _cost.estimates(layout, mask, shape, links):
        told = e.unavailable or f"{1e3 * e.seconds:.3f} ms, {e.bytes / 1e6:.2f} MB received by a rank"
        lines.append(f"  {e.strategy:{14 if within else 8}}{told}")
    return "\n".join(lines) + "\n" + balance(layout, causal=causal, window=window)


def balance(
    layout: Layout, *, causal: bool = False, window: tuple[int, int] = (-1, -1), row_pairs: float = 0.0
) -> str:
    """Each rank's rows, visible pairs of query and key, and rows of K and V that it sends and receives with
    the strategy "gather", as a table; exact. The last line compares the rows received with the least that any
    layout of these sequences can do whose busiest rank has as much work as this one's. ``row_pairs``: as for
    `Layout.balanced`."""
    mask = Mask.of(causal, window)
    pairs = layout.pairs(causal=causal, window=window)
    received, sent = _routes.received(layout, mask), _routes.sent(layout, mask)
    lines = [f"{layout.kind}, {layout.total} rows in {len(layout.lengths)} sequences"]
    lines.append(f"{'rank':>6}{'rows':>12}{'pairs':>16}{'of mean':>9}{'sent':>12}{'received':>12}")
    mean = sum(pairs) / layout.ranks
    for r in range(layout.ranks):
        share = pairs[r] / mean if mean else 1.0
        lines.append(f"{r:6}{layout.rows(r):12}{pairs[r]:16}{share:9.3f}{sent[r]:12}{received[r]:12}")
    cost = [p + row_pairs * layout.rows(r) for r, p in enumerate(pairs)]
    least = _balance.least_rows(_balance.Work(layout.lengths, mask, row_pairs), max(cost))
    ratio = f", {sum(received) / least:.3f} times that" if least else ""
    lines.append(
        f"busiest / mean {max(cost) * layout.ranks / sum(cost) if sum(cost) else 1.0:.4f}; rows received"
    )
    lines[-1] += f" {sum(received)}, at least {least}{ratio}"
    return "\n".join(lines)
