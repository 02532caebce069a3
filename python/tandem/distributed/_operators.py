"""The operators of torch.ops.tandem_distributed: what a compiled graph calls.

``attention`` validates, compares and plans as it runs, as a call outside of a graph does, so that one graph
serves every layout: it takes the layout as a tensor (`Layout.code`) and groups by their names. The strategy
that it chose is a result, for ``attention_backward``. What "heads" keeps between the passes outside of a
graph, it sends once more here: which tensors those are is not known while a graph is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tandem import _call
from tandem._errors import InvalidArgumentError
from tandem.distributed._begin import Asked, begin, settled
from tandem.distributed._comm import Ranks
from tandem.distributed._cost import STRATEGIES
from tandem.distributed._job import Job
from tandem.distributed._layout import Layout
from tandem.distributed._machine import Links
from tandem.distributed._mask import Mask
from tandem.distributed._parts import Options, Saved
from tandem.distributed._strategies import backward, forward
from tandem.torch import _derivatives
from tandem.torch._operators import library_of

_OPTIONS = f"Tensor layout, str[] groups, {_call.schema()}"
_SCHEMAS = (
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? sink, {_OPTIONS}, Tensor? cu_seqlens, str strategy,"
    " bool gradients) -> (Tensor out, Tensor lse, Tensor strategy)",
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out,"
    f" Tensor lse, {_OPTIONS}, Tensor strategy, bool need_dsink)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
)


def call(
    asked: Asked, group: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call within a graph that is being traced."""
    if not isinstance(asked.layout, Layout):
        raise InvalidArgumentError(f"layout is {asked.layout!r}; make one with tandem.distributed.Layout")
    q, k, v = _derivatives.autocast(q, k, v)
    out, lse, _ = torch.ops.tandem_distributed.attention(
        q,
        k,
        v,
        sink,
        asked.layout.code,
        _names(group),
        *asked.call.flat()[: _call.FLAT_OPTIONS],
        asked.cu_seqlens,
        asked.strategy,
        _derivatives.is_recorded(q, k, v, sink),
    )
    return out, lse


def _names(group: Any) -> list[str]:
    """The names of a group, or of the groups along the dimensions of a mesh."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return [group.group_name]
    return [group.get_group(i).group_name for i in range(group.ndim)]


def _ranks(groups: Sequence[str]) -> Ranks:
    if len(groups) not in (1, 2):
        raise InvalidArgumentError(
            f"group is a DeviceMesh of {len(groups)} dimensions; pass those that rows are divided over, one "
            "or two: mesh['name'] or mesh['across', 'within']"
        )
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return Ranks.of_groups([resolve(name) for name in groups])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, code: Tensor, groups: Sequence[str], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *options, cu_seqlens, strategy, gradients = rest
    layout = Layout.of_code(code)
    asked = Asked(_call_of(options), layout, cu_seqlens, strategy)
    job, chosen = begin(asked, _ranks(groups), q, k, v, sink, gradients)
    q, k, v = _four(layout, q, k, v)
    result = forward(chosen, job, q, k, v, sink)
    out, lse = (t.squeeze(0) if layout.packed else t for t in (result.out, result.lse))
    return out, lse, torch.tensor(STRATEGIES.index(chosen))


def _backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v, sink, out, lse, code, groups, *options, strategy, need_dsink = rest
    call, layout = settled(_call_of(options)), Layout.of_code(code)
    ranks = _ranks(groups)
    links = Links.of(q.device.type, ranks.hosts(), ranks.levels[1].size if ranks.levels else 0)
    job = Job(ranks, layout, Mask.of(call.causal, call.window), Options(call), links.far)
    q, k, v, out, lse, dout, *more = _four(layout, q, k, v, out, lse, dout, *([] if dlse is None else [dlse]))
    chosen, dlse = STRATEGIES[int(strategy)], more[0] if more else None
    saved = Saved(q, out, lse, dout, dlse)
    *found, dsink = backward(chosen, job, saved, k, v, sink if need_dsink else None, None)
    gradients = [t.squeeze(0) if layout.packed else t for t in found if t is not None]
    return (*gradients, out.new_empty(0) if dsink is None else dsink)


def _call_of(options: Sequence[Any]) -> _call.Call:
    return _call.Call.of_flat((*options, *_call.Call().metadata))


def _four(layout: Layout, *tensors: Tensor) -> list[Tensor]:
    """With the batch that strategies want."""
    return [t.detach().unsqueeze(0) if layout.packed else t.detach() for t in tensors]


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(_call.lse_shape(q), dtype=torch.float32)
    chosen = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse, chosen


def _fake_backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v, sink, *_, need_dsink = rest
    dsink = q.new_empty(0) if sink is None or not need_dsink else torch.empty_like(sink)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dsink)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    q, k, v, sink, code, groups, *options, _, _, _ = inputs
    out, lse, chosen = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(chosen)
    ctx.save_for_backward(q, k, v, sink, out, lse, code, chosen)
    ctx.groups, ctx.options, ctx.count = groups, options, len(inputs)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, code, chosen = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    need_dsink = sink is not None and ctx.needs_input_grad[3]
    *gradients, dsink = torch.ops.tandem_distributed.attention_backward(
        dout, dlse, q, k, v, sink, out, lse, code, ctx.groups, *ctx.options, chosen, need_dsink
    )
    return (*gradients, dsink if need_dsink else None, *(None,) * (ctx.count - 4))


_library = library_of(
    "tandem_distributed",
    _SCHEMAS,
    (("attention", _forward, _fake_forward), ("attention_backward", _backward, _fake_backward)),
)
for _name, _setup, _derivative in (
    ("attention", _save, _differentiate),
    ("attention_backward", _derivatives.save_nothing, _derivatives.no_second_derivative),
):
    torch.library.register_autograd(
        f"tandem_distributed::{_name}", _derivative, setup_context=_setup, lib=_library
    )
