"""What a score function computes, number by number, beside PyTorch's eager mode: a row that sees one key has
that key's logit as its log-sum-exp."""

import math
import operator

import numpy as np
import pytest
import tandem
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def logits(function, *columns):
    """function(column[i], ...) for every i."""
    n = len(columns[0])
    q, key = torch.zeros(1, n, 1, 8), torch.zeros(1, 1, 1, 8)
    if isinstance(columns[0], np.ndarray):
        q, key = q.numpy(), key.numpy()

    def score_mod(s, b, h, i, j):
        return function(*(column[i] for column in columns)) + s * 0.0

    return torch.as_tensor(tandem.attention(q, key, key, score_mod=score_mod, return_lse=True)[1]).flatten()


def same(function, *columns, atol=3e-7, rtol=1e-6):
    """But for infinite logits, of which no row is made."""
    expected = function(*columns).float()
    got = logits(function, *columns)
    finite = ~expected.isposinf()
    torch.testing.assert_close(got[finite], expected[finite], rtol=rtol, atol=atol, equal_nan=True)


REALS = torch.tensor([-7.5, -2.5, -1.5, -0.75, -0.5, -0.0, 0.0, 1e-6, 0.5, 1.0, 1.5, 2.5, 3.0, 8.0, 60.25])
SPECIAL = torch.tensor([math.nan, -math.inf, 1.0, math.nan, 0.0])


@pytest.mark.parametrize(
    "function",
    [
        *(torch.sin, torch.cos, torch.erf, torch.erfc, torch.expm1, torch.floor, torch.ceil, torch.trunc),
        *(torch.round, torch.relu, torch.tan, torch.frac, torch.sign, torch.square, torch.reciprocal),
        *(F.softplus, F.gelu, F.silu, F.relu, F.elu, F.mish, F.leaky_relu, F.selu, F.celu, F.hardtanh),
        *(F.hardsigmoid, F.hardswish, F.relu6, F.logsigmoid, F.softsign, F.tanhshrink, F.tanh, F.sigmoid),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.softplus(x, beta=2.0, threshold=5.0),
        lambda x: torch.log2(x.abs() + 2.0**-10),
        lambda x: torch.log1p(x.abs()),
        lambda x: torch.log10(x.abs() + 1.0),
        lambda x: torch.rsqrt(x.abs() + 0.25),
        lambda x: torch.sinh(x / 8.0) + torch.cosh(x / 8.0),
        lambda x: x.clamp_min(-0.5) + x.clamp_max(2.0),
        lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 2.5),
        lambda x: torch.fmod(x, 2.0) + torch.fmod(x, -0.7),
        lambda x: x % 2.0 + x % -0.7,
        lambda x: x // 0.5 + x // -2.0 + (x // 3),
        lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
        lambda x: x.type_as(x) + x.half().float() * 0.0 + x.double() * 0.0 + x.bfloat16() * 0.0,
        lambda x: torch.add(x, x, alpha=3) + torch.sub(x, x, alpha=0.5) + torch.rsub(x, 1.0),
        lambda x: torch.hypot(x, x + 1.0) + torch.lerp(x, x + 1.0, 0.25),
        lambda x: torch.logaddexp(x, x * 0.5),
        lambda x: x.int() + x.long() * 2 + x.to(torch.int16),
        lambda x: x**2.0 + (x + 9.0) ** -2 + 2.0**x,
        lambda x: torch.maximum(x, x * x) + torch.fmin(x, x * x),
    ],
)
def test_functions_of_reals(function):
    same(function, REALS, atol=2e-6, rtol=5e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.isnan(x),
        lambda x: torch.isinf(x),
        lambda x: torch.isfinite(x),
        lambda x: torch.isneginf(x) + 2 * torch.isposinf(x),
        lambda x: x != x,
        lambda x: x == x,
        lambda x: ~(x == x),
        lambda x: x != 5.0,
        lambda x: x < 5.0,
        lambda x: x <= 5.0,
        lambda x: ~(x < 5.0),
        lambda x: x >= 5.0,
        lambda x: x.bool(),
        lambda x: torch.nan_to_num(x, nan=2.0, neginf=-3.0),
        lambda x: torch.where(x.isnan(), 1.0, torch.relu(x)),
        lambda x: torch.fmax(x, torch.zeros_like(x)),
        lambda x: torch.relu(x) != torch.relu(x),
    ],
)
@pytest.mark.parametrize("target", ["", "portable", "avx2"])
def test_comparisons_with_nan(function, target, monkeypatch):
    if target:
        monkeypatch.setenv("TANDEM_CPU_TARGET", target)
    same(lambda x: function(x).float() if isinstance(x, torch.Tensor) else function(x), SPECIAL)


