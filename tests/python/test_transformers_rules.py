"""What the Transformers integration takes for granted, each a rule: checked with an error, or true."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import hub
import pytest
import tandem
import torch
from hub import integration, transformers

pytestmark = pytest.mark.usefixtures("registered")

makers = importlib.import_module("transformers.masking_utils")
INSTEAD = "tandem-or-pytorch"
ROWS = 12


@pytest.fixture
def instead() -> Iterator[str]:
    """A name whose calls go to PyTorch where Tandem lacks something."""
    integration.register(INSTEAD, unsupported="sdpa")
    yield INSTEAD
    integration.register()


def states(queries: int = ROWS, keys: int = ROWS, width: int = 8) -> list[torch.Tensor]:
    return [torch.randn(3, 2, n, width, requires_grad=True) for n in (queries, keys, keys)]


def padding(side: str) -> torch.Tensor | None:
    return None if side == "none" else hub.padding(side, ROWS, 0, 2, 7).bool()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": makers.causal_mask_function,
    "bidirectional": makers.bidirectional_mask_function,
    "causal window": makers.sliding_window_causal_mask_function(4),
    "window both ways": makers.sliding_window_bidirectional_mask_function(3),
}


@pytest.mark.parametrize("queries", [ROWS, 5])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_queries_see_the_keys_of_the_mask(function: str, side: str, queries: int) -> None:
    """A window both ways is aligned to where its queries stand, not to the last key that is no padding."""
    mask, offset = padding(side), ROWS - queries
    given: dict[str, Any] = {"q_offset": offset, "mask_function": FUNCTIONS[function], "attention_mask": mask}
    seen = makers.sdpa_mask(3, queries, ROWS, allow_is_causal_skip=False, **given)
    rule = integration.attention_mask(3, queries, ROWS, **given)
    asks = torch.ones(3, queries, dtype=torch.bool) if mask is None else mask[:, offset:]
    q, k, v = states(queries)
    got, _ = integration.attention_forward(torch.nn.Module(), q, k, v, rule)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
    torch.testing.assert_close(got[asks], expected[asks], rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(got) * asks[:, :, None, None]
    for a, b in zip(
        *(torch.autograd.grad((o * weights).sum(), (q, k, v)) for o in (got, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_tensor_of_a_mask_is_the_one_of_transformers(function: str, side: str) -> None:
    """What PyTorch's attention is given where Tandem lacks something, with queries after a cache too."""
    dense = importlib.import_module(integration.Mask.__module__).dense
    for queries in (ROWS, 5):
        given: dict[str, Any] = {"q_offset": ROWS - queries, "mask_function": FUNCTIONS[function]}
        given["attention_mask"] = padding(side)
        seen = makers.sdpa_mask(3, queries, ROWS, allow_is_causal_skip=False, **given)
        torch.testing.assert_close(dense(integration.attention_mask(3, queries, ROWS, **given), "cpu"), seen)


