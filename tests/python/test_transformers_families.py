"""Families of the installed Transformers, tiny, beside eager attention: none is wrong in silence.

Of all families, which take six minutes of processor time, `make test` tries one of six of each of the page's
lists, and those that tests name; `make test-all` sets TANDEM_ALL_FAMILIES=1 and tries them all.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path

from hub import integration, transformers  # isort: skip  # what follows wants Transformers

import family_page
import family_walk
import pytest
import torch
from family_walk import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers-families.md"
#: Families in the page's lists are those of this release; what is wrong or unclear counts in every other too.
LISTED = transformers.__version__ == family_page.RELEASE
listed = pytest.mark.skipif(not LISTED, reason=f"the lists are of Transformers {family_page.RELEASE}")


EVERY = os.environ.get("TANDEM_ALL_FAMILIES") == "1"
RIGHT = {"t5", "swin"}
HANDED = {"llama4", "t5gemma2", "gemma4_unified"}  # to PyTorch, and right there


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    some = {*family_page.sample(), *RIGHT, *HANDED}
    return family_page.outcomes([name for name in family_page.built() if EVERY or name in some])


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.model_type}: {o.kind}: {o.why} {o.instead}" for o in outcomes)


def test_no_family_is_wrong_in_silence(outcomes: list[Outcome]) -> None:
    """Outputs and all gradients, without padding and with padding on either side."""
    wrong = [o for o in outcomes if o.kind in ("wrong", "error")]
    assert not wrong, told(wrong)
    right = {o.model_type for o in outcomes if o.kind == "right"}
    assert not LISTED or len(right) >= (540 if EVERY else 90)
    assert {o.model_type for o in outcomes if o.kind == "undefined"} <= family_page.POOL_PADDING
    assert sum(o.kind == "as sdpa" for o in outcomes) <= 4
    assert not LISTED or right >= RIGHT


def test_no_family_keeps_attentions_weights_to_itself(outcomes: list[Outcome]) -> None:
    """Where eager attention gives them on request, Tandem's gives an error."""
    silent = [(o.model_type, o.kept) for o in outcomes if o.kept]
    assert not silent


def test_refusals_say_what_to_do(outcomes: list[Outcome]) -> None:
    remedy = re.compile(r"; .*(load the model with attn_implementation=|attention dropout to 0)")
    for outcome in outcomes:
        for refusal in (outcome.why if outcome.kind == "refused" else "", outcome.training):
            assert not refusal or remedy.search(refusal), told([outcome])


def test_what_goes_to_pytorch_is_right(outcomes: list[Outcome]) -> None:
    """Where the refusal names it: eager's results. What is refused says so.

    A few models have other results on Transformers' own sdpa than on eager; they have those.
    """
    handed = [o for o in outcomes if "unsupported=" in o.why + o.training]
    assert len(handed) >= (14 if EVERY else len(HANDED))
    assert sum(o.instead.startswith("as sdpa") for o in handed) <= family_page.DIFFER_ON_SDPA
    for outcome in handed:
        wrong = outcome.instead.startswith(("wrong", "error")) or "unsupported=" in outcome.instead
        assert not wrong, told([outcome])
    assert HANDED <= {o.model_type for o in handed if o.instead.startswith("right")}


def test_dropout_in_training_stops_nobody(outcomes: list[Outcome]) -> None:
    stopped = [o for o in outcomes if o.training and o.kind in ("right", "undefined")]
    assert not stopped, told(stopped)


@listed
def test_families_that_are_not_built_are_the_known_ones(outcomes: list[Outcome]) -> None:
    """They cannot become more in silence: one more is a family to build, or to list with its reason."""
    known = family_page.not_built()
    more = [o for o in outcomes if o.kind == "not built" and o.model_type not in known]
    assert not more, told(more)
    assert len(known) - len(family_page.inside()) == family_page.NOT_BUILT_COUNT


@listed
def test_parts_run_inside_the_family_that_is_named(outcomes: list[Outcome]) -> None:
    """They need what only the whole model makes: its masks, or a class that Transformers does not map."""
    parts = {o.model_type: o.parts for o in outcomes}
    tried = [(part, home) for part, home in family_page.inside().items() if home in parts]
    assert tried and not [f"{part} in {home}" for part, home in tried if part not in parts[home]]


@listed
@pytest.mark.parametrize(
    "name", [name for name, why in family_page.not_built().items() if why == "needs timm"]
)
def test_families_that_need_timm(name: str) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    family_walk.start()
    outcome = family_walk.walk(name)
    assert outcome.kind == "own", told([outcome])


@listed
def test_every_family_is_on_the_page() -> None:
    words = set(re.findall(r"[\w.-]+", PAGE.read_text()))
    assert {*family_page.all_families()} <= words


@listed
def test_the_page_of_families_is_up_to_date(outcomes: list[Outcome]) -> None:
    text, made = PAGE.read_text(), family_page.page(outcomes)
    known = family_page.lists(text)
    assert all(names <= known[title] for title, names in family_page.lists(made).items()), told(outcomes)
    assert not EVERY or text == made, (
        "the families have changed: python tests/python/family_page.py makes docs/transformers-families.md"
    )


def _cut_for_causal_masks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = integration.Pattern
    monkeypatch.setattr(pattern, "positional", property(lambda self: self.causal))


def _scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = integration.attention

    def twice(q: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        return attention(1.02 * q, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(integration, "attention", twice)


def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    make = integration._masks.make
    monkeypatch.setattr(
        integration._masks,
        "make",
        lambda *a: dataclasses.replace(make(*a), rows=None, seqused_k=None, seqused_q=None),
    )


@pytest.mark.parametrize(
    "fault, family",
    [(_cut_for_causal_masks_alone, "modernbert"), (_scaled, "llama"), (_scaled, "vit"), (_unpadded, "bert")],
)
def test_the_walk_finds_faults(fault: object, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family_walk.start()
    assert family_walk.walk(family).kind == "right"
    fault(monkeypatch)  # type: ignore[operator]
    assert family_walk.walk(family).kind == "wrong"
    integration.register()
