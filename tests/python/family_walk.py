"""One family of Transformers against eager attention: what became of it on Tandem, under every padding."""

from __future__ import annotations

import copy
import functools
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import family_inputs
import family_parts
import family_vision
import tandem
import torch
import transformers
from family_errors import differ, kept
from tandem.integrations import transformers as integration
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedModel

LARGEST = 20_000_000  # parameters; more are not made
# Errors of f32 in right families are up to 2e-6 and 3e-5; a mask that is off by one key gives 1e-2 and more.
BOUNDS = BOUND_OUTPUTS, BOUND_GRADIENTS = 1e-4, 1e-3
OURS, INSTEAD = "tandem", "tandem-or-pytorch"  # Transformers takes names with "sdpa" inside for its own
PYTORCHS = "pytorchs"  # its sdpa by a name that every model takes
#: Draws of weights before a family counts as wrong: some amplify rounding beyond BOUNDS, at kinks and
#: thresholds, which ones depends on the processor. A fault is wrong in every draw.
DRAWS = 4
_draw = [0]
_calls = [0]
SIDES = ("none", "left", "right")  # of padding


# They mask what an earlier layer's results leave below a threshold, so that it depends on the processor
# whether sdpa is within rounding of eager attention.
BY_ROUNDING = {"mask2former"}


@dataclass
class Outcome:
    model_type: str
    #: right, undefined (eager and sdpa differ too), as sdpa (which differs from eager), wrong, refused,
    #: error, own (its attention never calls Tandem's), static (its source names no attention of
    #: Transformers'), frame (it has no forward pass: why names its parts), not built
    kind: str
    why: str = ""  # by padding, for all but the right
    training: str = ""  # what stops a step of training, if anything
    kept: list[str] = field(
        default_factory=list
    )  # weights of attention, an output that is left out in silence
    #: right, wrong, ... when what Tandem lacks goes to PyTorch; or "as sdpa", which differs from eager itself
    instead: str = ""
    #: of outputs and gradients, by padding
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: other model types whose modules ran inside, and whether their attention called Tandem's
    parts: dict[str, bool] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """0 for what no other draw of weights changes, more for what rounding may have done."""
        kinds = (self.kind, self.instead.split(" ")[0])
        return 2 if "wrong" in kinds else 1 if "as" in (self.kind.split(" ")[0], kinds[1]) else 0


