"""One family of Transformers against eager attention: what became of it on Tandem, under every padding."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import traceback
from dataclasses import dataclass, field
from typing import Any

import families
import tandem
import torch
import transformers
from tandem.integrations import transformers as integration
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, PreTrainedModel

LARGEST = 20_000_000  # parameters; more are not made
# Errors of f32 in right families are up to 2e-6 and 3e-5; a mask that is off by one key gives 1e-2 and more.
BOUND_OUTPUTS, BOUND_GRADIENTS = 1e-4, 1e-3
OURS, INSTEAD = "tandem", "tandem-or-pytorch"  # Transformers takes names with "sdpa" inside for its own
_calls = [0]


@dataclass
class Outcome:
    model_type: str
    #: right, undefined (eager and sdpa differ too), wrong, refused, error, own (its attention never calls
    #: Tandem's), static (its source names no attention of Transformers'), not built
    kind: str
    why: str = ""  # by padding, for all but the right
    training: str = ""  # what stops a step of training, if anything
    instead: str = ""  # right, wrong, ... when what Tandem lacks goes to PyTorch
    #: of outputs and gradients, by padding
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)


def start() -> None:
    """What a process of the walk does first."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name, unsupported in ((OURS, "error"), (INSTEAD, "sdpa")):
        integration.register(name, unsupported=unsupported)
        AttentionInterface.register(name, functools.partial(_counted, AttentionInterface()[name]))


def _counted(attention: Any, *args: Any, **options: Any) -> Any:
    _calls[0] += 1
    return attention(*args, **options)


_USES = ("ALL_ATTENTION_FUNCTIONS", "masking_utils", "_attn_implementation", "AutoModel", "AutoBackbone")


def walk(model_type: str) -> Outcome:
    """What became of one family; whatever fails is told, not raised."""
    try:
        return _walk(model_type)
    except Exception:
        return Outcome(model_type, "error", traceback.format_exc()[-900:])


def _walk(model_type: str) -> Outcome:
    outcome = functools.partial(Outcome, model_type)
    kind = CONFIG_MAPPING[model_type]
    try:
        module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
        with open(str(module.__file__)) as file:
            source = file.read()
        others = re.search(r"^from \.\.(?:\w+\.modeling|\.models|\w+ import)|load_backbone", source, re.M)
        if not others and not any(name in source for name in _USES):
            return outcome("static")
        config = families.shrunk(kind)
    except Exception as error:  # whatever a configuration's checks or missing packages raise
        return outcome("not built", _said(error))
    eager, chosen, why = _eager(model_type, config)
    if eager is None:
        return outcome("not built", why)
    try:
        ours = _twin(eager, config, OURS)
    except tandem.TandemError as error:
        return outcome("refused", _said(error))
    except Exception as error:
        return outcome("error", _said(error))
    result, expected = _compared(outcome, eager, ours, chosen)
    if result.kind == "wrong":
        result = _undefined(result, eager, config, chosen)
    if result.kind in ("wrong", "error"):
        return result
    if result.kind != "own":
        result.training = _trained(ours, chosen)
    if "unsupported=" in result.why + result.training:
        instead = _twin(eager, config, INSTEAD)
        if "unsupported=" in result.why:
            second, _ = _compared(outcome, eager, instead, chosen, expected)
            result.instead, result.errors = second.kind + " " + second.why, second.errors
        stopped = _trained(instead, chosen)
        result.instead += f"training: {stopped}" if stopped else ""
    return result


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:600]


def _eager(model_type: str, config: Any) -> tuple[PreTrainedModel | None, int, str]:
    """The first of the family's models that runs, and which of the candidates for its arguments does."""
    why = "no model class"
    for kind in [*families.classes(model_type)][:4]:
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(_with(config, "eager")).parameters())
            if count > LARGEST:
                why = f"{count / 1e6:.0f} million parameters"
                continue
            torch.manual_seed(7)
            model = kind(_with(config, "eager")).eval()
        except Exception as error:
            why = _said(error)
            continue
        _randomize(model)
        why = "arguments that no candidate has"
        first = ""
        for chosen, arguments in enumerate(families.candidates(model, "none")):
            try:
                outputs = _run(model, arguments)[0]
                if outputs and all(tensor.isfinite().any() for tensor in outputs.values() if tensor.numel()):
                    return model, chosen, ""
                why = "eager attention gives no numbers" if outputs else "no outputs of floating point"
            except Exception as error:
                first = first or _said(error)
        why = first or why
    return None, 0, why


def _with(config: Any, attention: str) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    return config


