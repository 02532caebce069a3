"""Which products of the backward pass may be in 8 bits: gradients beside fp64, and whether models learn.

    python bench gradients-in-8-bits [--parts PART ...] [--json FILE] [--plot FILE]
    python bench gradients-in-8-bits --from FILE [--plot FILE]

The parts are `alone` (one product rounded, all else exact), `together` (whole recipes), `learning` (a small
transformer trained by some recipes, by seed) and `kernels` (one trained by Tandem's own calls); all of them
if none is named. A part replaces that of an earlier FILE. Arithmetic is in f64 on values that were rounded
exactly; `eight_bit_recipes.py` says what is rounded how. Tensors are random ones, those of a sentence
encoder, and those of models trained here. The exit status is 1 if no recipe in 8 bits reaches a cosine of
0.995 in every real layer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import eight_bit_learning
import eight_bit_recipes
import eight_bit_tables
import eight_bit_tensors
import harness
import loss_curves
import torch
from eight_bit_gradients import Attention, Recipe
from eight_bit_tables import GOAL, NAMES
from eight_bit_tensors import Tensors
from torch import Tensor

#: Which gradients a product has a part in.
AFFECTED = {"s": NAMES, "dp": ("dq", "dk"), "dv": ("dv",), "dq": ("dq",), "dk": ("dk",)}
SHORT = 1024  # tokens; of more a part of the recipes is measured
#: What --shape says of the transformer that learns.
SIZES = ("width", "heads", "heads_kv", "layers", "context")
CHUNK = 256  # rows whose P and dS are in memory


def gradients(tensors: Tensors, recipe: Recipe) -> dict[str, Tensor]:
    attention = Attention(tensors.q, tensors.k, tensors.v, recipe, tensors.window)
    return dict(zip(NAMES, attention.gradients(tensors.dout, CHUNK), strict=True))


def cosine(a: Tensor, b: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Zeros are like nothing but zeros."""
    (aa, bb, ab) = ((x * y).sum(dims) for x, y in ((a, a), (b, b), (a, b)))
    return (ab / (aa * bb).sqrt()).where(aa * bb > 0, (aa == bb).double())


def compare(got: Tensor, exact: Tensor, tokens: int) -> dict[str, float]:
    """Both are (batch, KV heads, rows, channels)."""
    got, exact = (x.unflatten(2, (-1, tokens)).flatten(0, 2) for x in (got, exact))  # heads, tokens, channels
    error = got - exact
    return {
        "cosine": cosine(got, exact, (0, 1, 2)).item(),
        "worst_head": cosine(got, exact, (1, 2)).min().item(),
        #: the cosine that all but a twentieth of the rows exceed
        "rows": cosine(got, exact, (2,)).flatten().quantile(0.05).item(),
        "error": (error.norm() / exact.norm()).item(),
        "gain": ((got * exact).sum() / exact.square().sum()).item(),
        #: the error's mean over tokens, in units of what independent errors of its size have
        "bias": (error.mean(1).norm() / error.norm() * tokens).item(),
    }


def inputs(quick: bool, kept: Path | None) -> dict[str, list[Tensors]]:
    """Layers by the name of their input. Those of models are read from `kept`, or trained for and kept."""
    tokens = 128 if quick else 1024
    found = eight_bit_tensors.random(tokens)
    if quick:
        schedule = eight_bit_tensors.Schedule(2, 64, 1, 128, (1,), 128)
    else:
        found["encoder"] = eight_bit_tensors.encoder()
        schedule = eight_bit_tensors.Schedule()
    if kept and kept.exists():
        return found | {
            name: [Tensors(*layer) for layer in layers] for name, layers in torch.load(kept).items()
        }
    models = {}
    for name, shape in eight_bit_tensors.MODELS.items():
        for when, layers in eight_bit_tensors.trained(shape, schedule).items():
            models[f"{name}, {when}"] = layers
    if kept:
        torch.save({name: [tuple(layer) for layer in layers] for name, layers in models.items()}, kept)
    return found | models


