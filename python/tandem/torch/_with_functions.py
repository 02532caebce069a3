"""Functions of the user's own on PyTorch's tensors: what calls with them, or with dropout, do not take, and
which tracer reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _call
from tandem._errors import UnsupportedError
from tandem.functions import _functions, _kept_traces
from tandem.torch import _derivatives, _direct, _graph


def validate(name: str, tensors: dict[str, Any]) -> None:
    """An error where one of the tensors is none that a call with the argument `name` takes."""
    transformed = torch._C._are_functorch_transforms_active()
    for what, t in tensors.items():
        if isinstance(t, Tensor) and (type(t) not in _direct.PLAIN or t.is_meta or transformed):
            found = (
                "under a transform of torch.func" if transformed else f"a {type(t).__name__} on {t.device}"
            )
            raise UnsupportedError(
                f"{name} is given, and {what} is {found}, but calls with functions or dropout take "
                "plain tensors; differentiate them by torch.autograd, leave them out of what torch.export "
                "traces, or take PyTorch's scaled_dot_product_attention there"
            )


def validate_call(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, captured: Any) -> None:
    """Errors of what calls with functions, which read the `captured` tensors, or dropout do not do."""
    named = {"q": q, "k": k, "v": v, "sink": sink}
    named |= {f"tensor {i} that it reads": t for i, t in enumerate(captured)}
    validate("dropout_p" if call.functions is None else "a function", named)
    if forward_ad._current_level >= 0:
        _derivatives.validate_tangents("attention", named)


def of_call(call: _call.Call, q: Any, k: Any, *functions: Any) -> Any:
    score_mod, bias, alibi_slopes, mask_mod, mask = functions
    compiled = torch.compiler.is_dynamo_compiling() or _compiler() is not None
    if not compiled and bias is alibi_slopes is mask is None and _is_plain_batch(call, q, k):
        kept = _kept_traces.again("torch", score_mod, mask_mod)
        if kept is not None:
            return kept
    given = {name: f for name, f in zip(_functions.NAMES, functions, strict=True) if f is not None}
    validate(next(iter(given)), {"q": q, "k": k, **given})
    if not compiled:
        return _functions.of_call(call, q, k, *functions)
    return next(_found(call, q, k, functions))


def _is_plain_batch(call: _call.Call, q: Any, k: Any) -> Any:
    """Whether q and k are plain tensors of sequences of one length, with numbers in them."""
    if type(q) not in _direct.PLAIN or type(k) not in _direct.PLAIN or q.is_meta:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    for t in call.metadata:  # any() of a generator takes three times as long
        if t is not None:
            return False
    return q.numel() > 0 and k.numel() > 0


#: What compiles the frames that run now; None: nothing. A PyTorch that cannot tell may have something.
_compiler: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)


def _found(call: _call.Call, q: Any, k: Any, functions: Any) -> Iterator[Any]:
    """A generator, since torch.compile follows those, but does not compile them for themselves: where it
    cannot follow a function of the user's, the graph breaks here, and what is called runs uncompiled."""
    if torch.compiler.is_dynamo_compiling():
        yield _graph.of_call(call, q, k, *functions)
    else:
        yield _of_call(call, q, k, *functions)


_of_call: Any = torch.compiler.disable(_functions.of_call)  # type: ignore[no-untyped-call]