def test_a_window_both_ways_in_a_compiled_model() -> None:
    def call(q: Any, k: Any, v: Any, mask: torch.Tensor) -> Any:
        rule = integration.attention_mask(
            3, ROWS, ROWS, mask_function=FUNCTIONS["window both ways"], attention_mask=mask
        )
        return integration.attention_forward(torch.nn.Module(), q, k, v, rule)[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    q, k, v = states()
    for side in ("right", "left"):
        mask = padding(side)
        assert mask is not None
        seen = makers.sdpa_mask(
            3, ROWS, ROWS, mask_function=FUNCTIONS["window both ways"], attention_mask=mask
        )
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
        torch.testing.assert_close(compiled(q, k, v, mask)[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_a_mask_is_for_the_queries_and_keys_that_come() -> None:
    call = functools.partial(integration.attention_forward, torch.nn.Module())
    mask = integration.attention_mask(3, ROWS, ROWS)
    for queries, keys in ((ROWS, ROWS + 3), (ROWS - 1, ROWS), (1, ROWS)):
        with pytest.raises(
            tandem.UnsupportedError, match=f'{queries} queries and {keys} keys.*under a mask.*"eager"'
        ):
            call(*states(queries, keys), mask)
    q, k, v = (t[:2] for t in states())
    with pytest.raises(tandem.UnsupportedError, match="a batch of 2 under a mask.* a batch of 3"):
        call(q, k, v, mask)
    with pytest.raises(tandem.UnsupportedError, match="a batch of 2 queries and 3 keys"):
        call(q, *states()[1:], mask)
    with pytest.raises(tandem.UnsupportedError, match="a query of 3 dimensions"):
        call(q[0], k, v, None)
    # What tells neither batches nor queries apart counts for each, as a tensor of size 1 would.
    wide = integration.attention_mask(1, 1, ROWS, mask_function=makers.bidirectional_mask_function)
    torch.testing.assert_close(call(*(s := states()), wide)[0], call(*s, None, is_causal=False)[0])


def test_a_window_both_ways_ends_where_its_keys_end() -> None:
    for queries, offset in ((5, 0), (5, 9), (ROWS + 1, 0)):
        with pytest.raises(
            tandem.UnsupportedError, match=f"keys {offset} to {offset + queries - 1} of {ROWS}"
        ):
            integration.attention_mask(
                3, queries, ROWS, q_offset=offset, mask_function=FUNCTIONS["window both ways"]
            )
    with pytest.raises(tandem.UnsupportedError, match="under a causal mask"):
        integration.attention_mask(3, ROWS + 1, ROWS)


def test_a_padding_mask_has_a_row_for_each_sequence() -> None:
    for mask in (torch.ones(1, ROWS), torch.ones(ROWS), torch.ones(3, 1, ROWS)):
        with pytest.raises(tandem.InvalidArgumentError, match="attention_mask must be of shape"):
            integration.attention_mask(3, ROWS, ROWS, attention_mask=mask.bool())


LOOKALIKES: dict[str, Callable[..., Any]] = {
    "a batch for a key": lambda b, h, q, k: b <= q,
    "a head for a key": lambda b, h, q, k: (h <= q) & (k <= q),
    "the causal mask by hand": lambda b, h, q, k: q >= k,
    "later keys": lambda b, h, q, k: k > q,
    "later keys, turned round": lambda b, h, q, k: q < k,
    "a window that ends before": makers.sliding_window_causal_mask_function(-1),
    "a distance with a sign": lambda b, h, q, k: (q - k) <= 3,
    "a distance below zero": lambda b, h, q, k: abs(q - k) <= -1,
    "a distance between queries": lambda b, h, q, k: abs(q - q) <= 1,
    "later places": lambda b, h, q, k: q - 1 >= 0,
    "the diagonal": lambda b, h, q, k: (q == k) & (k <= q),
    "a branch": lambda b, h, q, k: (k <= q) if (k <= q) else (q >= 0),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_a_causal_mask_or_a_window_is_refused(name: str) -> None:
    with pytest.raises(tandem.UnsupportedError, match="this model's mask is built by"):
        integration.attention_mask(1, ROWS, ROWS, mask_function=LOOKALIKES[name])


def test_a_window_of_no_keys_is_refused_where_it_is_used() -> None:
    """Qwen 2 MoE makes one beside the mask that its layers use."""
    mask = integration.attention_mask(
        3, ROWS, ROWS, mask_function=makers.sliding_window_causal_mask_function(0)
    )
    with pytest.raises(tandem.UnsupportedError, match='a window of no keys.*"eager"'):
        integration.attention_forward(torch.nn.Module(), *states(), mask)


def test_a_layer_without_a_mask_is_taken_at_its_word_where_all_agree() -> None:
    """eager pays no heed to is_causal and windows then, PyTorch's attention to the first, flash to both."""
    call = functools.partial(integration.attention_forward, torch.nn.Module())
    q, k, v = states()
    with pytest.raises(tandem.UnsupportedError, match="a window of 4 in 12 keys without a mask"):
        call(q, k, v, None, sliding_window=4)
    with pytest.raises(tandem.UnsupportedError, match="5 causal queries of 12 keys without a mask"):
        call(q[:, :, :5], k, v, None, is_causal=True)
    # Only the layer says that it is causal: eager sees all keys, PyTorch's attention earlier ones.
    with pytest.raises(tandem.UnsupportedError, match='12 causal queries.*without a mask.*"eager"'):
        call(q, k, v, None)
    call = functools.partial(call, is_causal=True)
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(call(q, k, v, None)[0], causal, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call(q, k, v, None, sliding_window=ROWS)[0], call(q, k, v, None)[0])
    one = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v).transpose(1, 2)
    torch.testing.assert_close(call(q[:, :, :1], k, v, None)[0], one, rtol=1e-5, atol=1e-5)


def test_attention_between_channels_hands_on_views() -> None:
    """Florence 2: tokens are the head dimension, and not the innermost."""
    views = [torch.randn(3, 4, 8, 12).transpose(2, 3).requires_grad_() for _ in range(3)]
    call = functools.partial(integration.attention_forward, torch.nn.Module(), attention_mask=None)
    out = call(*views, is_causal=False)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(*views).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, views, weights),
        torch.autograd.grad(expected, views, weights),
        rtol=1e-4,
        atol=1e-5,
    )


def test_options_that_are_not_known_are_refused() -> None:
    call = functools.partial(
        integration.attention_forward, torch.nn.Module(), *states(), None, is_causal=True
    )
    call(
        vision_feature_layer=[1, 0], vision_feature_select_strategy="default"
    )  # of an image encoder's outputs
    for option in ({"block_size": 64}, {"temperature": 0.5}, {"chosen": [1, 2]}, {"score_mod": print}):
        with pytest.raises(tandem.UnsupportedError, match=f'with {next(iter(option))}=.*"eager"'):
            call(**option)
    with pytest.raises(tandem.UnsupportedError, match="a scale that is a tensor"):
        call(scaling=torch.ones(()))
    call(deterministic=True, max_length_q=12, logits_to_keep=1)


def llama(attention: str, **fields: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": 64, **fields}, attn_implementation=attention)
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_compiled_model_without_a_mask() -> None:
    """Transformers joins a mask for packed sequences to every such model's; windows', and without a cache."""
    ids = torch.randint(2, 64, (2, ROWS))
    mistral = transformers.MistralConfig(
        **{**llama("eager").config.to_dict(), "sliding_window": 4, "num_key_value_heads": 2}
    )
    for model in (llama("tandem"), transformers.MistralForCausalLM(mistral).eval()):
        model.set_attn_implementation("tandem")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for options in ({}, {"use_cache": False}):
            got, expected = (f(ids, **options).logits for f in (compiled, model))
            torch.testing.assert_close(got, expected)
        positions = torch.cat([torch.arange(5), torch.arange(ROWS - 5)]).expand(2, -1)
        with pytest.raises(RuntimeError, match="divide a row into sequences.*pass cu_seq_lens_q"):
            compiled(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_without_a_mask(strict: bool) -> None:
    model, ids = llama("tandem"), torch.randint(2, 64, (2, ROWS))
    exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=strict).module()
    torch.testing.assert_close(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_register_takes_two_choices() -> None:
    with pytest.raises(
        tandem.InvalidArgumentError, match='unsupported is \'eager\'; it must be "error" or "sdpa"'
    ):
        integration.register(unsupported="eager")


def test_models_that_choose_attention_by_class_say_so_as_they_load() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    gptj = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": 64}
    for name, fields in (("Falcon", sizes), ("GPTJ", gptj), ("Data2VecVision", sizes)):
        config = getattr(transformers, f"{name}Config")(**fields)
        with pytest.raises(tandem.UnsupportedError, match='by classes of its own.*"tandem" is none.*"eager"'):
            transformers.AutoModel.from_config(config, attn_implementation="tandem")


def test_dropout_in_training_goes_to_pytorch_when_asked(
    instead: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, which a device that is not the CPU is taken for. It is said once."""
    query = torch.randn(3, 2, 4, 8, device="meta")
    call = [torch.nn.Module(), query, query, query, None]
    with pytest.raises(tandem.UnsupportedError, match='dropout in attention.*unsupported="sdpa"'):
        integration.attention_forward(*call, dropout=0.1, is_causal=False)
    with caplog.at_level(logging.WARNING, "tandem"):
        for _ in range(2):
            out, _ = transformers.AttentionInterface()[instead](*call, dropout=0.1, is_causal=False)
    assert out.shape == (3, 4, 2, 8)
    assert [r.message for r in caplog.records] == [
        "this model asks for dropout in attention, which Tandem does not have: PyTorch's sdpa computes its "
        "attention instead"
    ]


def test_masks_that_are_not_known_go_to_pytorch_when_asked(instead: str) -> None:
    """Joined by or (images in Gemma 3), by chunks (Llama 4), as 4D tensors, with holes under a window."""
    blocks = makers.blockwise_overlay(torch.tensor([[-1] * 4 + [0] * 4 + [-1] * 4] * 3))
    holes = torch.ones(3, ROWS, dtype=torch.bool)
    holes[1, 4:6] = False
    attention = transformers.AttentionInterface()[instead]
    unknown, chunks = "this model's mask is built by", torch.zeros(3, dtype=torch.int64)
    for function, mask, lacks in (
        (makers.or_masks(makers.causal_mask_function, blocks), padding("left"), unknown),
        (makers.chunked_causal_mask_function(4, chunks), padding("right"), unknown),
        (makers.sliding_window_causal_mask_function(4), holes, "padding between tokens"),
    ):
        with pytest.raises(tandem.UnsupportedError, match=f'{lacks}.*unsupported="sdpa"'):
            integration.attention_mask(3, ROWS, ROWS, mask_function=function, attention_mask=mask)
        seen = transformers.AttentionMaskInterface()[instead](
            3, ROWS, ROWS, mask_function=function, attention_mask=mask
        )
        q, k, v = states()
        got, _ = attention(torch.nn.Module(), q, k, v, seen)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        torch.testing.assert_close(got, expected.transpose(1, 2))
    masks = [transformers.AttentionMaskInterface()[instead](3, ROWS, n) for n in (ROWS, ROWS + 1)]
    parts = [makers.sdpa_mask(3, ROWS, n, allow_is_causal_skip=False) for n in (ROWS, ROWS + 1)]
    torch.testing.assert_close(torch.cat(masks, dim=-1), torch.cat(parts, dim=-1))  # T5Gemma 2's decoder
    ids = torch.randint(2, 64, (3, ROWS))
    whole = torch.ones(3, 1, ROWS, ROWS, dtype=torch.bool).tril()
    torch.testing.assert_close(
        llama(instead)(ids, attention_mask=whole).logits, llama("eager")(ids).logits, rtol=1e-4, atol=1e-4
    )


def test_position_biases_and_wide_heads_go_to_pytorch_when_asked(instead: str) -> None:
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ids = torch.randint(2, 64, (3, ROWS))
    outputs = []
    for attention in ("eager", instead):
        torch.manual_seed(7)
        model = transformers.T5Model(copy.deepcopy(t5)).eval()
        model.set_attn_implementation(attention)
        outputs.append(
            model(ids, attention_mask=padding("right"), decoder_input_ids=ids[:, :4]).last_hidden_state
        )
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    wide = {"head_dim": 1032, "num_attention_heads": 2, "num_key_value_heads": 1}
    with pytest.raises(tandem.UnsupportedError, match='heads of 1032 dimensions.*unsupported="sdpa"'):
        llama("tandem", **wide)(ids)
    mask = padding("left")
    assert mask is not None
    got, expected = (llama(name, **wide)(ids, attention_mask=mask).logits for name in (instead, "eager"))
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-4, atol=1e-4)
    with pytest.raises(tandem.UnsupportedError, match='float64.*unsupported="sdpa"'):
        llama("tandem").double()(ids)
    got, expected = (llama(name).double()(ids).logits for name in (instead, "eager"))
    torch.testing.assert_close(got, expected)


def test_what_pytorch_lacks_too_stays_an_error(instead: str) -> None:
    attention = transformers.AttentionInterface()[instead]
    on_gpu = [t.to("meta") for t in states()]  # taken for one
    call = functools.partial(attention, torch.nn.Module(), *on_gpu, None, is_causal=True)
    for options, message in (
        ({"dropout": 0.1, "softcap": 5.0}, "dropout in attention beside a softcap"),
        ({"dropout": 0.1, "s_aux": torch.zeros(2)}, "dropout in attention beside attention sinks"),
        ({"output_attentions": True}, "the attention's weights"),
        ({"indices": torch.zeros(1)}, "with indices="),
    ):
        with pytest.raises(tandem.UnsupportedError, match=f'{message}.*"eager"'):
            call(**options)


def test_packed_sequences_with_dropout_see_only_themselves(instead: str) -> None:
    """What PyTorch is given for cu_seq_lens and position_ids: dropout of almost nothing changes nothing."""
    ends, ids = torch.tensor([0, 5, 6, ROWS]), torch.randint(2, 64, (1, ROWS))
    positions = torch.cat([torch.arange(n) for n in ends.diff().tolist()])[None]
    packing = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    model = llama(instead, attention_dropout=1e-30)
    alone = torch.cat([model(ids[:, a:b]).logits for a, b in zip(ends[:-1], ends[1:], strict=True)], 1)
    for options in (packing, {"use_cache": False}):
        got = model.train()(ids, position_ids=positions, **options).logits
        torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)


def test_a_compiled_model_hands_dropout_to_pytorch_in_one_graph(
    instead: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(instead, attention_dropout=1e-30).train()
    ids, mask = torch.randint(2, 64, (3, ROWS)), padding("right")
    assert mask is not None
    with caplog.at_level(logging.WARNING, "tandem"):
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, attention_mask=mask).logits
    assert len(caplog.records) == 1
    torch.testing.assert_close(got[mask], model(ids, attention_mask=mask).logits[mask], rtol=1e-4, atol=1e-4)