INTEGERS = {
    "bool": torch.tensor([True, False, True, False, True, False]),
    "uint8": torch.tensor([0, 1, 255, 200, 7, 3], dtype=torch.uint8),
    "int8": torch.tensor([-128, 127, 3, -3, 7, 1], dtype=torch.int8),
    "int16": torch.tensor([-32768, 32767, 300, -5, 7, 2], dtype=torch.int16),
    "int32": torch.tensor([-70000, 90000, 300, -5, 7, 2], dtype=torch.int32),
    "int64": torch.tensor([-(2**40), 2**40 + 1, 300, -5, 7, 2]),
    "float32": torch.tensor([-1.5, 2.0, 3.25, -5.0, 7.0, 2.0]),
}
OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge),
    *(operator.and_, operator.or_, operator.xor, torch.maximum, torch.minimum),
]


def read(name, x):
    """A column as the kernels read it, made one of its dtype."""
    return x if name in ("bool", "int8", "int32", "int64", "float32") else x.to(torch.int32)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("first", INTEGERS)
def test_types_of_two_are_promoted(first, op):
    for second in INTEGERS:
        a, b = INTEGERS[first], INTEGERS[second].flip(0)
        columns = (read(first, a), read(second, b))

        def function(x, y, first=first, second=second):
            return op(x.to(getattr(torch, first)), y.to(getattr(torch, second)))

        if op in (operator.floordiv, operator.mod):
            columns = (columns[0], torch.where(b == 0, 3, columns[1]) if second != "bool" else columns[1])
        try:
            function(*columns)
        except (RuntimeError, TypeError):
            continue  # PyTorch has none
        same(function, *columns)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("number", [3, -2, True, 2.5])
def test_numbers_change_a_type_by_category(op, number):
    if op in (torch.maximum, torch.minimum):
        return
    for name, x in INTEGERS.items():
        column = read(name, x if name == "bool" else torch.where(x == 0, 1, x))
        for function in (
            lambda a, name=name: op(a.to(getattr(torch, name)), number),
            lambda a, name=name: op(number, a.to(getattr(torch, name))),
        ):
            try:
                function(column)
            except (RuntimeError, TypeError, ZeroDivisionError):
                continue
            same(function, column)


@pytest.mark.parametrize("name", INTEGERS)
def test_conversions_and_unary_operations(name):
    x = INTEGERS[name]
    column = read(name, x)
    kind = getattr(torch, name)
    for to in INTEGERS:
        if name == "float32" and to == "uint8":
            continue  # of negative reals it is not defined
        same(lambda a, to=to: a.to(kind).to(getattr(torch, to)), column)
    for op in (operator.neg, operator.invert, abs, torch.sign, torch.square, torch.floor, torch.relu):
        try:
            op(x)
        except (RuntimeError, TypeError):
            continue
        if name != "bool":
            same(lambda a, op=op: op(a.to(kind)), column)
    same(lambda a: torch.where(a.to(kind) == 7, a.to(kind), 1), column)


def test_difference_of_booleans_is_an_error():
    q = torch.zeros(1, 4, 1, 8)
    for function in (lambda a, b: a - b, lambda a, b: -a, lambda a, b: True - a):
        with pytest.raises(tandem.InvalidArgumentError, match="of booleans"):
            tandem.attention(q, q, q, score_mod=lambda s, b, h, i, j, f=function: s + f(i < j, i > j))


@pytest.mark.parametrize("left", [True, False])
def test_shifts(left):
    x = torch.tensor([1, -5, 1000, 123456, -1], dtype=torch.int32)
    op = operator.lshift if left else operator.rshift
    for places in (0, 3, 12):
        same(lambda a, n=places: op(a, n), x)
    same(op, x, torch.tensor([3, 1, 7, 0, 30], dtype=torch.int32))
    same(op, x.long() << 20, torch.tensor([3, 1, 7, 0, 30]))


