"""Attention whose rows are divided among the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tandem
from tandem import _call, _derivatives
from tandem._errors import InvalidArgumentError
from tandem.distributed import _agree, _cost, _gather, _heads, _parts, _ring
from tandem.distributed._comm import Ranks
from tandem.distributed._job import Job, Saved
from tandem.distributed._layout import Layout
from tandem.distributed._mask import Mask

_STRATEGIES: dict[str, Any] = {"gather": _gather, "ring": _ring, "heads": _heads}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    group: Any = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    strategy: str = "auto",
    check: bool = True,
) -> Any:
    """Exact attention over sequences whose rows are divided among ranks; autograd flows through it.

    Every rank of the group calls it with its own rows, ``layout.shard`` of the whole tensors, and gets the
    results of those rows: what one device would have given, within the same bounds. The backward pass, too,
    exchanges rows: every rank has to run it, with a loss of zero where it has no rows that count.

    Args:
      q, k, v: the rank's rows, ``(batch, rows, heads, head_dim)``, or of packed sequences ``(rows, heads,
        head_dim)``, as for ``tandem.attention``: on the CPU or a GPU, of the group's backend.
      layout: which rank holds which rows; the same on every rank.
      group: a ProcessGroup, or a DeviceMesh of one dimension; None is all processes.
      cu_seqlens: of all rows, as one device would be given it. It only confirms ``layout.lengths``: reading
        it from a GPU synchronises.
      causal, window, softcap, scale: as for ``tandem.attention``.
      sink: ``(heads_q,)`` float32, the same on every rank. Its gradient is this rank's share: the sum over
        the ranks is the whole, as of every parameter whose tokens are divided.
      deterministic: gradients are the same bits in every run, in whatever order messages arrive. So they are
        under ``torch.use_deterministic_algorithms``.
      return_lse: also return the log-sum-exp of the rank's rows, ``(batch, heads_q, rows)`` or ``(heads_q,
        rows)``.
      strategy: "gather" (each rank receives the keys that it needs, some heads at a time, while it computes
        others), "ring" (keys go around), "heads" (an all-to-all turns rows into heads; "Ulysses"), or "auto",
        the quickest by a model of the machine, as `explain` tells.
      check: compare the arguments of all ranks before anything else is sent: an exchange of 16 bytes, for
        which a GPU's stream is waited for. It has to be the same on every rank. Without it ranks that
        disagree wait for one another until the group's time-out, or worse.

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
    ranks = Ranks.of(group)
    error: Exception | None = None
    asked: dict[str, Any] = {}
    try:
        causal, deterministic = _call.flag("causal", causal), _call.flag("deterministic", deterministic)
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        window = _call.pair("window", window)
        options = _parts.Options(scale, softcap, deterministic)
        asked = _judge(ranks, layout, q, k, v, sink, options, causal=causal, window=window)
        asked["strategy"] = strategy
        _judge_lengths(layout, cu_seqlens)
        mask = Mask.of(causal, window)
        chosen = _cost.choose(layout, mask, _shape(q, k, v, layout), _machine(q, ranks), strategy)
        asked["strategy chosen"] = chosen
    except Exception as found:  # whatever it is, the other ranks wait to be told
        error = found
    if check and ranks.size > 1:
        _agree.agree(ranks, asked, error, getattr(q, "device", torch.device("cpu")))
    if error is not None:
        raise error
    job = Job(ranks, layout, mask, options)
    q, k, v = (t.unsqueeze(0) if layout.packed else t for t in _derivatives.autocast(q, k, v))
    attend: Any = _Attention.apply
    out, lse = attend(job, chosen, q, k, v, sink)
    out, lse = (t[0] if layout.packed else t for t in (out, lse))
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """A strategy and its gradients. Tensors have four dimensions."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, strategy: str, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (t.detach() for t in (q, k, v))
        logits = None if sink is None else sink.detach()
        result = _STRATEGIES[strategy].forward(job, q, k, v, logits)
        ctx.job, ctx.strategy = job, strategy
        kept = result.kept or ()
        ctx.save_for_backward(q, k, v, logits, result.out, result.lse, *kept)
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, *kept = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        if dlse is not None:
            dlse = dlse.contiguous()
        saved = Saved(q, out, lse, dout, dlse)
        gradients = _STRATEGIES[ctx.strategy].backward(ctx.job, saved, k, v, kept or None)
        dsink = None
        if sink is not None and ctx.needs_input_grad[5]:
            dsink = _parts.sink_gradient(sink, out, lse, dout, dlse)
        return (None, None, *gradients, dsink)


def _judge(
    ranks: Ranks, layout: Any, q: Any, k: Any, v: Any, sink: Any, options: _parts.Options, **mask: Any
) -> dict[str, Any]:
    """What has to be the same on every rank; an error where this rank's arguments break a rule."""
    if not isinstance(layout, Layout):
        raise InvalidArgumentError(f"layout is {layout!r}; make one with tandem.distributed.Layout")
    if layout.ranks != ranks.size:
        raise InvalidArgumentError(f"layout is for {layout.ranks} ranks, but the group has {ranks.size}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        _judge_tensor(name, t, layout, ranks)
    followed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sink))
    asked = {
        "scale": options.scale,
        "softcap": options.softcap,
        "deterministic": options.deterministic,
        **mask,
    }
    four = [t.unsqueeze(0) if layout.packed else t for t in _derivatives.autocast(q, k, v)]
    # What a call of one device would raise, of this rank's rows alone.
    tandem.explain(*four, sink=sink, backward=followed, **asked)
    return {
        **asked,
        "dtype": str(four[0].dtype).removeprefix("torch."),
        "device": q.device.type,
        "shape of q but rows": _without_rows(q, layout),
        "shape of k but rows": _without_rows(k, layout),
        "shape of v but rows": _without_rows(v, layout),
        "sink": sink is not None,
        "whether gradients are wanted": followed,
        "layout": f"{layout.kind} {layout.digest}",
    }


