"""Attention whose rows are divided among the ranks of a process group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem import _call
from tandem.distributed import _operators
from tandem.distributed._begin import Asked, begin
from tandem.distributed._comm import Ranks
from tandem.distributed._job import Job
from tandem.distributed._layout import Layout
from tandem.distributed._parts import Saved
from tandem.distributed._strategies import backward, forward
from tandem.torch import _derivatives

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tandem._api import Options


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    group: Any = None,
    cu_seqlens: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    strategy: str = "auto",
    score_mod: Any = None,
    mask_mod: Any = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **options: Unpack[Options],
) -> Any:
    """Exact attention over sequences whose rows are divided among ranks; autograd flows through it.

    Every rank of the group calls it with its own rows, ``layout.shard`` of the whole tensors, and gets the
    results of those rows: what one device would have given, within the same bounds. The backward pass, too,
    exchanges rows: every rank has to run it, with a loss of zero where it has no rows that count.

    Args:
      q, k, v: the rank's rows, ``(batch, rows, heads, head_dim)``, or of packed sequences ``(rows, heads,
        head_dim)``, as for ``tandem.attention``: on the CPU or a GPU, of the group's backend.
      layout: which rank holds which rows; the same on every rank.
      group: a ProcessGroup, or a DeviceMesh; None is all processes. A mesh of two dimensions has nodes along
        the first one and the ranks of a node along the second one; its ranks are counted row by row.
      cu_seqlens: of all rows, as one device would be given it. It only confirms ``layout.lengths``: reading
        it from a GPU synchronises.
      sink: ``(heads_q,)`` float32, the same on every rank. Its gradient is this rank's share: the sum over
        the ranks is the whole, as of every parameter whose tokens are divided.
      return_lse: also return the log-sum-exp of the rank's rows, ``(batch, heads_q, rows)`` or ``(heads_q,
        rows)``.
      strategy: "gather" (each rank receives the keys that it needs, some heads at a time, while it computes
        others), "ring" (keys go around), "heads" (an all-to-all turns rows into heads; "Ulysses"), on a mesh
        of two dimensions "heads+gather" or "heads+ring" (heads within a node, keys across nodes), or "auto",
        the quickest by a model of the machine, as `explain` tells. The first call of a group exchanges which
        hosts its ranks are on, so that all choose the same.
      score_mod, mask_mod, bias, mask, alibi_slopes: as for ``tandem.attention``, of whole sequences:
        positions are those of the sequence, and arrays are whole and the same on every rank. Gradients of
        what scores read are this rank's share, as the sink's.
      options: as for ``tandem.attention`` (``causal``, ``scale``, ...), of whole sequences; those that are
        not taken are an error that says so. Some mean more here:
      deterministic: gradients are the same bits in every run, in whatever order messages arrive. So they are
        under ``torch.use_deterministic_algorithms``.
      check: compare the arguments of all ranks before anything else is sent: an exchange of 16 bytes between
        hosts, over gloo. On by default; it has to be the same on every rank. Without it ranks that disagree
        wait for one another until the group's time-out, or worse.
      dropout_p, dropout_seed, dropout_offset: the same entries are kept. Without a seed all ranks take one
        that the first rank draws of PyTorch's random numbers.
      sm_limit: NCCL's kernels have the other SMs from the start, instead of once a tile ends.

    In a graph of torch.compile it is an operator, without a graph break; make the layout outside of it. One
    graph serves every layout. A call with functions or dropout is a graph break.

    Returns:
      The result of the rank's rows, with ``return_lse`` a pair of it and the LSE.

    Raises:
      TandemError: on every rank where one of them has passed something wrong or two disagree, before tensors
        are sent (with ``check``). ExecutionError where a rank has died or takes longer than the group's
        time-out, with backends that wait for messages on the host, as gloo does; of NCCL the watchdog ends
        the process.

    Methods: Ring Attention (arXiv:2310.01889), Striped Attention (arXiv:2311.09431), DeepSpeed-Ulysses
    (arXiv:2309.14509).
    """
    return_lse = _call.flag("return_lse", return_lse)
    given: dict[str, Any] = {"check": True, **options}
    call = _call.of_options("context_parallel_attention", given, _call.PARTS)
    functions = (score_mod, bias, alibi_slopes, mask_mod, mask)
    asked = Asked(call, layout, cu_seqlens, strategy, functions)
    if asked.asks_pairs:
        out, lse = _with_pairs(asked, group, q, k, v, sink)
    elif torch.compiler.is_compiling():
        out, lse = _operators.call(asked, group, q, k, v, sink)
    else:
        out, lse = _run(asked, group, q, k, v, sink)
    return (out, lse) if return_lse else out


def _run(asked: Asked, group: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
    """(out, lse) of a call outside of graphs."""
    job, chosen = begin(asked, Ranks.of(group), q, k, v, sink)
    packed, pairs = job.layout.packed, job.options.pairs
    sink = None if sink is None else sink.resolve_neg()
    tensors = (t.resolve_neg() for t in _derivatives.autocast(q, k, v))
    q, k, v = (t.unsqueeze(0) if packed else t for t in tensors)
    attend: Any = _Attention.apply
    out, lse = attend(job, chosen, q, k, v, sink, *(() if pairs is None else pairs.captured))
    # The gradient of squeeze is a view, that of an index a copy into zeros.
    return tuple(t.squeeze(0) if packed else t for t in (out, lse))


#: A function of scores is traced as the call runs, which torch.compile does not follow.
_with_pairs: Any = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """A strategy and its gradients. Tensors have four dimensions."""

    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        strategy: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (t.detach() for t in (q, k, v))
        logits = None if sink is None else sink.detach()
        result = forward(strategy, job, q, k, v, logits)
        ctx.job, ctx.strategy, ctx.read = job, strategy, len(captured)
        # What functions read, too: PyTorch then notices where it is changed before the backward pass.
        kept = (*captured, *(result.kept or ()))
        ctx.save_for_backward(q, k, v, logits, result.out, result.lse, *kept)
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, *kept = ctx.saved_tensors
        captured, kept = kept[: ctx.read], kept[ctx.read :]
        dout = torch.zeros_like(out) if dout is None else dout
        job: Job = ctx.job
        sums: tuple[Tensor | None, ...] = ()
        if job.options.pairs is not None:
            # Hooks of autograd's may have saved copies, and what functions read has changed since.
            pairs = replace(job.options.pairs, captured=tuple(captured)).with_sums()
            job, sums = replace(job, options=replace(job.options, pairs=pairs)), pairs.sums
        saved = Saved(q, out, lse, dout, dlse)
        logits = sink if ctx.needs_input_grad[5] else None
        gradients = backward(ctx.strategy, job, saved, k, v, logits, kept or None)
        of_read = (None if s is None else s.to(t.dtype) for s, t in zip(sums, captured, strict=True))
        return (None, None, *gradients, *of_read)
