"""What Tandem lacks for a model of Transformers: the errors that say so, and PyTorch's attention instead."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEncoder

from tandem import _call
from tandem._errors import UnsupportedError
from tandem.integrations._masks import Mask
from tandem.integrations._patterns import EAGER, SDPA

# Not in every Transformers 5.
_collector: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
_logger = logging.getLogger("tandem")
_said: set[str] = set()


def refuse(wish: str, remedy: str) -> NoReturn:
    raise UnsupportedError(f"this model asks for {wish}, which Tandem does not have; {remedy}")


def _collects() -> bool:
    return _collector is not None and any("attentions" in name for name in _collector.get() or ())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _collected_before() -> bool:
    """What was set before a graph, which a compiler does not follow."""
    return _collects()


def refuse_weights(asked: bool) -> None:
    """An error where a layer is asked for the attention's weights, or the model collects them by hooks of
    Transformers: layers with `output_attentions` among their own arguments keep it to themselves."""
    in_graph = _collector is not None and _collector.compiling
    if asked or (_collects() if in_graph else _collected_before()):
        refuse("the attention's weights", EAGER)


def refuse_beside_ranks(mask: Mask | Tensor, dropout: float, position_bias: Tensor | None) -> None:
    """An error where a layer of a model that ranks share has what is not divided among them."""
    for wish, given in (
        ("dropout in attention", dropout != 0.0),
        ("a position bias", position_bias is not None),
        ("a mask tensor", isinstance(mask, Tensor)),
    ):
        if given:
            refuse(f"{wish} in a context-parallel model", "run it on one rank")


def forget() -> None:
    """What was said is said again."""
    _said.clear()


def _say(reason: str) -> None:
    """Says once that PyTorch's attention computes what Tandem does not."""
    if reason not in _said:
        _said.add(reason)
        _logger.warning("%s: PyTorch's sdpa computes its attention instead", reason)


#: A compiled model says it as it is traced.
say: Callable[[str], None] = torch.compiler.assume_constant_result(_say)  # type: ignore[no-untyped-call]


def _has_functions(query: Tensor, value: Tensor) -> bool:
    """Whether kernels have functions on scores, which biases and mask tensors become, and dropout: a graph
    has none, and a GPU has them for heads of up to 256 dimensions."""
    if torch.compiler.is_compiling():
        return False
    if query.device.type == "cpu":
        return True
    return query.device.type == "cuda" and max(query.shape[-1], value.shape[-1]) <= 256


def lacking(
    query: Tensor, value: Tensor, mask: Mask | Tensor, dropout: float, position_bias: Tensor | None
) -> tuple[str, str] | None:
    """What a call asks for that Tandem lacks and PyTorch's attention has, and what to do about it."""
    if not _has_functions(query, value):
        if dropout != 0.0:
            return "dropout in attention", "set the configuration's attention dropout to 0, or " + SDPA
        if position_bias is not None:
            return "a position bias", SDPA
        if isinstance(mask, Tensor):
            return "a mask tensor", "pass a 2D mask, or " + SDPA
    head_dim = max(query.shape[-1], value.shape[-1])
    widest = _call.widest_head(query.device.type)
    if head_dim > widest:
        return f"heads of {head_dim} dimensions, more than {widest}", SDPA
    if query.dtype == torch.float64:
        return "float64", "convert it with model.float(), or " + SDPA
    return None


def sdpa(*tensors: Any, **options: Any) -> tuple[Tensor, None]:
    """The call by Transformers' own way to PyTorch's attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(*tensors, is_causal=False, **options)
    return out, None


#: Modules of Transformers that choose a class by attn_implementation, from a table without a way to register.
_CHOSEN_BY_CLASS = (
    "bark.modeling_bark",
    "data2vec.modeling_data2vec_vision",
    "deepseek_ocr2.modeling_deepseek_ocr2",
    "falcon.modeling_falcon",
    "git.modeling_git",
    "gpt_neo.modeling_gpt_neo",
    "gptj.modeling_gptj",
    "sam.modeling_sam",
    "sam_hq.modeling_sam_hq",
    "superglue.modeling_superglue",
    "unlimited_ocr.modeling_unlimited_ocr",
)


def refuse_where_attention_is_chosen_by_class(name: str) -> None:
    """Puts an error in the place of the KeyError that those models would fail with as they load."""

    def attention(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "this model computes its attention itself, by classes of its own that attn_implementation "
            f'names, and "{name}" is none of them; load the model with attn_implementation="sdpa" or "eager"'
        )

    for path in _CHOSEN_BY_CLASS:
        try:
            module = importlib.import_module(f"transformers.models.{path}")
        except ImportError:  # not in every Transformers 5
            continue
        for table in [value for key, value in vars(module).items() if key.endswith("ATTENTION_CLASSES")]:
            table.setdefault(name, attention)


def refuse_weights_of_pix2struct() -> None:
    """Has Pix2Struct, which gives the attention's weights as an output of layers that it does not tell,
    refuse them where its mask is Tandem's."""
    own = getattr(Pix2StructVisionEncoder.forward, "_tandem_own", Pix2StructVisionEncoder.forward)

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        if any(isinstance(argument, Mask) for argument in (*given, *options.values())):
            refuse_weights(bool(options.get("output_attentions")))
        return own(self, *given, **options)

    forward._tandem_own = own  # type: ignore[attr-defined]
    Pix2StructVisionEncoder.forward = forward
