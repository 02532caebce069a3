"""Transformers models in bf16 on a GPU: Tandem as exact as eager attention, against the model in float32.

The rule is the contract's: no further from float32 than twice eager bf16. Every model has the same
weights in the three, bf16 numbers all of them.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import hub
import pytest
import torch
from hub import transformers
from test_transformers import MODELS, SMALL

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use"),
]

ROWS, VOCABULARY = 150, 256
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
# Both experts, so that a rounding never sends a token to another one; windows shorter than the text.
EXTRA = {"gpt_oss": {"num_experts_per_tok": 2}}
BART = {"d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 192}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 192}
BART |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * ROWS, "dropout": 0.0, "pad_token_id": 0}
BART |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}


def config_of(name: str) -> Any:
    if name == "bart":
        return transformers.BartConfig(**BART, attn_implementation="eager")
    kind, extra = MODELS[name]
    sizes = {**SMALL, **extra, **SIZES, **EXTRA.get(name, {}), "max_position_embeddings": 2 * ROWS}
    sizes = {key: 8 * value if key == "sliding_window" else value for key, value in sizes.items()}
    return getattr(transformers, kind)(**sizes)


@functools.cache
def models(name: str) -> tuple[Any, Any, Any]:
    """The model in float32 and in bf16 on eager attention, and in bf16 on Tandem."""
    torch.manual_seed(7)
    config = config_of(name)
    maker = transformers.BartForConditionalGeneration if name == "bart" else None
    model = maker(config) if maker else transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # scores and logits of a few units
                parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
            elif parameter.shape == (4,):  # sinks
                parameter.normal_()
    eager = model.eval().cuda().bfloat16()
    exact = copy.deepcopy(eager).float()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("tandem")
    return exact, eager, ours


def text(name: str, side: str) -> dict[str, torch.Tensor]:
    """A batch of three: 0, 40 and 120 tokens of padding on that side."""
    ids = torch.randint(3, VOCABULARY, (3, ROWS))
    mask = hub.padding(side, ROWS, 0, 40, 120)
    inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
    if name == "bart":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 70)).cuda()
    return inputs


def assert_as_exact(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str = "") -> None:
    """Root mean square errors, for a maximum over a few elements is a matter of luck; and one rounding."""
    size = exact.float().square().mean().sqrt().item()
    error, yardstick = ((t.float() - exact.float()).square().mean().sqrt().item() for t in (ours, eager))
    assert error <= 2 * yardstick + 2**-8 * size, f"{what}: {error:.2e}, eager {yardstick:.2e}, of {size:.2e}"


NAMES = [*MODELS, "bart"]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, side: str) -> None:
    inputs = text(name, side)
    with torch.no_grad():
        exact, eager, ours = (model(**inputs).logits for model in models(name))
    seen = torch.ones(3, exact.shape[1]) if name == "bart" else inputs["attention_mask"]
    seen = seen.bool().to(exact.device)
    assert_as_exact(ours[seen], eager[seen], exact[seen])
    assert (ours[seen] - exact[seen]).abs().max() <= 2 * (eager[seen] - exact[seen]).abs().max() + 2**-6


def check_generation(name: str, **options: Any) -> None:
    """Greedy generation over a left-padded batch: each step's logits those of the whole text so far."""
    inputs, steps = text(name, "left"), 12
    result = models(name)[2].generate(
        **inputs,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, steps, dtype=torch.int64, device="cuda")], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        exact, eager = (
            model(input_ids=result.sequences, attention_mask=mask, position_ids=positions).logits
            for model in models(name)[:2]
        )
    logits = torch.stack(result.logits, 1)
    assert torch.equal(logits.argmax(-1), result.sequences[:, ROWS:])
    assert_as_exact(logits, eager[:, ROWS - 1 : -1], exact[:, ROWS - 1 : -1])


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, cache: str | None) -> None:
    check_generation(name, cache_implementation=cache, disable_compile=True)


def test_compiled_generation() -> None:
    """As `generate` does by default with a static cache: its steps compiled, and replayed as CUDA graphs."""
    check_generation("llama", cache_implementation="static")


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step(name: str) -> None:
    """The loss and every parameter's gradient, under gradient checkpointing too."""
    inputs = text(name, "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels = inputs.get("decoder_input_ids", labels)
    trained = [copy.deepcopy(model).train() for model in models(name)]
    trained[2].gradient_checkpointing_enable()
    losses = [model(**inputs, labels=labels, use_cache=False).loss for model in trained]
    for loss in losses:
        loss.backward()
    exact, eager, ours = (loss.item() for loss in losses)
    assert abs(ours - exact) <= 2 * abs(eager - exact) + 2**-8 * exact
    gradients = [[p.grad for p in model.parameters()] for model in trained]
    names = [parameter for parameter, _ in trained[0].named_parameters()]
    for parameter, a, b, c in zip(names, *gradients, strict=True):
        assert (a is None) == (b is None) == (c is None), parameter
        if a is not None and a.ndim > 1:
            assert_as_exact(c, b, a, parameter)
    # Vectors as one: some have two elements, and a bias of keys has a gradient of 0 but for roundings.
    vectors = [torch.cat([g for g in found if g is not None and g.ndim == 1]) for found in gradients]
    assert_as_exact(*reversed(vectors), "vectors")


def test_a_compiled_model() -> None:
    """Inductor's code of the whole model in one graph, whatever the padding."""
    exact, eager, ours = models("gemma2")
    compiled = torch.compile(ours, fullgraph=True)
    for side in ("left", "right"):
        inputs = text("gemma2", side)
        seen = inputs["attention_mask"].bool()
        with torch.no_grad():
            a, b, c = (model(**inputs).logits[seen] for model in (exact, eager, compiled))
        assert_as_exact(c, b, a)
