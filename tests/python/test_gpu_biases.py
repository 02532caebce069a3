"""Models with position biases and mask tensors in bf16 on a GPU: logits and gradients as exact as eager
attention's, against the model in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_models import assert_as_exact, pytestmark
from test_transformers_biases import images, swin, t5, text

MODELS = {"t5": t5, "swin": swin}
DEVICE = "cuda"

__all__ = ["pytestmark"]


def models(name: str) -> tuple[Any, Any, Any]:
    """The model in float32 and in bf16 on eager attention, and in bf16 on Tandem, with the same weights."""
    torch.manual_seed(1)
    exact, eager, ours = (MODELS[name](attention) for attention in ("eager", "eager", "tandem"))
    with torch.no_grad():
        for parameter in exact.parameters():
            if parameter.ndim > 1:  # scores and logits of a few units
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter.bfloat16())
    for model in (eager, ours):
        model.load_state_dict(exact.state_dict())
        model.bfloat16()
    return exact.to(DEVICE), eager.to(DEVICE), ours.to(DEVICE)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_as_exact_as_eager(name: str, side: str) -> None:
    if name == "swin" and side != "none":
        pytest.skip("images have no padding")
    given = {key: t.to(DEVICE) for key, t in (images() if name == "swin" else text(side)).items()}
    made = models(name)
    inputs = [{k: t.to(m.dtype) if t.is_floating_point() else t for k, t in given.items()} for m in made]
    logits = [model(**of).logits for model, of in zip(made, inputs, strict=True)]
    assert_as_exact(*reversed(logits))
    for t in logits:
        t.float().square().mean().backward()
    gradients = [[p.grad for p in model.parameters()] for model in made]
    for (parameter, _), a, b, c in zip(made[0].named_parameters(), *gradients, strict=True):
        assert (a is None) == (b is None) == (c is None), parameter
        if a is not None and a.ndim > 1:
            assert_as_exact(c, b, a, parameter)
