"""Attention over many devices: context parallel on torch.distributed.

from tandem.distributed import Layout, context_parallel_attention

layout = Layout.zigzag(seqlen, ranks)
q, k, v = (layout.shard(t, rank) for t in (q, k, v))
out = context_parallel_attention(q, k, v, layout=layout, causal=True)
"""

from tandem.distributed._attention import context_parallel_attention
from tandem.distributed._cache_layout import CacheLayout
from tandem.distributed._decode import context_parallel_decode
from tandem.distributed._explain import balance, explain
from tandem.distributed._layout import Layout, Run
from tandem.distributed._machine import CPU, H200, H200_HOSTS, Machine
from tandem.distributed._rows import gather

__all__ = [
    "CPU",
    "H200",
    "H200_HOSTS",
    "CacheLayout",
    "Layout",
    "Machine",
    "Run",
    "balance",
    "context_parallel_attention",
    "context_parallel_decode",
    "explain",
    "gather",
]
