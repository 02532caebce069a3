"""The direct way of a call: past PyTorch's dispatcher, and without a record of autograd's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _arrays, _call, _core

_arrays.meet_torch()

#: Types of tensors whose memory is their numbers.
PLAIN = (Tensor, torch.nn.Parameter)

#: Whether a profiler sees what is called: operators, and nothing that goes past them.
is_profiled: Any = torch._C._autograd._profiler_enabled

_core.know_states(
    (
        (torch._C._len_torch_dispatch_stack, 0),
        (torch._C._are_functorch_transforms_active, False),
        (torch._C._get_tracing_state, None),
    ),
    forward_ad,
    is_profiled,
    torch.is_grad_enabled,
    torch._C._get_deterministic_algorithms,
)


def is_watched() -> bool:
    """Whether a compiler, torch.jit.trace, forward mode, a mode or a transform follows what is called."""
    return torch.compiler.is_compiling() or _core.is_followed()


def is_possible(*tensors: Any, beside: Sequence[Any] = ()) -> bool:
    """Whether nobody watches a call of these tensors, and of others `beside` them (autograd apart), so that
    the dispatcher can be passed by: it takes 150 us of a call that autograd records, for operators written in
    Python. It makes plain tensors of those whose memory holds the numbers with the other sign."""
    for t in tensors:
        if type(t) not in PLAIN:
            return False
    if is_watched() or tensors[0].is_meta:
        return False
    for t in (*tensors, *beside):
        if t is not None and isinstance(t, Tensor) and t.is_neg():
            return False
    return True


def forward(
    call: _call.Call,
    q: Any,
    k: Any,
    v: Any,
    sink: Any,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = True,
) -> Any:
    """(out, lse, max_logits), whoever follows the call."""
    if out is None and out_dtype is None:
        inputs = (q, k, v, sink, *call.metadata)
        results = _core.forward_tensors(inputs, call.options(), bool(return_lse))
        if results is not None:
            return results
    return _call.forward(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)


def backward(
    call: _call.Call, needed: Sequence[bool], *tensors: Any, gate: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the sink, and of what the call's functions read; None of those that are
    not `needed`. `tensors`: as of _call.backward, and what the functions read. `gate`: that of the gate comes
    behind them."""
    dout, dlse, q, k, v, sink, out, lse, max_logits, *read = tensors
    options = call.options()
    if not gate and not (call.functions is not None and call.functions.differentiated):
        inputs = (q, k, v, sink, *call.metadata, out, lse, dout, dlse, max_logits)
        gradients = _core.backward_tensors(inputs, options, tuple(needed[:4]))
        if gradients is not None:
            return (*gradients, *(None,) * len(read))
    # torch.empty_like is the quickest way to a contiguous tensor.
    made = [
        torch.empty_like(t, memory_format=torch.contiguous_format) if wanted and t is not None else None
        for t, wanted in zip((q, k, v, sink, call.gate), (*needed[:4], gate), strict=True)
    ]
    dout, dlse = rows_contiguous(dout), rows_contiguous(dlse)
    arrays = (q, k, v, sink, *call.metadata, out, lse, dout, dlse, max_logits, *made)
    wanted = [i for i in call.functions.differentiated if needed[4 + i]] if read else ()
    of_read = {i: torch.empty(read[i].shape, dtype=torch.float32, device=q.device) for i in wanted}
    if of_read:
        call.functions.set_gradients(options, [of_read.get(i) for i in range(len(read))])
    _core.backward(arrays, options, _arrays.library_of("q", q).stream(q))
    of_functions = (of_read[i].to(t.dtype) if i in of_read else None for i, t in enumerate(read))
    return (*made[:4], *of_functions, *(made[4:] if gate else ()))


def rows_contiguous(t: Any) -> Any:
    """Autograd hands over expanded gradients (of a sum, for one); the last dimension must be dense."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()
