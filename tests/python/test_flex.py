"""tandem.flex_attention beside PyTorch's: shapes, lists of blocks, operations of functions."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import torch
from tandem import _flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


def test_a_key_of_batch_one_is_that_of_all() -> None:
    leaves = [torch.randn(b, 2, 20, 8, requires_grad=True) for b in (3, 1, 1)]
    query, key, value = leaves
    dout = torch.randn(3, 2, 20, 8)
    results = []
    for k, v in ((key, value), (key.expand(3, -1, -1, -1), value.expand(3, -1, -1, -1))):
        out = tandem.flex_attention(query, k, v)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    arrays = (t.detach().numpy() for t in leaves)
    torch.testing.assert_close(torch.from_numpy(tandem.flex_attention(*arrays)), results[0][0])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ((3, 4, 5, 8), (3, 4, 5, 8), "key has batch 3 and query 2"),
        ((2, 4, 5, 8), (3, 4, 5, 8), "value has batch 3 and query 2"),
        ((2, 4, 5, 8), (2, 4, 7, 8), r"key has 5 rows \(shape \(2, 4, 5, 8\)\) and value 7"),
        ((2, 4, 5, 8), (2, 2, 5, 8), "key has 4 heads .* and value 2"),
        ((2, 4, 5, 16), (2, 4, 5, 8), r"query has head_dim 8 \(shape \(2, 4, 6, 8\)\) and key 16"),
        ((2, 3, 5, 8), (2, 3, 5, 8), r"query has 4 heads, no multiple of key's 3; pass \(batch, heads"),
    ],
)
def test_errors_of_shapes_are_in_the_callers_order(
    key: tuple[int, ...], value: tuple[int, ...], words: str
) -> None:
    with pytest.raises(tandem.InvalidArgumentError, match=words):
        tandem.flex_attention(torch.zeros(2, 4, 6, 8), torch.zeros(key), torch.zeros(value), enable_gqa=True)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


DOCUMENT = torch.arange(300) // 90
PREFIX = torch.tensor([13, 241])
MASKS = {
    "causal": causal,
    "document": lambda b, h, q_idx, kv_idx: DOCUMENT[q_idx] == DOCUMENT[kv_idx],
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < PREFIX[b]) | (q_idx >= kv_idx),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("together", [1 << 26, 1])
def test_blocks_that_say_no_more_than_their_function_are_left_out(
    mask: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function alone can be a window or documents; with blocks beside it, it is neither."""
    given = []
    attention = _flex._api.attention

    def noted(*arrays: Any, mask_mod: Any, **options: Any) -> Any:
        given.append(mask_mod)
        return attention(*arrays, mask_mod=mask_mod, **options)

    monkeypatch.setattr(_flex._api, "attention", noted)
    monkeypatch.setattr(_flex, "_TOGETHER", together)
    qkv = [torch.randn(2, 2, 300, 8) for _ in range(3)]
    block_mask = create_block_mask(MASKS[mask], 2, None, 300, 300, device="cpu")
    for _ in range(2):
        tandem.flex_attention(*qkv, block_mask=block_mask)
    assert given == [MASKS[mask]] * 2
    full = block_mask.full_kv_num_blocks
    (full if full is not None and full.any() else block_mask.kv_num_blocks).zero_()
    out = tandem.flex_attention(*qkv, block_mask=block_mask)
    assert given[2] is not MASKS[mask]
    assert not torch.equal(out, tandem.flex_attention(*qkv, block_mask=MASKS[mask]))


def test_blocks_for_all_entries_count_where_the_function_knows_them_apart() -> None:
    """The lists were made of the first entry alone: of the second one they leave out pairs, as compiled."""
    block_mask = create_block_mask(MASKS["prefix"], None, None, 300, 300, device="cpu")
    qkv = [torch.randn(2, 2, 300, 8) for _ in range(3)]
    out = tandem.flex_attention(*qkv, block_mask=block_mask)
    both = tandem.flex_attention(*qkv, block_mask=MASKS["prefix"])
    assert torch.equal(out[0], both[0])
    assert not torch.equal(out[1], both[1])


@pytest.mark.parametrize("changed", ["tensor", "number"])
def test_blocks_count_once_their_function_shows_others(changed: str) -> None:
    """The lists of blocks stay as they were made, as compiled, when what the function reads changes."""
    document, width = (torch.arange(256) // 128, 256) if changed == "tensor" else (torch.zeros(256), 128)

    def of_one_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (i // width == j // width)

    block_mask = create_block_mask(of_one_document, None, None, 256, 256, device="cpu")
    qkv = [torch.randn(1, 2, 256, 8) for _ in range(3)]
    expected = tandem.flex_attention(*qkv, block_mask=block_mask)
    if changed == "tensor":
        document.zero_()
    else:
        width = 256
    assert torch.equal(tandem.flex_attention(*qkv, block_mask=block_mask), expected)


def test_masks_of_inference_mode() -> None:
    """Whose lists have no versions."""
    qkv = [torch.randn(2, 2, 300, 8) for _ in range(3)]
    expected = tandem.flex_attention(*qkv, block_mask=causal)
    with torch.inference_mode():
        block_mask = create_block_mask(causal, None, None, 300, 300, device="cpu")
        torch.testing.assert_close(tandem.flex_attention(*qkv, block_mask=block_mask), expected)
    torch.testing.assert_close(tandem.flex_attention(*qkv, block_mask=block_mask), expected)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, i, j: (s - torch.exp2(-(h + 1.0)) * (i - j)).masked_fill(i < j, -float("inf")),
        lambda s, b, h, i, j: s - 2 ** (-8 / 2 * (h + 1)) * (i - j),  # ALiBi's slopes
        lambda s, b, h, i, j: s * 0.5**h + 3.0 ** (j / 20),
        lambda s, b, h, i, j: s + (i - j + 40.5) ** -2 + s**2.0,
        lambda s, b, h, i, j: s + ((i >> 2) - (j << 1)) * 0.05,
        lambda s, b, h, i, j: s + torch.sign(i - j) + torch.sign(s) * 0.5,
    ],
    ids=["exp2 and masked_fill", "slopes", "bases", "exponents", "shifts", "signs"],
)
def test_operations_are_pytorchs(score_mod: Any) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    want = flex_attention(q, k, v, score_mod=score_mod)
    got = tandem.attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exponent", [lambda s: s, lambda s: float("inf"), lambda s: 0, lambda s: 1.5])
def test_other_exponents_are_an_error(exponent: Any) -> None:
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(tandem.UnsupportedError, match="a power has the exponent"):
        tandem.attention(q, q, q, score_mod=lambda s, b, h, i, j: s ** exponent(s))
