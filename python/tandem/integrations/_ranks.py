"""Models of Transformers whose rows are divided among ranks: context parallel in one line.

A hook before the model's forward divides what it is given, every layer's attention looks across the ranks,
and the loss is of the rank's rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.distributed import Layout, context_parallel_attention
from tandem.distributed._agree import agreed
from tandem.distributed._comm import Ranks

LAYOUTS = ("zigzag", "contiguous", "striped", "balanced")
_IGNORED = -100  # Transformers' label of tokens without a loss

#: What a model may be given besides its tokens and labels, and keeps as it is.
_KEPT = frozenset("output_hidden_states output_router_logits return_dict".split())


@dataclass(frozen=True)
class Divided:
    """What every layer of a forward pass is told."""

    layout: Layout
    group: Any
    strategy: str


def context_parallel(
    model: Any, *, group: Any = None, layout: str = "zigzag", strategy: str = "auto", check: bool = True
) -> Any:
    """Divides the rows of everything that a model is given among the ranks of a group, from its next call on.

    Every rank calls the model with the same whole batch: ``input_ids`` or ``inputs_embeds``, ``labels``,
    ``position_ids``, and for sequences packed into one row ``cu_seq_lens_q``. What comes out, logits say, is
    of the rank's rows (`tandem.distributed.gather` makes it whole; the hook's ``layout_of`` has the layout).
    The loss is the rank's share times the number of ranks, so that its mean over the ranks is that of one
    device, and so is the mean of the gradients: what DDP and FSDP over the same group make.

    Args:
      model: loaded with ``attn_implementation="tandem"`` (`register`).
      group: as for `tandem.distributed.context_parallel_attention`.
      layout: who has which rows: "zigzag", "contiguous", "striped" or "balanced".
      strategy: as there.
      check: compare the ranks' batches before each call, which on a GPU waits for them.

    Returns:
      A handle whose ``remove()`` undoes it.

    Raises:
      TandemError: of a call, on every rank, where batches differ, or one has padding, a cache or inputs that
        have no rows to divide.
    """
    if layout not in LAYOUTS:
        names = ", ".join(repr(name) for name in LAYOUTS)
        raise InvalidArgumentError(f"layout is {layout!r}; it must be one of {names}")
    hook = _Hook(group, layout, strategy, check)
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    handle.layout_of = hook.layout_of
    return handle


class _Hook:
    """Runs before a model's forward."""

    def __init__(self, group: Any, kind: str, strategy: str, check: bool) -> None:
        self.group, self.kind, self.strategy, self.check = group, kind, strategy, check

    def __call__(
        self, model: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        ranks = Ranks.of(self.group)
        if len(args) > 1:
            raise InvalidArgumentError("pass what the model is given by name, all but input_ids")
        given = {**given, **({"input_ids": args[0]} if args else {})}
        ranks.hosts()
        with agreed(ranks, "a model of Transformers", self.check) as same:
            layout = self.layout_of(given, ranks)
            divided = _divided(model, given, layout, ranks)
            same |= {
                "layout": f"{layout.kind} {layout.digest}",
                "batch": _digest(given) if self.check else "",
            }
            divided["context_parallel"] = Divided(layout, self.group, self.strategy)
        return (), divided

    def layout_of(self, given: dict[str, Any], ranks: Ranks | None = None) -> Layout:
        """Which rank holds which rows of what a model is given."""
        size = (ranks or Ranks.of(self.group)).size
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise InvalidArgumentError("the model is given neither input_ids nor inputs_embeds")
        batch, rows = tokens.shape[:2]
        made: Any = getattr(Layout, self.kind)
        ends = given.get("cu_seq_lens_q")
        if ends is None:
            layout: Layout = made(rows, size)
            return layout
        if batch != 1 or int(ends[-1]) != rows:
            raise InvalidArgumentError(
                f"cu_seq_lens_q ends at {int(ends[-1])} for a batch of {batch} rows of {rows} tokens; "
                "sequences are packed into one row, which they fill"
            )
        packed: Layout = made(ends.diff().tolist(), size)
        return packed


def _divided(model: Any, given: dict[str, Any], layout: Layout, ranks: Ranks) -> dict[str, Any]:
    """The rank's part of what a model is given."""

    def shard(t: Tensor) -> Tensor:
        return layout.shard(t, ranks.rank, 1)

    padding = given.get("attention_mask")
    if padding is not None and not (padding.ndim == 2 and bool(padding.all())):
        raise UnsupportedError(
            "attention_mask has padding, or is no 2D mask: rows that are divided have none; pack sequences "
            "into one row and pass cu_seq_lens_q"
        )
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise UnsupportedError("a cache of keys is not divided among ranks; pass use_cache=False")
    tokens = {n: shard(given[n]) for n in ("input_ids", "inputs_embeds") if given.get(n) is not None}
    first = next(iter(tokens.values()))
    places = given.get("position_ids")
    if places is None:
        places = layout.positions(ranks.rank).to(first.device)[None]
    else:
        places = shard(places)
    found = {**tokens, "position_ids": places, "use_cache": False}
    # Rows that are not neighbours look like packed sequences to Transformers, unless there is a mask.
    found["attention_mask"] = torch.ones(first.shape[:2], dtype=torch.int64, device=first.device)
    if given.get("labels") is not None:
        found |= _labels(model, given, layout, ranks)
    known = {*found, "labels", "num_items_in_batch", "past_key_values", "logits_to_keep"}
    known |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    for name, value in given.items():
        if name in _KEPT:
            found[name] = value
        elif name == "logits_to_keep" and isinstance(value, int) and value == 0:
            continue
        elif (name not in known or name == "logits_to_keep") and value is not None:
            raise UnsupportedError(f"{name} is not divided among ranks; leave it out")
    return found


def _labels(model: Any, given: dict[str, Any], layout: Layout, ranks: Ranks) -> dict[str, Any]:
    """Labels that are shifted already, since a row's next token may be another rank's, and their number."""
    if getattr(model, "loss_type", None) != "ForCausalLM":
        raise UnsupportedError(
            f"the loss of {type(model).__name__} is not that of the next token; leave labels out, and make "
            "the loss of the rank's rows"
        )
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=_IGNORED)[:, 1:]
    count = given.get("num_items_in_batch")
    if count is None:
        count = (shifted != _IGNORED).sum()
    labels = layout.shard(shifted, ranks.rank, 1)
    return {"labels": labels, "shift_labels": labels, "num_items_in_batch": count / ranks.size}


def _digest(given: dict[str, Any]) -> str:
    """A hash that is equal where the tokens and labels are."""
    found = hashlib.sha256()
    for name in ("input_ids", "inputs_embeds", "labels", "position_ids"):
        if given.get(name) is not None:
            t = given[name].detach().contiguous().cpu()
            found.update(
                repr((name, tuple(t.shape), t.dtype)).encode() + t.view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()[:12]


def attend(divided: Divided, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """A layer's attention: (batch, rows, heads, head_dim)."""
    packed = divided.layout.packed
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out: Tensor = context_parallel_attention(
        q,
        k,
        v,
        layout=divided.layout,
        group=divided.group,
        strategy=divided.strategy,
        check=False,  # the batches have been compared
        **options,
    )
    return out[None] if packed else out