def _randomize(model: PreTrainedModel) -> None:
    """Weights that matter: those of an initialisation make attention nearly uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                fan_in = max(1, parameter.numel() // max(1, len(parameter)))
                parameter.normal_(std=min(0.5, 1.2 / fan_in**0.5))
            elif not parameter.isfinite().all() or not parameter.any():
                parameter.normal_(std=0.1)


def _twin(eager: PreTrainedModel, config: Any, attention: str) -> PreTrainedModel:
    torch.manual_seed(7)
    model = type(eager)(_with(config, attention)).eval()
    model.load_state_dict(eager.state_dict())
    return model


def _run(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs where there are tokens, and the gradients of every parameter."""
    torch.manual_seed(3)
    model.zero_grad()
    outputs = {}
    loss = torch.zeros(())
    weights = torch.Generator().manual_seed(1)
    mask = arguments["attention_mask"].bool() if {"input_ids", "attention_mask"} <= {*arguments} else None
    for path, tensor in families.floats(model(**arguments)):
        if mask is not None and tensor.ndim >= 2 and tensor.shape[0] == len(mask):
            if tensor.shape[1] in (families.ROWS, families.ROWS + 1):  # some add a token of their own
                tensor = tensor[:, : families.ROWS][mask]
        outputs[path] = tensor.detach()
        if tensor.requires_grad:
            loss = loss + (tensor * torch.randn(tensor.shape, generator=weights)).sum()
    if loss.requires_grad:
        loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _compared(
    outcome: Any, eager: PreTrainedModel, ours: PreTrainedModel, chosen: int, known: Any = None
) -> tuple[Outcome, dict[str, Any]]:
    expected: dict[str, Any] = dict(known or {})
    errors, refused, failed, wrong = {}, "", "", ""
    _calls[0] = 0
    for side in ("none", "left", "right"):
        torch.manual_seed(11)
        arguments = [*families.candidates(eager, side)][chosen]
        if side != "none" and not any("mask" in name for name in arguments):
            continue
        try:
            expected[side] = expected.get(side) or _run(eager, arguments)
        except Exception:  # eager has its limits too: some audio models take no padding on the left
            continue
        try:
            got = _run(ours, arguments)
        except tandem.TandemError as error:
            refused = refused or _said(error)
            continue
        except Exception as error:
            failed = failed or f"{side}: {_said(error)}"
            continue
        errors[side] = differ(expected[side], got)
        if errors[side][0] > BOUND_OUTPUTS or errors[side][1] > BOUND_GRADIENTS:
            wrong += f"{side}: {errors[side][0]:.1e} and {errors[side][1]:.1e} "
    kind = (
        "wrong" if wrong else "error" if failed else "refused" if refused else "right" if _calls[0] else "own"
    )
    return outcome(kind, wrong or failed or refused, errors=errors), expected


def _undefined(wrong: Outcome, eager: PreTrainedModel, config: Any, chosen: int) -> Outcome:
    """A model that pools a row of padding has no result there: eager and sdpa differ as much."""
    try:
        sdpa = _twin(eager, config, "sdpa")
    except ValueError:  # not every model has it
        return wrong
    for side, (output, gradient) in wrong.errors.items():
        if output <= BOUND_OUTPUTS and gradient <= BOUND_GRADIENTS:
            continue
        torch.manual_seed(11)
        arguments = [*families.candidates(eager, side)][chosen]
        if side == "none" or differ(_run(eager, arguments), _run(sdpa, arguments))[0] < output / 2:
            return wrong
    return Outcome(wrong.model_type, "undefined", wrong.why, errors=wrong.errors)


def differ(expected: Any, got: Any) -> tuple[float, float]:
    """The largest errors of outputs and gradients, against the largest value of each tensor."""
    outputs = [0.0]
    for path, tensor in expected[0].items():
        other = got[0].get(path)
        if (
            other is None
            or other.shape != tensor.shape
            or not torch.equal(tensor.isfinite(), other.isfinite())
        ):
            return float("inf"), float("inf")
        a, b = tensor[tensor.isfinite()], other[other.isfinite()]
        if a.numel():
            outputs.append(float((a - b).abs().max() / (a.abs().max() + 1e-6)))
    largest = max([float(g.abs().max()) for g in expected[1].values() if g.numel()], default=0.0)
    gradients = [0.0]
    for name, gradient in expected[1].items():
        if gradient.numel() == 0 or largest == 0:
            continue
        # Where a gradient is zero but for rounding (keys' biases), against the model's largest.
        bound = max(float(gradient.abs().max()), 1e-2 * largest)
        other = got[1].get(name)
        gradients.append(float("inf") if other is None else float((gradient - other).abs().max() / bound))
    return max(outputs), max(gradients)


def _trained(model: PreTrainedModel, chosen: int) -> str:
    """What stops a forward pass in training, which may drop attention's weights."""
    arguments = [*families.candidates(model, "none")][chosen]
    model.train()
    try:
        torch.manual_seed(3)
        model(**arguments)
    except tandem.TandemError as error:
        return _said(error)
    except Exception:  # eager's own limits: batch norms of one value, labels that must be there
        return ""
    finally:
        model.eval()
    return ""
