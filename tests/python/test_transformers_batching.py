"""Transformers' continuous batching on Tandem: tokens and their probabilities against eager attention's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tandem
import torch
from hub import integration, transformers
from test_transformers import MODELS, models

NAME = "tandem_flash"
LENGTHS = (3, 17, 1, 9)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    integration.register()
    integration.register(NAME)


def prompts() -> list[list[int]]:
    """Of these lengths, and one that begins as the second does, with two of its pages."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in LENGTHS]
    return [*made, [*made[1][:16], 7, 8]]


def batched(model: Any, tokens: int = 12, **options: Any) -> list[Any]:
    """The requests' outputs in order. Batches of 20 tokens cut prompts into chunks."""
    options = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 20, "return_logprobs": True, **options}
    results = model.generate_batch(
        prompts(),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
    )
    outputs = list(results.values())
    assert [output.error for output in outputs] == [None] * len(prompts())
    assert [output.prompt_ids for output in outputs] == prompts()
    return outputs


def served(name: str) -> Any:
    model = copy.deepcopy(models(name)[0])
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_are_those_of_eager_attention(name: str) -> None:
    """Of each token that came, by one pass of the eager model over the whole request."""
    eager = models(name)[0].eval()
    for output in batched(served(name)):
        whole = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            logits = eager(whole, use_cache=False).logits[0, len(output.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=1e-4)
        assert torch.all(expected >= logits.log_softmax(-1).max(-1).values - 1e-4)


def test_the_model_runs_without_batching_too() -> None:
    model, eager = served("llama"), models("llama")[0].eval()
    ids = torch.tensor(prompts()[1])[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))


def test_block_tables_are_an_error() -> None:
    """They come on GPUs alone, for attention with the names of FlashAttention 2 and 3."""
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(tandem.UnsupportedError, match="a block table in continuous batching, "):
        integration.attention_forward(
            torch.nn.Module(), q, q, q, None, cache=object(), cu_seq_lens_q=torch.tensor([0, 3]),
            cu_seq_lens_k={}, block_table=torch.zeros(1, 1, 2),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "wish"),
    [
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "a position bias in continuous batching"),
        ({"dropout": 0.1}, "dropout in attention in continuous batching"),
        ({"block_indices": torch.zeros(1)}, "attention with block_indices="),
    ],
)
def test_what_batches_go_without_is_an_error(options: dict[str, Any], wish: str) -> None:
    q = torch.zeros(1, 4, 3, 16)
    ends = torch.tensor([0, 3])
    with pytest.raises(tandem.UnsupportedError, match=f'{wish}.*"eager"'):
        integration.attention_forward(
            torch.nn.Module(), q, q, q, None, cache=object(), cu_seq_lens_q=ends, cu_seq_lens_k={}, **options
        )
