"""Models with position biases, mask tensors and dropout in attention on the Transformers integration, beside
eager attention: T5 and Swin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hub
import pytest
import tandem
import torch
from hub import integration, transformers

pytestmark = pytest.mark.usefixtures("registered")

B, ROWS, VOCABULARY = 3, 23, 64


def t5(attention: str) -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    return transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=attention)


def swin(attention: str) -> Any:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.SwinForImageClassification._from_config(config, attn_implementation=attention)


def padding(side: str) -> torch.Tensor:
    mask = hub.padding(side, ROWS, 8, 0, 3)
    if side == "inside":
        mask[0, 7:9] = 0
    return mask


def text(side: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (B, ROWS))
    return {"input_ids": ids, "labels": ids, "attention_mask": padding(side)}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(B, 3, 32, 32), "labels": torch.tensor([0, 1, 0])}


def both(make: Callable[[str], Any]) -> tuple[Any, Any]:
    """The same model on both."""
    torch.manual_seed(1)
    eager, ours = make("eager"), make("tandem")
    for p in eager.parameters():  # so that biases, which start as zeros, have something to say
        torch.nn.init.normal_(p, std=0.3)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of tandem.attention that the integration makes."""
    seen: list[dict[str, Any]] = []

    def attention(*tensors: torch.Tensor, **options: Any) -> Any:
        seen.append(options)
        return tandem.attention(*tensors, **options)

    monkeypatch.setattr(integration, "attention", attention)
    return seen


def compare(eager: Any, ours: Any, given: dict[str, torch.Tensor], seen: torch.Tensor | None = None) -> None:
    results = [model(**given) for model in (eager, ours)]
    logits = [r.logits if seen is None else r.logits[seen] for r in results]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    for result in logits:
        result.square().mean().backward()
    for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            scale = max(1e-3, a.grad.abs().max().item())
            torch.testing.assert_close(b.grad / scale, a.grad / scale, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("side", ["none", "right", "left", "inside"])
def test_t5(side: str, calls: list[dict[str, Any]]) -> None:
    """Encoder, decoder and between them; the biases' tables have gradients."""
    eager, ours = both(t5)
    compare(eager, ours, text(side))
    table = ours.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.grad.abs().max() > 0
    assert len(calls) == 6
    assert all("bias" in options for options in calls)


def test_generation_with_a_cache() -> None:
    ids = torch.randint(3, VOCABULARY, (B, 9))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    results = [model.eval().generate(ids, **options) for model in both(t5)]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions(dtype: torch.dtype) -> None:
    """Of booleans, or of numbers that are added."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    eager, ours = both(
        lambda name: transformers.LlamaForCausalLM._from_config(config, attn_implementation=name)
    )
    given = text("none")
    seen = torch.rand(B, 1, ROWS, ROWS) > 0.4
    seen |= torch.eye(ROWS, dtype=torch.bool)
    added = torch.where(seen, torch.randn(seen.shape), torch.finfo(torch.float32).min)
    plain = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    theirs = {**given, "attention_mask": plain if dtype == torch.bool else added}
    given["attention_mask"] = seen if dtype == torch.bool else added
    torch.testing.assert_close(ours(**given).logits, eager(**theirs).logits, rtol=1e-4, atol=1e-4)


def test_dropout_in_attention(calls: list[dict[str, Any]]) -> None:
    """In training every call has it: logits change from call to call and repeat with the seed."""
    for make, given in ((t5, text("left")), (swin, images())):
        _, ours = both(make)
        exact = ours.eval()(**given).logits.detach()
        assert all(options.get("dropout_p", 0.0) == 0.0 for options in calls)
        calls.clear()
        for module in ours.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
            elif type(module).__name__ == "T5Attention":
                module.dropout = 0.1
        ours.train()
        torch.manual_seed(3)
        first, second = ours(**given).logits, ours(**given).logits
        torch.manual_seed(3)
        assert torch.equal(ours(**given).logits, first)
        assert not torch.equal(first, second)
        assert calls and all(options["dropout_p"] == 0.1 for options in calls)
        calls.clear()
        assert (first - exact).abs().max() < 20 * exact.abs().max()
