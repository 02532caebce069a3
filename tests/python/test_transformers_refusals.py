"""What the Transformers integration refuses: masks, options and models that it does not know."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tandem
import torch
from hub import integration, transformers
from tandem.integrations import _instead
from test_transformers import SMALL, padding, tokens

pytestmark = pytest.mark.usefixtures("registered")


def test_what_tandem_lacks_is_an_error_that_says_what_to_do() -> None:
    q = torch.randn(1, 2, 4, 8, device="meta")  # taken for a GPU
    attend = functools.partial(integration.attention_forward, torch.nn.Module(), q, q, q)
    with pytest.raises(tandem.UnsupportedError, match='a mask tensor.*2D mask, or .*"sdpa"'):
        attend(torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta"))
    with pytest.raises(tandem.UnsupportedError, match='a position bias.*"sdpa"'):
        attend(None, is_causal=False, position_bias=torch.zeros(1, 2, 4, 4, device="meta"))
    with pytest.raises(tandem.UnsupportedError, match="dropout in attention"):
        attend(None, is_causal=False, dropout=0.1)
    q = torch.randn(1, 2, 4, 8)
    for name, value in (("output_attentions", True), ("cache", object())):
        with pytest.raises(tandem.UnsupportedError, match="asks for"):
            integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: value})


@pytest.mark.parametrize(
    ("device", "head_dim", "lacks"), [("cpu", 512, False), ("cuda", 128, False), ("cuda", 264, True)]
)
@pytest.mark.parametrize("wish", ["dropout in attention", "a position bias", "a mask tensor"])
def test_functions_are_for_the_cpu_and_for_heads_that_gpus_have(
    device: str, head_dim: int, lacks: bool, wish: str
) -> None:
    class Query:
        shape, dtype = (1, 2, 4, head_dim), torch.bfloat16

        def __init__(self) -> None:
            self.device = torch.device(device)

    query: Any = Query()
    given: dict[str, Any] = {"mask": None, "dropout": 0.0, "position_bias": None}
    given |= {
        "dropout in attention": {"dropout": 0.1},
        "a position bias": {"position_bias": torch.zeros(1, 2, 4, 4)},
        "a mask tensor": {"mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)},
    }[wish]
    lacking = _instead.lacking(query, query, **given)
    assert (None if lacking is None else lacking[0]) == (wish if lacks else None)


@pytest.mark.parametrize(("device", "head_dim", "most"), [("cpu", 1032, 1024), ("meta", 264, 256)])
def test_wide_heads_are_refused_where_no_kernel_has_them(device: str, head_dim: int, most: int) -> None:
    """A device that is not the CPU is taken for a GPU."""
    q = torch.randn(1, 2, 4, head_dim, device=device)
    with pytest.raises(
        tandem.UnsupportedError, match=f'heads of {head_dim} dimensions, more than {most}.*"sdpa"'
    ):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, is_causal=True)


def test_tensors_that_change_the_mathematics_are_refused() -> None:
    """What a model hands to attention and Tandem does not take, whatever it is called."""
    q = torch.randn(1, 2, 4, 8)
    call = functools.partial(integration.attention_forward, torch.nn.Module(), q, q, q, None, is_causal=True)
    for name in ("block_indices", "indices", "sinks", "not_yet_invented"):
        with pytest.raises(tandem.UnsupportedError, match=f'with {name}=, a tensor.*"eager"'):
            call(**{name: torch.zeros(1)})
        call(**{name: None})
    call(position_ids=torch.arange(4)[None], use_cache=True, num_items_in_batch=torch.tensor(4))


LAYERS = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
#: Models whose layers do not hand on that the attention's weights are an output.
SILENT_LAYERS = {
    "GPT2": {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64},
    "OPT": {**LAYERS, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "StableLm": {**LAYERS, "num_key_value_heads": 2, "intermediate_size": 32},
}


@pytest.mark.parametrize("name", SILENT_LAYERS)
def test_the_attentions_weights(name: str) -> None:
    """As an output of the call, of `generate`, and of a compiled model."""
    config = getattr(transformers, f"{name}Config")(**SILENT_LAYERS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tandem").eval()
    given = {"input_ids": torch.randint(2, 64, (2, 5))}
    model(**given, output_attentions=False, output_hidden_states=True)
    for wish in (
        functools.partial(model, **given, output_attentions=True),
        functools.partial(model, **given, output_attentions=True, output_hidden_states=True),
        functools.partial(
            model.generate, **given, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
        ),
        functools.partial(torch.compile(model, backend="eager"), **given, output_attentions=True),
    ):
        with pytest.raises(tandem.UnsupportedError, match='the attention\'s weights, .*"eager"'):
            wish()
    model(**given)


def test_a_model_that_asks_for_deterministic_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attention(q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return tandem.attention(q, *rest, **options)

    monkeypatch.setattr(integration, "attention", attention)
    for wish in (True, False):
        config = transformers.ModernBertConfig(
            **LAYERS, intermediate_size=32, pad_token_id=0, deterministic_flash_attn=wish
        )
        model = transformers.AutoModel.from_config(config, attn_implementation="tandem")
        model(input_ids=torch.randint(2, 64, (2, 5)))
    assert asked == [True, False]


OWN_ATTENTION = {
    "bloom": ("BloomConfig", {}),
    "mpnet": ("MPNetConfig", {}),
    "mpt": ("MptConfig", {}),
    "roformer": ("RoFormerConfig", {"embedding_size": 32}),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_attention_of_their_own(name: str) -> None:
    config, extra = OWN_ATTENTION[name]
    sizes = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
    sizes |= {"num_hidden_layers": 1, **extra}
    small = getattr(transformers, config)(**sizes)
    model = transformers.AutoModel.from_config(small, attn_implementation="tandem").eval()
    with pytest.raises(tandem.UnsupportedError, match='computes its attention itself.*"eager"'):
        model(input_ids=tokens(), attention_mask=padding("right"))


def test_a_mask_is_no_tensor() -> None:
    mask = integration.attention_mask(1, 4, 4)
    scores = torch.zeros(1, 2, 4, 4)
    uses: list[Callable[[], Any]] = [
        lambda: scores + mask,
        lambda: mask + scores,
        lambda: (1.0 - mask) * -1e4,
        lambda: mask[:, :, :, :4],
        lambda: mask == 0,
        lambda: mask < 0,
        lambda: ~mask,
        lambda: mask.size(),
        lambda: mask.dtype,
        lambda: mask.to(torch.float32),
        lambda: mask.to(torch.bool),
        lambda: scores.masked_fill(mask, 0.0),
        lambda: torch.where(mask, scores, 0.0),
        lambda: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
    ]
    for use in uses:
        with pytest.raises(tandem.UnsupportedError, match="computes its attention itself"):
            use()
    assert mask.to("cpu") is mask and not hasattr(mask, "device")
    assert mask.shape == (1, 1, 4, 4) and mask.ndim == 4
    for twin in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert twin.pattern == mask.pattern and twin.shape == mask.shape
