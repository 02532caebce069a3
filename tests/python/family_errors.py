"""How far the results of two models of a family are apart, and what one of them keeps to itself."""

from __future__ import annotations

from typing import Any

import families
import family_vision
import tandem
import torch


def differ(expected: Any, got: Any) -> tuple[float, float]:
    """The largest errors of outputs and gradients, against the largest value of each tensor."""
    outputs = [0.0]
    for path, tensor in expected[0].items():
        other = got[0].get(path)
        if other is None and "attentions." in path:  # weights that eager gives without being asked
            continue
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


def kept(eager: Any, ours: Any, arguments: dict[str, Any]) -> list[str]:
    """Attention's weights that eager attention gives on request, and ours leaves out without an error."""

    def given(model: Any) -> list[str]:
        outputs = family_vision.call(model, {**arguments, "output_attentions": True})
        return [path for path, _ in families.floats(outputs) if "attentions" in path]

    try:
        wanted = given(eager)
    except Exception:  # the family has no such option
        return []
    try:
        found = given(ours)
    except tandem.TandemError:
        return []
    return sorted({*wanted} - {*found})