def test_powers_of_integers():
    same(lambda e: 2**e, torch.tensor([0, 1, 5, 23, 30], dtype=torch.int32))
    same(lambda e: 3**e, torch.tensor([0, 1, 5, 13], dtype=torch.int32))
    same(lambda e: (2**e) // 3 % 1000, torch.tensor([0, 1, 40, 62]))
    same(lambda x: x**3, torch.tensor([-5, 7, 100], dtype=torch.int32))
    same(lambda x: x**2.0, torch.tensor([-5, 70000], dtype=torch.int32))


HASHES = torch.tensor([2**62 + 12345, -(2**61) - 7, 2**33 + 1, 2**33, 7 + 2**32, 7, -1, -(2**63), 2**63 - 1])


@pytest.mark.parametrize(
    "function",
    [
        *(operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge),
        lambda a, b: (a - b) % 1000003,
        lambda a, b: (a + b) % 1000003,
        lambda a, b: (a * 31 + b * 17) % 4096,
        lambda a, b: (a // 1000003) % 65537,
        lambda a, b: (a // -7) % 65537,
        lambda a, b: (a % 97) + (b % -97),
        lambda a, b: ((a ^ b) & 65535) + ((a | b) & 255) + ((~a) & 1023),
        lambda a, b: (a >> 33) & 1023,
        lambda a, b: ((a << 3) >> 40) & 1023,
        lambda a, b: torch.maximum(a, b) % 100 + torch.minimum(a, b) % 100,
        lambda a, b: abs(a) % 1000,
        lambda a, b: -a % 1000,
        lambda a, b: torch.where(a < b, a, b) % 1000,
        lambda a, b: a.float() / 2.0**40,
        lambda a, b: a.int() % 1000,
        lambda a, b: a.bool(),
        lambda a, b: a == 2**62 + 12345,
        lambda a, b: (a > 2**33) & (b < -(2**40)),
        lambda a, b: (a - (2**62 + 12000)) == 345,
        lambda a, b: torch.sign(a),
    ],
)
@pytest.mark.parametrize("target", ["", "portable"])
def test_wide_integers_keep_their_range(function, target, monkeypatch):
    if target:
        monkeypatch.setenv("TANDEM_CPU_TARGET", target)
    a = HASHES.repeat(len(HASHES))
    same(function, a, HASHES.repeat_interleave(len(HASHES)))


def test_wide_integers_as_indices():
    table = torch.arange(10.0)
    places = torch.tensor([3, -1, 0, 9, -10])
    torch.testing.assert_close(logits(lambda i: table[i], places), table[places])
    far = torch.tensor([2**40, -(2**40), 2**32 + 1])
    torch.testing.assert_close(logits(lambda i: table[i], far), torch.tensor([9.0, 0.0, 9.0]))


@pytest.mark.parametrize(
    "ids", [[2**33 + 1, 2**34 + 2, 2**35], [7 + 2**32, 7 + 2**33, 7], [0, 1, 2], [-5, 2**40, -5]]
)
@pytest.mark.parametrize("by_key", [True, False])
def test_documents_by_hashes(ids, by_key):
    """Masks, of whose blocks ranges tell what is visible, too."""
    ids = torch.tensor(ids).repeat_interleave(100)
    q, k, v = (torch.randn(1, 300, 1, 16) for _ in range(3))

    def mask(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j) if by_key else ids[i] <= ids[j] + 1

    i, j = torch.arange(300)[:, None], torch.arange(300)
    seen = mask(0, 0, i, j)
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen)
    want = want.nan_to_num().transpose(1, 2)
    torch.testing.assert_close(tandem.attention(q, k, v, mask_mod=mask), want, rtol=1e-5, atol=1e-5)


def test_constants_of_a_type():
    def function(x):
        return x.new_full((), 3.0) + x.new_ones(()) + x.new_zeros((), dtype=torch.int64)

    torch.testing.assert_close(logits(function, REALS), 0.0 * REALS + 4.0)
    places = torch.arange(5, dtype=torch.int32)
    torch.testing.assert_close(logits(lambda x: x.new_full((), 7.9) / 2, places), torch.full((5,), 3.5))


def test_functions_of_numpy():
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    for function in (
        lambda a: np.exp(a) + np.sqrt(np.abs(a)) - np.tanh(a),
        lambda a: np.where(a > 1, a, np.maximum(a, -0.5)),
        lambda a: np.clip(a, -1, 1) + np.float32(2.0) * a + np.floor(a) + np.rint(a),
        lambda a: np.power(a, 2) + np.sin(a) * np.log1p(np.abs(a)),
        lambda a: np.isnan(a) + np.logical_and(a > 0, a < 2) * 1.0,
    ):
        expected = torch.as_tensor(np.asarray(function(x), dtype=np.float32))
        torch.testing.assert_close(logits(function, x), expected, rtol=1e-6, atol=1e-6)
    q = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(tandem.UnsupportedError, match=r"np\.arctan is called on a score or a position"):
        tandem.attention(q, q, q, score_mod=lambda s, b, h, i, j: np.arctan(s))


def test_unknown_arguments_are_named():
    q = torch.zeros(1, 4, 1, 8)
    for function, message in (
        (lambda s: torch.clamp(s, least=0), "least"),
        (lambda s: F.relu(s, inplace=True), "inplace"),
        (lambda s: torch.atan(s), r"torch\.atan is called on a score"),
        (lambda s: torch.round(s, decimals=2), "decimals"),
    ):
        with pytest.raises((tandem.UnsupportedError, TypeError), match=message):
            tandem.attention(q, q, q, score_mod=lambda s, b, h, i, j, f=function: f(s))
