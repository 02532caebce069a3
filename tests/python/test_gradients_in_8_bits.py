"""The study of gradients in 8 bits: its roundings, its gradients, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the benchmark draws with matplotlib")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import eight_bit_gradients as study  # noqa: E402
import eight_bit_recipes  # noqa: E402
import eight_bit_tables  # noqa: E402
import eight_bit_tensors  # noqa: E402
import gradients_in_8_bits  # noqa: E402
from eight_bit_learning import ByRecipe  # noqa: E402

DTYPES = {study.E4M3: torch.float8_e4m3fn, study.E5M2: torch.float8_e5m2, study.BF16: torch.bfloat16}


def spread(count: int) -> torch.Tensor:
    """Numbers over many octaves, some of them beyond what 8 bits hold."""
    return torch.randn(count) * torch.exp(6 * torch.randn(count))


@pytest.mark.parametrize("format", DTYPES, ids=lambda format: format.name)
def test_values_are_rounded_as_by_torch(format: study.Format) -> None:
    x = spread(100_000)
    expected = x.clamp(-format.limit, format.limit).to(DTYPES[format]).float()
    assert torch.equal(format.round(x), expected)


def test_whole_numbers_are_rounded_to_even_and_saturated() -> None:
    x = torch.tensor([-1000.0, -0.5, 0.5, 1.5, 2.4999, 126.6, 1000.0])
    assert study.S8.round(x).tolist() == [-127, 0, 0, 2, 2, 127, 127]


@pytest.mark.parametrize("format", (study.E4M3, study.S8), ids=lambda format: format.name)
def test_stochastic_rounding_is_unbiased(format: study.Format) -> None:
    x = torch.full((100_000,), 5.3)
    got = format.round(x, stochastic=True)
    assert len(got.unique()) == 2
    assert got.mean().item() == pytest.approx(5.3, abs=0.01)


def test_scales_are_those_of_their_group() -> None:
    x = spread(256 * 64).reshape(256, 64).double()
    for group, dims in (("block", (1, 2)), ("row", (2,)), ("column", (1,))):
        values, scale = study.rounded(x, study.Operand(study.S8, group))
        blocks = x.unflatten(0, (2, 128))
        most = blocks.abs().amax(dims, keepdim=True)
        assert torch.allclose(scale.reshape(most.shape).double(), most / 127)
        assert ((values - x).unflatten(0, (2, 128)).abs() <= most / 127 * 0.5001).all()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """q of two heads that share one of k and v."""
    torch.manual_seed(0)
    return tuple(torch.randn(1, 2, rows, 64, dtype=dtype) for rows in (512, 256, 256, 512))


def by_autograd(window: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = inputs()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    distance = torch.arange(256) - torch.arange(512)[:, None] % 256
    hidden = ((distance > window[1]) & (window[1] >= 0)) | ((-distance > window[0]) & (window[0] >= 0))
    s = (leaves[0] @ leaves[1].mT / 8).masked_fill(hidden, -torch.inf)
    return torch.autograd.grad(s.softmax(-1) @ leaves[2], leaves, dout)


def errors(recipe: study.Recipe, window: tuple[int, int] = (-1, 0)) -> list[float]:
    q, k, v, dout = inputs()
    got = study.Attention(q, k, v, recipe, window).gradients(dout, 128)
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, by_autograd(window), strict=True)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (63, 0)], ids=str)
def test_without_roundings_gradients_are_exact(window: tuple[int, int]) -> None:
    exact = study.Recipe(out=None)
    assert max(errors(exact, window)) < 1e-12
    for mend in ({"smooth_k": True}, {"smooth_v": True}, {"delta": "rounded"}, {"delta": "sum"}):
        assert max(errors(replace(exact, **mend), window)) < 1e-12


def test_recipes_err_as_much_as_their_formats() -> None:
    found = {name: errors(recipe) for name, recipe in eight_bit_recipes.together().items()}
    assert max(found["bf16"]) < 0.004
    assert 0.02 < max(found["s8, line, mended"]) < 0.04 < max(found["e4m3, block, mended"]) < 0.1
    assert max(found["s8, tensor"]) > 2 * max(found["s8, line, mended"])
    assert max(found["s8, line, mended"]) < max(found["s8, P and dS e4m3"]) < 0.06


def test_factors_of_rows_are_undone() -> None:
    operand = study.Operand(study.BF16, "one")
    product = study.Pair(operand, operand, rotated=True)
    folded = study.Recipe(dv=product, dq=product, dk=product, folded=True, out=None)
    assert max(errors(folded)) < 0.004


def test_attention_by_a_recipe_learns_through_autograd() -> None:
    q, k, v, dout = (x.unflatten(2, (-1, 256)).flatten(1, 2).transpose(1, 2) for x in inputs())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ByRecipe.apply(*leaves, study.Recipe(out=None), (-1, 0))
    got = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(got, by_autograd((-1, 0)), strict=True):
        expected = b.unflatten(2, (-1, 256)).flatten(1, 2).transpose(1, 2)
        assert torch.allclose(a, expected, atol=1e-12)


def test_recipes_that_changed_are_measured_anew() -> None:
    found = {"normal": eight_bit_tensors.random(128)["normal"]}
    rows = gradients_in_8_bits.measure_together(found, [], ["bf16", "s8, tensor"])
    kept = [{**row, "kept": True} for row in rows]
    again = gradients_in_8_bits.measure_together(found, kept, ["s8, tensor"])
    assert [(row["recipe"], "kept" in row) for row in again] == [("bf16", True), ("s8, tensor", False)]


def test_cosines_are_not_rounded_up_to_the_goal() -> None:
    assert [eight_bit_tables.show(x) for x in (0.9971, 0.99496, 0.9998, 0.5)] == [
        "0.997",
        "0.99496",
        "0.9998",
        "0.500",
    ]


def test_spikes_are_counted() -> None:
    norms = [1.0] * 100
    norms[30] = 5.0
    norms[60] = float("nan")
    assert eight_bit_tables.spikes(norms) == 2


def test_learning_keeps_each_run_and_ends_within_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "learning.json"
    command = [sys.executable, ROOT / "bench", "gradients-in-8-bits", "--parts", "learning", "--json", path]
    command += ["--steps", "2", "--shape", "64", "1", "1", "2", "128", "--text", "json"]

    def runs(*options: str) -> list[tuple[str, int, list[float]]]:
        subprocess.run([*command, *options], capture_output=True, check=True)
        document = json.loads(path.read_text())
        assert document["runs"]["learning"]["model"]["text"] == "json"
        return [(run["recipe"], run["seed"], run["losses"]) for run in document["learning"]]

    (first,) = runs("--seeds", "2", "--budget", "0.001")
    assert first[:2] == ("bf16", 0)
    every = runs("--seeds", "2", "--resume")
    names = list(eight_bit_recipes.learning())
    assert every[0] == first
    assert [run[:2] for run in every] == [
        *((name, seed) for seed in (0, 1) for name in names[:-1]),
        ("exact", 0),
        ("exact", 1),
    ]
    other = subprocess.run(
        [*command, "--resume", "--steps", "3"], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "are of another model, text or number of steps" in other.stderr


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    options = ["--quick", "--steps", "2", "--seeds", "1", "--shape", "64", "1", "1", "2", "128"]
    options += ["--json", path, "--plot", tmp_path / "study.png"]
    command = [sys.executable, ROOT / "bench", "gradients-in-8-bits", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(path.read_text())
    assert set(document["runs"]) == {"alone", "together", "learning", "kernels"}
    rows = {(r["inputs"], r["recipe"]): r for r in document["together"]}
    assert rows["normal", "bf16"]["dq"]["cosine"] > 0.99999 > rows["normal", "s8, tensor"]["dq"]["cosine"]
    assert {r["recipe"] for r in document["learning"]} == set(eight_bit_recipes.learning())
    assert {r["recipe"] for r in document["kernels"]} == {"bf16", "int8"}
    for run in (*document["learning"], *document["kernels"]):
        assert len(run["losses"]) == 2
        assert len(run["held_out"]) == 1
    assert "At 0.995 in every real layer: " in done.stdout
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    again = subprocess.run([*command[:3], "--from", path], capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout
