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
from collections.abc import Iterable
from pathlib import Path

from family_walk import LARGEST, Outcome, start, walk
from transformers.models.auto import configuration_auto

RELEASE = "5.23.0"
POOL_PADDING = {"pe_audio"}  # a text's first row, padding or not
PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers-families.md"
NOT_BUILT = Path(__file__).with_name("families_not_built.txt")
NOT_BUILT_COUNT = 263


def not_built() -> dict[str, str]:
    """The families that the walk does not build, and why."""
    lines = [line for line in NOT_BUILT.read_text().splitlines() if line and not line.startswith("#")]
    return {name: why for name, why in (line.split(": ", 1) for line in lines)}


def outcomes(every: bool = False) -> list[Outcome]:
    """Of every family but those that are known not to be built, by as many processes as there are cores."""
    os.environ["OMP_NUM_THREADS"] = "1"
    names = sorted({*configuration_auto.CONFIG_MAPPING_NAMES} - (set() if every else {*not_built()}))
    context = multiprocessing.get_context("spawn")
    workers = min(4, len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(workers, context, start) as pool:
        return [*pool.map(walk, names, chunksize=4)]


def reason_not_built(why: str) -> str:
    for pattern, reason in (
        (
            r"ImportError|ModuleNotFoundError: No module named '(?!transformers)",
            "a package that is not installed",
        ),
        (r"million parameters", f"more than {LARGEST // 10**6} million parameters with these sizes"),
        (r"No module named 'transformers|no model class", "no model class of its own"),
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


def page(found: list[Outcome]) -> str:
    """The page's text."""

    def of(kind: str, why: str = "", but: str = "no such text") -> list[str]:
        return [o.model_type for o in found if o.kind == kind and why in o.why and but not in o.why]

    handed = 'unsupported="sdpa"'
    text = f"""# Model families of Transformers on Tandem

Made by `python tests/python/family_page.py`, checked by `tests/python/test_transformers_families.py`: every
model type of Transformers {RELEASE}, with its default configuration made small and random weights, on
`attn_implementation="tandem"` beside eager attention: outputs and the gradients of all parameters, in float32
on the CPU, without padding and with padding on either side.

"""
    text += _block("Right", "Within rounding of eager attention.", of("right"))
    text += _block(
        "Right, but for dropout in training",
        "Their defaults drop attention's weights in training, which is an error until the configuration's "
        f"attention dropout is 0, or with `register({handed})` PyTorch's work.",
        (o.model_type for o in found if o.kind == "right" and "dropout in attention" in o.training),
    )
    text += _block(
        "Right but where they pool padding",
        "With padding on the left they take a row of padding for their result, which eager and sdpa fill "
        "differently too.",
        of("undefined"),
    )
    for title, why in (
        ("Masks that Tandem does not know", "mask is built by"),
        ("Masks that the model makes as a tensor", "a mask tensor"),
        ("Position biases", "a position bias"),
        ("Heads of more than 256 dimensions", "more than 256"),
    ):
        served = [o.model_type for o in found if why in o.why and o.instead.startswith("right")]
        text += _block(title, f"An error; right with `register({handed})`.", served)
    served_not = [
        o.model_type
        for o in found
        if o.kind == "refused" and handed in o.why and not o.instead.startswith("right")
    ]
    text += _block("Lacking more than that", 'An error; use `attn_implementation="eager"`.', served_not)
    text += _block(
        "Keys or sinks chosen otherwise",
        "What the model hands to its attention is not known to Tandem: an error; use "
        '`attn_implementation="eager"`.',
        (o.model_type for o in found if o.kind == "refused" and "asks for" in o.why and handed not in o.why),
    )
    text += _block(
        "Attention of their own, from a mask",
        "They compute their attention outside Transformers' attention interface: an error; use "
        '`attn_implementation="eager"`.',
        of("refused", "from a mask tensor"),
    )
    text += _block(
        "Attention of their own, by class",
        'They fail as they load, with an error that says so; use `attn_implementation="sdpa"` or `"eager"`.',
        of("refused", "by classes of its own"),
    )
    text += _block(
        "Attention of their own, whatever is asked for",
        "They load and are right, and Tandem has no part in it.",
        of("own") + of("static"),
    )
    reasons: dict[str, list[str]] = {}
    for name, reason in not_built().items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in sorted(reasons.items()):
        text += _block(f"Not tried: {reason}", "The test does not build or call them.", names)
    return text.rstrip() + "\n"


if __name__ == "__main__":
    everything = outcomes(every="--all" in sys.argv)
    if "--all" in sys.argv:
        lines = [f"{o.model_type}: {reason_not_built(o.why)}" for o in everything if o.kind == "not built"]
        NOT_BUILT.write_text("\n".join(["# Families that the walk does not build: reasons.", *lines]) + "\n")
        print(f"{len(lines)} families are not built: set NOT_BUILT_COUNT")
    PAGE.write_text(page(everything))
