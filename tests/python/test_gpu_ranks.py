"""What attention over ranks keeps on a GPU between calls, on streams of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tandem.distributed import Layout, _arriving, _heads
from tandem.distributed._calls import Group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")

DEVICE = torch.device("cuda", 0)


def of_group(read: Callable[[Group], list[torch.Tensor]]) -> Callable[[], Callable[[], list[torch.Tensor]]]:
    def make() -> Callable[[], list[torch.Tensor]]:
        group = Group(-1, -1, [(0, 4, 0, 4), (5, 9, 5, 9)], [(0, 0, 0, 1)] * 2)
        return lambda: read(group)

    return make


def order() -> Callable[[], list[torch.Tensor]]:
    layout = Layout.zigzag(64, 1)

    def use() -> list[torch.Tensor]:
        found = _heads.order_of(layout, DEVICE)
        ranks: Any = SimpleNamespace(size=1, rank=0)
        _heads.Exchange(ranks, found, 2, 2)
        return [found.by_rank]

    return use


def places() -> Callable[[], list[torch.Tensor]]:
    link = _arriving.Link(20, torch.arange(20, device=DEVICE))
    route: Any = SimpleNamespace(own=link, going=[], coming=[])
    k = torch.empty(1, 20, 1, 8, device=DEVICE)
    ranks: Any = None

    def use() -> list[torch.Tensor]:
        _arriving._Chunks(route, ranks, k, k, [(0, 1)])
        assert isinstance(link.places, torch.Tensor)
        return [link.places]

    return use


KEPT: dict[str, Callable[[], Callable[[], list[torch.Tensor]]]] = {
    "cu_seqlens": of_group(lambda group: [*group.cu_seqlens(DEVICE)]),
    "table": of_group(lambda group: [group.table(DEVICE)]),
    "dropout_places": of_group(lambda group: [group.dropout_places(DEVICE, 1, 2, 0)]),
    "order of heads": order,
    "places of rows": places,
}


@pytest.mark.parametrize("name", KEPT)
def test_memory_is_not_given_away_while_a_stream_reads_it(name: str) -> None:
    """A table is allocated on one stream, used on another that is busy, and forgotten."""
    use = KEPT[name]()
    use()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)  # half a second
        addresses = {t.data_ptr() for t in use()}
    del use
    others = [torch.empty(3, dtype=torch.int32, device=DEVICE) for _ in range(10_000)]
    assert not side.query()  # it still reads
    assert not addresses & {t.data_ptr() for t in others}
