"""The counters of `tandem.stats` for Prometheus: ``pip install tandem-attention[metrics]``."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tandem import _core

__all__ = ["register"]


class _Counters(Collector):
    def collect(self) -> Iterable[Metric]:
        return text_string_to_metric_families(_core.stats_text())


def register(registry: CollectorRegistry = REGISTRY) -> Collector:
    """Adds the library's counters to what a registry of ``prometheus_client`` serves.

    They are read whenever it is scraped; calls notice nothing. Every process has its own.

    Args:
      registry: where to; the process's own by default.

    Returns:
      What ``registry.unregister`` takes.
    """
    counters = _Counters()
    registry.register(counters)
    return counters