def _judge_tensor(name: str, t: Any, layout: Layout, ranks: Ranks) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}; pass a torch.Tensor")
    if t.ndim != (3 if layout.packed else 4):
        shape = "(rows, heads, head_dim)" if layout.packed else "(batch, rows, heads, head_dim)"
        raise InvalidArgumentError(f"{name} has shape {tuple(t.shape)}; the layout's tensors are {shape}")
    rows = layout.rows(ranks.rank)
    if t.shape[layout.dim] != rows:
        raise InvalidArgumentError(
            f"{name} has {t.shape[layout.dim]} rows, but the layout gives rank {ranks.rank} {rows}; pass "
            "layout.shard of the whole tensor"
        )
    if t.device.type not in ranks.devices:
        raise InvalidArgumentError(
            f"{name} is on {t.device}, but the group sends from {', '.join(sorted(ranks.devices))}; move it, "
            "or make a group of another backend"
        )


def _judge_lengths(layout: Layout, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    lengths = tuple(cu_seqlens.diff().tolist())
    if lengths != layout.lengths or not layout.packed:
        raise InvalidArgumentError(
            f"cu_seqlens has sequences of {lengths} rows, but the layout of {layout.lengths}; make the "
            "layout of cu_seqlens.diff()"
        )


def _without_rows(t: Tensor, layout: Layout) -> tuple[int, ...]:
    shape = list(t.shape)
    del shape[layout.dim]
    return tuple(shape)


def _shape(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> _cost.Shape:
    batch = 1 if layout.packed else q.shape[0]
    sizes = (batch, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.element_size())
    return _cost.Shape(*sizes)


def _machine(q: Tensor, ranks: Ranks) -> _cost.Machine:
    if not q.is_cuda:
        return _cost.CPU
    return _cost.H200 if ranks.size <= torch.cuda.device_count() else _cost.H200_HOSTS