def start() -> None:
    """What a process of the walk does first."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name, unsupported in ((OURS, "error"), (INSTEAD, "sdpa")):
        integration.register(name, unsupported=unsupported)
        AttentionInterface.register(name, functools.partial(_counted, AttentionInterface()[name]))
    AttentionInterface.register(PYTORCHS, AttentionInterface()["sdpa"])
    AttentionMaskInterface.register(PYTORCHS, AttentionMaskInterface()["sdpa"])


def _counted(attention: Any, *args: Any, **options: Any) -> Any:
    _calls[0] += 1
    family_parts.note_attention()
    return attention(*args, **options)


NO_FORWARD = "no forward pass of its own; its parts are "
NO_NUMBERS = "eager attention gives no numbers"
_USES = ("ALL_ATTENTION_FUNCTIONS", "masking_utils", "_attn_implementation", "AutoModel", "AutoBackbone")


def walk(model_type: str) -> Outcome:
    """What became of one family in its best draw of weights; whatever fails is told, not raised."""
    best: Outcome | None = None
    for _draw[0] in range(DRAWS):
        try:
            outcome = _walk(model_type)
        except Exception:
            outcome = Outcome(model_type, "error", traceback.format_exc()[-900:])
        if best is None or outcome.rank < best.rank:
            best = outcome
        if best.rank == 0:
            break
    assert best is not None
    return best


def _walk(model_type: str) -> Outcome:
    outcome = functools.partial(Outcome, model_type)
    try:
        lines = "".join(Path(path).read_text() for path in families.sources(model_type)).splitlines()
        source = "\n".join(line for line in lines if not line.lstrip().startswith((">>>", "...")))
    except Exception as error:  # packages that are missing
        return outcome("not built", _said(error))
    others = re.search(r"^from \.\.(?:\w+\.modeling|\.models|\w+ import)|load_backbone", source, re.M)
    if source and not others and not any(name in source for name in _USES):
        return outcome("static")
    eager, config, chosen, why = _eager(model_type)
    if eager is None:
        return outcome("frame" if why.startswith(NO_FORWARD) else "not built", why.removeprefix(NO_FORWARD))
    parts = {part: False for part in sorted(_parts(eager, chosen) - {model_type})}
    try:
        ours = _twin(eager, config, OURS)
    except tandem.TandemError as error:
        return outcome("refused", _said(error), parts=parts)
    except Exception as error:
        return outcome("error", _said(error))
    family_parts.served.clear()
    result, expected = _compared(outcome, eager, ours, chosen)
    result.parts = {part: part in family_parts.served for part in parts}
    if result.kind == "wrong" and _rounded(result, eager, ours, chosen):
        result = Outcome(model_type, "right", errors=result.errors, parts=result.parts)
    if result.kind == "wrong":
        result = _undefined(result, eager, config, chosen)
    if result.kind == "wrong" and (
        _as_sdpa(eager, ours, config, chosen)
        or _near_exact(_twin(eager, config, PYTORCHS), ours, chosen, SIDES, outputs=True)
    ):
        result.kind = "as sdpa"
    if result.kind in ("wrong", "error"):
        return result
    result.kept = kept(eager, ours, [*family_inputs.candidates(eager, "none")][chosen])
    if result.kind != "own":
        result.training = _trained(ours, chosen)
    if "unsupported=" in result.why + result.training:
        instead = _twin(eager, config, INSTEAD)
        if "unsupported=" in result.why:
            second, _ = _compared(outcome, eager, instead, chosen, expected)
            if second.kind == "wrong" and _rounded(second, eager, instead, chosen):
                second.kind, second.why = "right", ""
            differs = second.kind in ("wrong", "error") and _as_sdpa(eager, instead, config, chosen)
            if differs or (second.kind == "right" and model_type in BY_ROUNDING):
                second.kind = "as sdpa"
            result.instead, result.errors = second.kind + " " + second.why, second.errors
        stopped = _trained(instead, chosen)
        result.instead += f"training: {stopped}" if stopped else ""
    return result


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:600]


def _eager(model_type: str, attention: str = "eager") -> tuple[PreTrainedModel | None, Any, int, str]:
    """The first of the family's models that runs, its configuration, and which candidate for arguments does.

    If none runs, the reason is the first model's.
    """
    whys = []
    for way in families.WAYS:
        try:
            config = families.shrunk(CONFIG_MAPPING[model_type], way)
        except Exception as error:  # whatever a configuration's checks raise
            whys.append(_said(error))
            continue
        for kind in [*families.classes(model_type)][:5]:
            if kind.forward is torch.nn.Module.forward:
                whys.append(NO_FORWARD + ", ".join(sorted(_named_parts(config))))
                continue
            part = families.part_for(kind, config)
            model, chosen, why = _running_model(kind, part, attention)
            if model is not None:
                return model, part, chosen, ""
            whys.append(why)
    if attention == "eager" and any("KeyError: 'eager'" in why or why == NO_NUMBERS for why in whys):
        return _eager(model_type, "sdpa")  # Transformers' own eager attention fails
    return None, None, 0, (whys or ["no model class"])[0]


def _named_parts(config: Any) -> set[str]:
    return {*family_parts.by_name(config, nested=False).values()} & {*CONFIG_MAPPING}


def _running_model(
    kind: type[PreTrainedModel], config: Any, attention: str
) -> tuple[PreTrainedModel | None, int, str]:
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in kind(_with(config, attention)).parameters())
        if count > LARGEST:
            return None, 0, f"{count / 1e6:.0f} million parameters"
        torch.manual_seed(7 + 100 * _draw[0])
        model = kind(_with(config, attention)).eval()
    except Exception as error:
        return None, 0, _said(error)
    _randomize(model)
    why = ""
    for chosen, arguments in enumerate(family_inputs.candidates(model, "none")):
        try:
            outputs = _run(model, arguments)[0]
            if outputs and all(tensor.isfinite().any() for tensor in outputs.values() if tensor.numel()):
                return model, chosen, ""
            why = NO_NUMBERS if outputs else why or "no outputs of floating point"
        except Exception as error:
            why = why or _said(error)
    return None, 0, why or "arguments that no candidate has"


def _arguments(model: PreTrainedModel, side: str, chosen: int) -> dict[str, Any]:
    torch.manual_seed(11)
    return [*family_inputs.candidates(model, side)][chosen]


def _parts(model: PreTrainedModel, chosen: int) -> set[str]:
    with family_parts.watched(model) as seen, torch.no_grad():
        family_vision.call(model, _arguments(model, "none", chosen))
    return seen


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
    torch.manual_seed(7 + 100 * _draw[0])
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
    mask = arguments.get("attention_mask")  # of tokens, or of something else
    mask = (
        mask.bool() if mask is not None and mask.shape == (family_inputs.BATCH, family_inputs.ROWS) else None
    )
    for path, tensor in families.floats(family_vision.call(model, arguments)):
        if mask is not None and tensor.ndim >= 2 and tensor.shape[0] == len(mask):
            rows = tensor.shape[1]
            if rows in (family_inputs.ROWS, family_inputs.ROWS + 1):  # some add a token of their own
                tensor = tensor[:, : family_inputs.ROWS][mask]
            elif rows == 3 * family_inputs.ROWS:  # or make three of each
                tensor = tensor[mask.repeat_interleave(3, 1)]
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
    for side in SIDES:
        arguments = _arguments(eager, side, chosen)
        if side != "none" and not any("mask" in name for name in arguments):
            continue
        try:
            expected[side] = expected.get(side) or _run(eager, arguments)
        except Exception:  # eager has its limits too: some audio models take no padding on the left
            continue
        try:
            with family_parts.watched(ours):
                got = _run(ours, arguments)
        except tandem.TandemError as error:
            refused = refused or _said(error)
            continue
        except Exception as error:
            failed = failed or f"{side}: {_said(error)}"
            continue
        errors[side] = differ(expected[side], got)
        if _beyond(errors[side]):
            wrong += f"{side}: {errors[side][0]:.1e} and {errors[side][1]:.1e} "
    kind = (
        "wrong" if wrong else "error" if failed else "refused" if refused else "right" if _calls[0] else "own"
    )
    return outcome(kind, wrong or failed or refused, errors=errors), expected


def _beyond(errors: tuple[float, float]) -> bool:
    return any(error > bound for error, bound in zip(errors, BOUNDS, strict=True))


def _rounded(wrong: Outcome, eager: PreTrainedModel, ours: PreTrainedModel, chosen: int) -> bool:
    """Whether outputs are eager's, and gradients at most twice as far from float64's as eager's own are.

    That is the bound of Tandem's kernels. It counts where a head behind attention has kinks (ReLU over many
    pixels): rounding moves its gradients further than BOUND_GRADIENTS.
    """
    if any(output > BOUND_OUTPUTS for output, _ in wrong.errors.values()):
        return False
    return _near_exact(eager, ours, chosen, (*wrong.errors,), outputs=False)


def _near_exact(
    theirs: PreTrainedModel, ours: PreTrainedModel, chosen: int, sides: tuple[str, ...], *, outputs: bool
) -> bool:
    """Whether our gradients, and `outputs`, are at most twice as far as theirs from theirs in float64."""
    exact = copy.deepcopy(theirs).double()
    for side in sides:
        arguments = _arguments(theirs, side, chosen)
        in_double = {
            name: given.double() if isinstance(given, Tensor) and given.is_floating_point() else given
            for name, given in arguments.items()
        }
        try:
            truth = _run(exact, in_double)
            errors = [differ(truth, _in_double(_run(model, arguments))) for model in (theirs, ours)]
        except Exception:  # not every model computes in float64
            return False
        for of_theirs, of_ours, bound in list(zip(*errors, BOUNDS, strict=True))[0 if outputs else 1 :]:
            if of_ours > max(2 * of_theirs, bound):
                return False
    return True


def _in_double(result: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Any:
    return tuple({name: tensor.double() for name, tensor in part.items()} for part in result)


def _as_sdpa(eager: PreTrainedModel, instead: PreTrainedModel, config: Any, chosen: int) -> bool:
    """Whether Transformers' own sdpa gives what `instead` gives, or fails as that does, for all paddings."""
    sdpa = _twin(eager, config, PYTORCHS)
    for side in SIDES:
        results: list[Any] = []
        for model in (sdpa, instead):
            try:
                results.append(_run(model, _arguments(eager, side, chosen)))
            except Exception as error:
                results.append(_said(error))
        if isinstance(results[0], str) or isinstance(results[1], str):
            if results[0] != results[1]:
                return False
        elif _beyond(differ(*results)):
            return False
    return True


