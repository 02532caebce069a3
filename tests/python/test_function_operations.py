"""What operators and functions of PyTorch make of scores and positions, beside flex_attention."""

import pytest
import tandem
import torch
from torch.nn.attention.flex_attention import flex_attention


def test_exp2_and_masked_fill():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))

    def score(s, b, h, i, j):
        return (s - torch.exp2(-(h + 1.0)) * (i - j)).masked_fill(i < j, -float("inf"))

    want = flex_attention(q, k, v, score_mod=score)
    got = tandem.attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, i, j: s - 2 ** (-8 / 2 * (h + 1)) * (i - j),  # ALiBi's slopes
        lambda s, b, h, i, j: s * 0.5**h + 3.0 ** (j / 20),
        lambda s, b, h, i, j: s + (i - j + 40.5) ** -2 + s**2.0,
        lambda s, b, h, i, j: s + ((i >> 2) - (j << 1)) * 0.05,
        lambda s, b, h, i, j: s + torch.sign(i - j) + torch.sign(s) * 0.5,
    ],
    ids=["slopes", "bases", "exponents", "shifts", "signs"],
)
def test_powers_shifts_and_signs(score_mod):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    want = flex_attention(q, k, v, score_mod=score_mod)
    got = tandem.attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exponent", [lambda s: s, lambda s: float("inf"), lambda s: 0, lambda s: 1.5])
def test_other_exponents_are_an_error(exponent):
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(tandem.UnsupportedError, match="a power has the exponent"):
        tandem.attention(q, q, q, score_mod=lambda s, b, h, i, j: s ** exponent(s))
