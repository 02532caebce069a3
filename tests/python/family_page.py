"""The lists of model families in docs/transformers-families.md, from the walk over all of them.

python tests/python/family_page.py          writes the page
python tests/python/family_page.py --all    tries the families that are known not to be built too
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from family_walk import LARGEST, Outcome, start, walk
from transformers.models.auto import configuration_auto

RELEASE = "5.23.0"
POOL_PADDING = {"blt", "pe_audio", "pe_video", "shieldgemma2"}  # a text's first or last row, padding or not
DIFFER_ON_SDPA = 2  # families that are refused, whose eager attention and sdpa differ in Transformers itself
PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers-families.md"
NOT_BUILT = Path(__file__).with_name("families_not_built.txt")
NOT_BUILT_COUNT = 12


def not_built() -> dict[str, str]:
    """The families that the walk does not build by themselves, and why: "in X" runs inside the family X."""
    lines = [line for line in NOT_BUILT.read_text().splitlines() if line and not line.startswith("#")]
    return {name: why for name, why in (line.split(": ", 1) for line in lines)}


def inside() -> dict[str, str]:
    """The families that run inside another one, by which."""
    return {name: why.removeprefix("in ") for name, why in not_built().items() if why.startswith("in ")}


def _home(part: str, found: list[Outcome]) -> str:
    """The family that `part` runs in: one that is right, whose attention Tandem computed, of a like name."""
    homes = [o for o in found if part in o.parts and o.kind in ("right", "refused", "own", "undefined")]
    order = {o.model_type: (o.kind != "right", not o.parts[part], _unlike(part, o.model_type)) for o in homes}
    return min(order, key=lambda name: (order[name], name), default="")


def _unlike(a: str, b: str) -> int:
    return -len(os.path.commonprefix([a, b]))


def all_families() -> list[str]:
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def outcomes(names: list[str]) -> list[Outcome]:
    """Of the families named, by as many processes as there are cores."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    workers = min(4, len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(workers, context, start) as pool:
        return [*pool.map(walk, names, chunksize=4)]


def built() -> list[str]:
    """All families but those that are known not to be built."""
    return [name for name in all_families() if name not in not_built()]


def sample() -> list[str]:
    """One of six of each of the page's lists, and of the families that are in none."""
    names = {*built()}
    groups = [names & group for group in lists(PAGE.read_text()).values()]
    groups.append(names.difference(*groups))
    return sorted({name for group in groups for name in sorted(group)[::6]})


def reason_not_built(why: str) -> str:
    for pattern, reason in (
        (
            r"ImportError|ModuleNotFoundError: No module named '(?!transformers)",
            "a package that is not installed",
        ),
        (r"million parameters", f"more than {LARGEST // 10**6} million parameters with these sizes"),
        (r"no model class", "no model class of its own"),
        (
            r"missing \d+ required|NoneType|You must|You have to|no candidate|expected \d+, got|no outputs",
            "other arguments",
        ),
        (r"gives no numbers", "eager attention gives NaN"),
    ):
        if re.search(pattern, why):
            return reason
    return "sizes that do not fit one another"


def _block(title: str, text: str, names: Iterable[str]) -> str:
    found = sorted(set(names))
    body = textwrap.fill(", ".join(found), 110, break_on_hyphens=False, break_long_words=False)
    return f"## {title} ({len(found)})\n\n{textwrap.fill(text, 110)}\n\n{body}\n\n" if found else ""


HANDED = 'unsupported="sdpa"'  # what a refusal names where PyTorch's attention can serve instead
INTRODUCTION = f"""# Model families of Transformers on Tandem

Made by `python tests/python/family_page.py`, checked by `tests/python/test_transformers_families.py`: every
model type of Transformers {RELEASE}, with its default configuration made small and random weights, on
`attn_implementation="tandem"` beside eager attention: outputs and the gradients of all parameters, in float32
on the CPU, without padding and with padding on either side. A few models amplify rounding, by kinks and
thresholds: a model whose results differ has three more draws of weights, and the best counts. In a compiled
model, and on a GPU for heads of more than 256 dimensions, position biases and mask tensors are errors, or
with `register(unsupported="sdpa")` PyTorch's work.

"""


def _refused(why: str, instead: str = "", handed: bool | None = None) -> Callable[[Outcome], bool]:
    """Families that are refused with these words, where PyTorch in Tandem's stead is `instead`."""
    return lambda o: (
        (o.kind == "refused" and why in o.why and o.instead.startswith(instead))
        and handed in (None, HANDED in o.why)
    )