def exact_gradients(layers: list[Tensors]) -> list[dict[str, Tensor]]:
    return [gradients(layer, Recipe(out=None)) for layer in layers]


def measure_alone(found: dict[str, list[Tensors]]) -> list[dict[str, Any]]:
    """By input, product and recipe: the lowest cosine of the gradients that it changes, layer by layer."""
    rows = []
    for name, layers in found.items():
        if layers[0].k.shape[-2] > SHORT:
            continue
        exact = exact_gradients(layers)
        for product, recipes in eight_bit_recipes.alone().items():
            for said, recipe in recipes.items():
                cosines = []
                for layer, right in zip(layers, exact, strict=True):
                    got = gradients(layer, recipe)
                    tokens = layer.k.shape[-2]
                    each = [compare(got[n], right[n], tokens)["cosine"] for n in AFFECTED[product]]
                    cosines.append(round(min(each), 6))
                rows.append({"inputs": name, "product": product, "recipe": said, "cosine": cosines})
        print(name, file=sys.stderr, flush=True)
    return rows


def measure_together(
    found: dict[str, list[Tensors]], kept: list[dict[str, Any]], names: list[str]
) -> list[dict[str, Any]]:
    """By input, layer and recipe: every gradient's figures. Rows of an earlier run are kept; if there are
    `names`, these recipes alone are measured, and anew."""
    rows = [row for row in kept if names and row["recipe"] not in names]
    earlier = {} if names else {(row["inputs"], row["layer"], row["recipe"]): row for row in kept}
    recipes = {said: of for said, of in eight_bit_recipes.together().items() if not names or said in names}
    for name, layers in found.items():
        for number, layer in enumerate(layers):
            (right,) = exact_gradients([layer])
            tokens = layer.k.shape[-2]
            for said, recipe in recipes.items():
                if tokens > SHORT and said not in eight_bit_tables.LONG:
                    continue
                if row := earlier.get((name, number, said)):
                    rows.append(row)
                    continue
                got = gradients(layer, recipe)
                figures = {
                    n: {key: float(f"{x:.6g}") for key, x in compare(got[n], right[n], tokens).items()}
                    for n in NAMES
                }
                rows.append({"inputs": name, "layer": number, "recipe": said, **figures})
        print(name, file=sys.stderr, flush=True)
    return rows


def report(document: dict[str, Any]) -> bool:
    """Whether a recipe reaches the goal in every real layer, and models learn by it."""
    for part, table in PARTS.items():
        if part in document:
            run = document["runs"][part]
            print(f"{part}: {run['device']}, commit {run['commit']}, {run['command']}\n")
            print("\n".join(table(document)), end="\n\n")
    if "together" not in document:
        return True
    holding = eight_bit_tables.holding(document)
    print(f"At {GOAL} in every real layer: {'; '.join(holding) or 'none'}")
    return bool(holding)


def plot(document: dict[str, Any], path: Path) -> None:
    """A row for each part that learns."""
    parts = [part for part in LEARNING if part in document]
    size = (12, 4.5 * len(parts))
    figure, rows = harness.pyplot().subplots(len(parts), 2, figsize=size, layout="constrained", squeeze=False)
    for part, axes in zip(parts, rows, strict=True):
        draw(document[part], *axes)
        axes[0].set_title(LEARNING[part])
    figure.savefig(path, dpi=110)


def draw(runs: list[dict[str, Any]], losses: Any, norms: Any) -> None:
    """Held-out losses less bf16's of the same seed, beside bf16's seeds less their mean; gradient norms."""
    base = {run["seed"]: torch.tensor(run["held_out"]) for run in runs if run["recipe"] == "bf16"}
    mean = torch.stack([*base.values()]).mean(0)
    for number, name in enumerate(dict.fromkeys(run["recipe"] for run in runs)):
        color, less = ("grey", ", less its seeds' mean") if name == "bf16" else (f"C{number}", "")
        for run in (run for run in runs if run["recipe"] == name):
            first = run["seed"] == 0
            every, steps = eight_bit_learning.EVERY, len(run["losses"])
            looks = [min(every * (i + 1), steps) for i in range(len(run["held_out"]))]
            distance = torch.tensor(run["held_out"]) - (mean if name == "bf16" else base[run["seed"]])
            losses.plot(looks, distance, color=color, label=name + less if first else None)
            smooth = loss_curves.smooth(run["norms"])
            norms.plot(range(len(smooth)), smooth, color=color, linewidth=0.8, label=name if first else None)
    losses.set(xlabel="step", ylabel="held-out loss less bf16's of the seed, nats a byte")
    norms.set(xlabel="step", ylabel=f"gradient norm (mean of {loss_curves.SMOOTH} steps)", yscale="log")
    for axis in (losses, norms):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


