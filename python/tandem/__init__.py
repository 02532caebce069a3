"""Tandem: exact attention, forward and backward, at the speed of the machine it runs on.

    import tandem

    # NumPy arrays or PyTorch tensors, (batch, seqlen, heads, head_dim)
    out = tandem.attention(q, k, v, causal=True)

``help(tandem.attention)`` says what its arguments mean.
"""

# Read by tandem._errors: a package `tandem` of another distribution has other words here, or none.
__distribution__ = "tandem-attention"

from tandem._api import __version__, attention, attention_backward
from tandem._cache import append_kv, merge
from tandem._errors import (
    ExecutionError,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    TandemError,
    UnsupportedError,
)
from tandem._flex import flex_attention
from tandem._info import info, stats
from tandem._log import set_log_level
from tandem._plans import explain, workspace_bytes
from tandem._quantize import quantize

__all__ = [
    "ExecutionError",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "TandemError",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "explain",
    "flex_attention",
    "info",
    "merge",
    "quantize",
    "set_log_level",
    "stats",
    "workspace_bytes",
]