_FOR_PYTORCH = f"An error; right with `register({HANDED})`."
_EAGER = 'an error; use `attn_implementation="eager"`.'
#: Title, text, and which families they are for.
SECTIONS: list[tuple[str, str, Callable[[Outcome], bool]]] = [
    ("Right", "Within rounding of eager attention.", lambda o: o.kind == "right"),
    (
        "As Transformers' sdpa",
        "Within rounding of Transformers' own sdpa, whose results are not those of eager attention in these "
        "models: eager adds a mask of booleans as numbers, or has attention's weights among its outputs.",
        lambda o: o.kind == "as sdpa",
    ),
    (
        "Right but where they pool padding",
        "They take a row of padding for their result under some padding: it depends on what stands there.",
        lambda o: o.kind == "undefined",
    ),
    ("Masks that Tandem does not know", _FOR_PYTORCH, _refused("mask is built by", "right")),
    ("Heads of more than 1024 dimensions", _FOR_PYTORCH, _refused("dimensions, more than", "right")),
    (
        "Windows without causality whose queries are not the last keys",
        _FOR_PYTORCH,
        _refused("queries stand at keys", "right"),
    ),
    (
        "Where eager attention and sdpa differ themselves",
        f"An error; with `register({HANDED})` they are what Transformers' own sdpa makes of them, which is "
        "not eager's result in these models, or fails.",
        _refused("", "as sdpa"),
    ),
    (
        "Lacking more than that",
        _EAGER.capitalize(),
        lambda o: _refused("", handed=True)(o) and not o.instead.startswith(("right", "as sdpa")),
    ),
    # What follows has no other remedy than the attention of Transformers.
    (
        "Keys or sinks chosen otherwise",
        f"What the model hands to its attention is not known to Tandem: {_EAGER}",
        lambda o: _refused("asks for", handed=False)(o) and "causal queries" not in o.why,
    ),
    (
        "Layers that say they are causal, without a mask",
        f"Eager attention lets their queries see every key then, PyTorch's earlier ones alone: {_EAGER}",
        _refused("causal queries"),
    ),
    (
        "Attention of their own, from a mask",
        f"They compute their attention outside Transformers' attention interface: {_EAGER}",
        _refused("from a mask tensor"),
    ),
    (
        "Attention of their own, by class",
        'They fail as they load, with an error that says so; use `attn_implementation="sdpa"` or `"eager"`.',
        _refused("by classes of its own"),
    ),
    (
        "Attention of their own, whatever is asked for",
        "They load and are right, and Tandem has no part in it; some have no attention at all.",
        lambda o: o.kind in ("own", "static"),
    ),
    (
        "No forward pass of their own",
        "Nothing calls them as they are; the families that they are made of are tested.",
        lambda o: o.kind == "frame",
    ),
]


def _listed(o: Outcome) -> str:
    return f"{o.model_type} ({o.why})" if o.kind == "frame" and o.why else o.model_type


def page(found: list[Outcome]) -> str:
    """The page's text."""
    text = INTRODUCTION
    for title, about, wanted in SECTIONS:
        text += _block(title, about, (_listed(o) for o in found if wanted(o)))
    kinds = {o.model_type: o.kind for o in found}
    for title, right in (("Inside a family that is right", True), ("Inside a family that is not", False)):
        text += _block(
            title,
            "Parts that the test runs inside the family named, as users do.",
            (
                f"{part} (in {home})"
                for part, home in inside().items()
                if home in kinds and (kinds[home] == "right") == right
            ),
        )
    return (text + _not_tried()).rstrip() + "\n"


def lists(text: str) -> dict[str, set[str]]:
    """The families under each title of a page."""
    found = re.findall(r"^## ([^\n]+) \(\d+\)\n\n.+?\n\n(.+?)\n(?:\n|\Z)", text, re.S | re.M)
    return {title: set(re.sub(r"\s+", " ", body).split(", ")) for title, body in found}


_NO_CUDA = (
    "Beside a PyTorch without CUDA the wheels on PyPI (torchvision 0.28.0, torchaudio 2.11.0) do not load: "
    "they link against libc10_cuda.so."
)
#: What a reason for not building a family means, by the reason.
REASONS = {
    "needs timm": "Their attention is timm's own. The test tries them where timm is installed, which needs "
    f"torchvision. {_NO_CUDA}",
    "needs a backbone of timm": "The test does not build them. edgetam is tested with the vision tower of "
    "sam2, gemma3n by its text and its sound (gemma3n_text, gemma3n_audio).",
    "needs torchvision": "Parts of sam3 and sam3_lite_text that cut boxes out of images by torchvision's "
    f"compiled operators; the test gives those models texts. {_NO_CUDA}",
    "needs torchaudio": f"{_NO_CUDA} hubert, whose attention it uses, is tested by itself.",
    "Transformers itself fails": f"Transformers {RELEASE} cannot make them, with any attention: the "
    "configuration of the assistants shares all layers' keys, which that of their text model refuses, and "
    'that of nougat names a model type that there is not ("donut_swin"). Nougat is a '
    "vision-encoder-decoder of donut-swin and mbart, which are tested.",
    "no attention, and in training alone": "A head of vibevoice for its loss; vibevoice is right.",
}


def _not_tried() -> str:
    """The families that are neither built nor inside others, by reason."""
    reasons: dict[str, list[str]] = {}
    for name in not_built().keys() - inside().keys():
        reasons.setdefault(not_built()[name], []).append(name)
    text = ""
    for reason, names in sorted(reasons.items()):
        about = REASONS.get(reason, "The test does not build or call them.")
        text += _block(f"Not tried: {reason}", about, names)
    return text


if __name__ == "__main__":
    everything = outcomes(all_families() if "--all" in sys.argv else built())
    if "--all" in sys.argv:
        reasons = {}
        for outcome in everything:
            if outcome.kind == "not built":
                home = _home(outcome.model_type, everything)
                known = not_built().get(outcome.model_type, "")
                kept = known if known in REASONS else reason_not_built(outcome.why)
                reasons[outcome.model_type] = f"in {home}" if home else kept
        lines = [f"{name}: {why}" for name, why in reasons.items()]
        NOT_BUILT.write_text("\n".join(["# Families that the walk does not build: reasons.", *lines]) + "\n")
        print(f"{len(lines) - len(inside())} families are not built: set NOT_BUILT_COUNT")
    PAGE.write_text(page(everything))