def _undefined(wrong: Outcome, eager: PreTrainedModel, config: Any, chosen: int) -> Outcome:
    """A model that pools a row of padding has no result there: it depends on what stands at padding."""
    for side, errors in wrong.errors.items():
        if not _beyond(errors):
            continue
        arguments = _arguments(eager, side, chosen)
        mask = arguments.get("attention_mask")
        if side == "none" or mask is None or "input_ids" not in arguments:
            return wrong
        others = torch.where(mask.bool(), arguments["input_ids"], arguments["input_ids"] + 9)
        if differ(_run(eager, arguments), _run(eager, arguments | {"input_ids": others}))[0] < BOUND_OUTPUTS:
            return wrong
    return Outcome(wrong.model_type, "undefined", wrong.why, errors=wrong.errors, parts=wrong.parts)


def _trained(model: PreTrainedModel, chosen: int) -> str:
    """What stops a forward pass in training, which may drop attention's weights."""
    arguments = [*family_inputs.candidates(model, "none")][chosen]
    model.train()
    try:
        torch.manual_seed(3)
        family_vision.call(model, arguments)
    except tandem.TandemError as error:
        return _said(error)
    except Exception:  # eager's own limits: batch norms of one value, labels that must be there
        return ""
    finally:
        model.eval()
    return ""