def learned(document: dict[str, Any], part: str) -> list[str]:
    return eight_bit_tables.learning(document[part])


#: The parts in which a model learns: by recipes in f32, and by Tandem's own kernels.
LEARNING = {"learning": "recipes", "kernels": "Tandem's kernels"}
PARTS = {
    "alone": eight_bit_tables.products,
    "together": eight_bit_tables.recipes,
    **{part: partial(learned, part=part) for part in LEARNING},
}


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__, "commit", "json", "plot", "from")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--tensors", type=Path, help="keep the models' tensors in this file, and read them there"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows of `together` and the runs of `learning` in FILE"
    )
    recipes = eight_bit_recipes.together()
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=recipes,
        default=[],
        metavar="NAME",
        help="measure these of `together` alone, anew",
    )
    learning = parser.add_argument_group("learning")
    learning.add_argument("--steps", type=int, default=300)
    learning.add_argument("--seeds", type=int, default=3)
    learning.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    learning.add_argument("--shape", type=int, nargs="+", default=[], help=" ".join(SIZES))
    learning.add_argument("--text", default="manual", help="of a package's Python files instead: its name")
    learning.add_argument("--budget", type=float, default=math.inf, help="seconds, in which runs end")
    return parser.parse_args()


def learn(args: argparse.Namespace, document: dict[str, Any], part: str) -> None:
    """Writes the document after each run, so that one that is ended loses no other."""
    shape = replace(eight_bit_learning.SHAPE, **dict(zip(SIZES, args.shape, strict=False)))
    task = eight_bit_learning.Task(args.steps, shape, args.text, args.device)
    model, earlier = eight_bit_learning.describe(task), document["runs"].get(part, {})
    kept = document.get(part, []) if args.resume else []
    if kept and (earlier.get("model") != model or len(kept[0]["losses"]) != args.steps):
        raise SystemExit(f"--resume: runs of {args.json} are of another model, text or number of steps")
    device = harness.device_name(args.device) if args.device == "cuda" else harness.machine()
    origin = harness.origin(device, args.commit) | {"model": model} | ({"before": earlier} if kept else {})

    def keep(runs: list[dict[str, Any]]) -> None:
        document[part], document["runs"][part] = runs, origin
        harness.write_json(document, args.json)

    if part == "kernels":
        attentions = {name: eight_bit_learning.by_kernels(name) for name in ("bf16", "int8")}
    else:
        recipes = eight_bit_recipes.learning()
        attentions = {name: eight_bit_learning.by_recipe(recipe) for name, recipe in recipes.items()}
    eight_bit_learning.measure(attentions, args.seeds, task, args.budget, kept, keep)


def main() -> int:
    args = arguments()
    if args.source:
        document = json.loads(args.source.read_text())
    else:
        document = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"runs": {}}
        found = inputs(args.quick, args.tensors) if {"alone", "together"} & set(args.parts) else {}
        for part in args.parts:
            if part in LEARNING:
                learn(args, document, part)
                continue
            resumed = args.resume and part == "together" and part in document
            if part == "alone":
                document[part] = measure_alone(found)
            else:
                document[part] = measure_together(found, document[part] if resumed else [], args.recipes)
            before = {"before": document["runs"][part]} if resumed else {}
            document["runs"][part] = harness.origin(harness.machine(), args.commit) | before
            harness.write_json(document, args.json)
    holds = report(document)
    if args.plot:
        plot(document, args.plot)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
