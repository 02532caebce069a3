"""Traces that are kept from call to call: a function is traced again wherever what it would write down may
have changed, and only there."""

import functools
import math
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tandem
import torch
from tandem.functions import _functions, _kept_traces

_random = torch.Generator().manual_seed(11)
Q, K, V = (torch.randn(1, 24, 2, 16, generator=_random) for _ in range(3))

WINDOW = 5
NUMBERS = [3, 4]
HIDDEN = [5]
ARRAY = np.array([5, 0])
#: Ways that read a NumPy array.
OF_ARRAYS = ("element", "keyword", "sum", "nested lambda", "generator", "comprehension", "truth")
OF_ARRAYS += ("class body", "comparison of an array", "array in a helper")
TABLE = torch.arange(24) // 7


def within(q, k):
    return (q - k).abs() <= WINDOW


def document(b, h, q, k):
    return TABLE[q] == TABLE[k]


@pytest.fixture
def traced(monkeypatch):
    """How often functions have been traced."""
    _kept_traces._kept.clear()
    count = [0]

    def counted(*args, of=_functions._traced):
        count[0] += 1
        return of(*args)

    monkeypatch.setattr(_functions, "_traced", counted)
    return count


def call(numpy=False, **functions):
    q, k, v = (x.numpy() if numpy else x for x in (Q, K, V))
    return torch.as_tensor(np.asarray(tandem.attention(q, k, v, **functions)))


def expected(seen):
    """Of a boolean (24, 24)."""
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (Q, K, V)), attn_mask=seen
    ).transpose(1, 2)


def window(width):
    i = torch.arange(24)
    return (i[:, None] - i[None]).abs() <= width


def same(a, b):
    torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def closed_over(width):
    return lambda b, h, q, k: (q - k).abs() <= width


def by_default(b, h, q, k, width=5):
    return (q - k).abs() <= width


def by_keyword(b, h, q, k, *, width=5):
    return (q - k).abs() <= width


def joined(*masks):  # as PyTorch's and_masks makes them
    return lambda *places: masks[0](*places) & masks[1](*places)


@pytest.mark.parametrize(
    "mask",
    [
        closed_over(5),
        by_default,
        by_keyword,
        lambda b, h, q, k: within(q, k),
        lambda b, h, q, k: torch.where(q > k, q - k, k - q) <= math.sqrt(25.0),
        lambda b, h, q, k: (q - k).abs() <= TABLE.shape[0] - 19,
        lambda b, h, q, k: (q - k).abs() <= max(NUMBERS) + 1,
    ],
)
def test_one_trace_serves_many_calls(traced, mask):
    for _ in range(3):
        same(call(mask_mod=mask), expected(window(5)))
    assert traced[0] == 1


@pytest.mark.parametrize("made", [closed_over, lambda width: joined(closed_over(width), by_default)])
def test_functions_made_anew_share_a_trace(traced, made):
    for _ in range(3):
        call(mask_mod=made(4))
    assert traced[0] == 1
    same(call(mask_mod=made(2)), expected(window(2)))
    assert traced[0] == 2


@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
def test_other_arrays_of_the_shape_are_read_in_their_place(traced, numpy):
    for size in (7, 5, 3):
        table = np.arange(24) // size
        table = table if numpy else torch.from_numpy(table)
        out = call(numpy, mask_mod=lambda b, h, q, k, table=table: table[q] == table[k])
        row = torch.as_tensor(table)
        same(out, expected(row[:, None] == row[None]))
    assert traced[0] == 1


def test_values_that_change_in_place_are_read(traced, monkeypatch):
    monkeypatch.setitem(globals(), "TABLE", TABLE.clone())
    for size in (7, 5):
        TABLE.copy_(torch.arange(24) // size)
        same(call(mask_mod=document), expected(TABLE[:, None] == TABLE[None]))
    assert traced[0] == 1


def test_which_arrays_are_one_is_told(traced):
    def pair(first, second):
        return call(mask_mod=lambda b, h, q, k: first[q] == second[k])

    other = torch.arange(24) // 5
    for first, second in ((TABLE, TABLE), (TABLE, other), (other, other)):
        same(pair(first, second), expected(first[:, None] == second[None]))


def test_gradients_reach_the_arrays_of_each_call():
    for scale in (1.0, 2.0):
        bias = (torch.arange(24.0) * scale).requires_grad_()
        tandem.attention(Q, K, V, score_mod=lambda s, b, h, q, k, bias=bias: s + bias[k]).sum().backward()
        assert bias.grad is not None


def changed(numbers):
    """(a mask function, what changes its window from 5 to 2)."""
    cell = torch.tensor(5)
    array = np.array([5, 0])
    settings = types.SimpleNamespace(window=5)

    def of_state(b, h, q, k):
        return (q - k).abs() <= numbers[0]

    def partial(width, b, h, q, k):
        return (q - k).abs() <= width.window

    def attribute(b, h, q, k):
        return (q - k).abs() <= attribute.window

    def in_class(b, h, q, k):
        class Inner:
            width = int(array[0])

        return (q - k).abs() <= Inner.width

    @decorated
    def wrapped(b, h, q, k):
        return (q - k).abs() <= settings.window

    def of_array(width):
        return int(width[0])

    attribute.window = 5
    object_ = Widths()
    of_class = type("OfClass", (Widths,), {})
    of_module = types.ModuleType("settings")
    of_module.window = 5
    set_array, set_window = (lambda: array.__setitem__(0, 2)), (lambda: setattr(settings, "window", 2))
    return {
        "nested lambda": (lambda b, h, q, k: (q - k).abs() <= (lambda: int(array[0]))(), set_array),
        "generator": (lambda b, h, q, k: (q - k).abs() <= sum(int(array[i]) for i in (0, 1)), set_array),
        "comprehension": (lambda b, h, q, k: (q - k).abs() <= [int(x) for x in array][0], set_array),
        "comparison of an array": (
            lambda b, h, q, k: (q - k).abs() <= (5 if (array[:1] == 5).all() else 2),
            set_array,
        ),
        "truth": (lambda b, h, q, k: (q - k).abs() <= (5 if array[:1] - 2 else 2), set_array),
        "class body": (in_class, set_array),
        "array in a helper": (lambda b, h, q, k: (q - k).abs() <= of_array(array), set_array),
        "decorated": (wrapped, set_window),
        "bound method": (object_.method, lambda: setattr(object_, "width", 2)),
        "callable": (of_class(), lambda: setattr(of_class, "width", 2)),
        "class": (lambda b, h, q, k: (q - k).abs() <= of_class.width, lambda: setattr(of_class, "width", 2)),
        "module": (
            lambda b, h, q, k: (q - k).abs() <= of_module.window,
            lambda: setattr(of_module, "window", 2),
        ),
        "another's globals": (
            lambda b, h, q, k: (q - k).abs() <= changed.__globals__["HIDDEN"][0],
            lambda: HIDDEN.__setitem__(0, 2),
        ),
        "list": (of_state, lambda: numbers.__setitem__(0, 2)),
        "item": (lambda b, h, q, k: (q - k).abs() <= cell.item(), lambda: cell.fill_(2)),
        "comparison": (lambda b, h, q, k: (q - k).abs() <= (5 if cell > 3 else 2), lambda: cell.fill_(2)),
        "element": (lambda b, h, q, k: (q - k).abs() <= array[0].item(), lambda: array.fill(2)),
        "keyword": (
            lambda b, h, q, k, *, width=array: (q - k).abs() <= width[0].item(),
            lambda: array.fill(2),
        ),
        "sum": (lambda b, h, q, k: (q - k).abs() <= int(array.sum()), lambda: array.__setitem__(0, 2)),
        "object": (
            lambda b, h, q, k: (q - k).abs() <= settings.window,
            lambda: setattr(settings, "window", 2),
        ),
        "partial": (functools.partial(partial, settings), lambda: setattr(settings, "window", 2)),
        "attribute": (attribute, lambda: setattr(attribute, "window", 2)),
        "dict": (
            lambda b, h, q, k, d=settings.__dict__: (q - k).abs() <= d["window"],
            lambda: setattr(settings, "window", 2),
        ),
    }


class Widths:
    """Ways to a number that no key tells."""

    width = 5

    def method(self, b, h, q, k):
        return (q - k).abs() <= self.width

    __call__ = method


def decorated(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)

    return wrapper


@pytest.mark.parametrize("kind", changed([5]))
def test_what_a_function_reads_by_other_ways_is_read_in_each_call(kind):
    mask, change = changed([5])[kind]
    numpy = kind in OF_ARRAYS
    HIDDEN[0] = 5
    for _ in range(2):
        same(call(numpy, mask_mod=mask), expected(window(5)))
    change()
    same(call(numpy, mask_mod=mask), expected(window(2)))


def of_global_array(q, k):
    return (q - k).abs() <= int(ARRAY[0])


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (q - k).abs() <= (lambda: int(ARRAY[0]))(),
        lambda b, h, q, k: (q - k).abs() <= max(int(ARRAY[i]) for i in range(2)),
        lambda b, h, q, k: (q - k).abs() <= sum([int(ARRAY[i]) for i in range(2)]),
        lambda b, h, q, k: of_global_array(q, k),
    ],
)
@pytest.mark.parametrize("rebind", [False, True])
def test_global_arrays_that_nested_code_reads(monkeypatch, mask, rebind):
    monkeypatch.setitem(globals(), "ARRAY", np.array([5, 0]))
    same(call(True, mask_mod=mask), expected(window(5)))
    if rebind:
        monkeypatch.setitem(globals(), "ARRAY", np.array([2, 0]))
    else:
        ARRAY[0] = 2
    same(call(True, mask_mod=mask), expected(window(2)))


def test_nested_code_and_helpers_index_arrays(traced, monkeypatch):
    monkeypatch.setitem(globals(), "ARRAY", np.arange(24) // 7)
    row = torch.from_numpy(ARRAY)
    for mask in (
        lambda b, h, q, k: (lambda i, j: ARRAY[i] == ARRAY[j])(q, k),
        lambda b, h, q, k: [ARRAY[i] for i in (q,)][0] == next(ARRAY[i] for i in (k,)),
        lambda b, h, q, k: of_documents(q) == of_documents(k),
        functools.partial(lambda table, b, h, q, k: table[q] == table[k], ARRAY),
    ):
        same(call(True, mask_mod=mask), expected(row[:, None] == row[None]))


def of_documents(i):
    return ARRAY[i]


def test_functions_of_math_may_be_replaced(monkeypatch):
    def mask(b, h, q, k):
        return (q - k).abs() <= math.sqrt(25.0)

    same(call(mask_mod=mask), expected(window(5)))
    monkeypatch.setattr(math, "sqrt", lambda x: 2)
    same(call(mask_mod=mask), expected(window(2)))


def test_threads_keep_traces_together():
    functions = [closed_over(width % 300) for width in range(1200)]
    library = _functions._arrays.library_of("q", Q)

    def trace(f):
        return _functions.trace_functions((1, 2, 24, 24), library, mask_mod=f).mask

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(trace, functions))
    finally:
        sys.setswitchinterval(before)
    assert texts == [trace(f) for f in functions]
    assert len(_kept_traces._kept) <= _kept_traces._MOST


def test_globals_and_defaults_and_helpers_may_change(monkeypatch):
    def mask(b, h, q, k):
        return within(q, k)

    same(call(mask_mod=mask), expected(window(5)))
    monkeypatch.setitem(globals(), "WINDOW", 2)
    same(call(mask_mod=mask), expected(window(2)))
    monkeypatch.setitem(globals(), "within", lambda q, k: (q - k).abs() <= 1)
    same(call(mask_mod=mask), expected(window(1)))
    same(call(mask_mod=by_default), expected(window(5)))
    monkeypatch.setattr(by_default, "__defaults__", (2,))
    same(call(mask_mod=by_default), expected(window(2)))


def test_settings_of_pytorch_are_read_in_each_call():
    def mask(b, h, q, k):
        return (q - k).abs() <= (5 if torch.is_grad_enabled() else 2)

    same(call(mask_mod=mask), expected(window(5)))
    with torch.no_grad():
        same(call(mask_mod=mask), expected(window(2)))


def test_a_function_that_changes_something_runs_in_each_call():
    count = 0

    def mask(b, h, q, k):
        nonlocal count
        count += 1
        return k <= q

    for _ in range(3):
        call(mask_mod=mask)
    assert count == 3


def test_errors_are_raised_in_each_call():
    def mask(b, h, q, k):
        return q if q > k else k

    for _ in range(2):
        with pytest.raises(tandem.UnsupportedError, match="a condition depends on"):
            call(mask_mod=mask)


def test_few_traces_are_kept(traced):
    for width in range(2 * _kept_traces._MOST):
        _functions.trace_functions(
            (1, 2, 24, 24), _functions._arrays.library_of("q", Q), mask_mod=closed_over(width)
        )
    assert len(_kept_traces._kept) == _kept_traces._MOST


def test_a_function_is_parsed_once_for_the_same_memory():
    slopes, q = torch.tensor([0.5, -0.5], requires_grad=True), Q.clone().requires_grad_()
    _functions._parsed.cache_clear()

    def step():
        out = tandem.attention(q, K, V, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j))
        return out, torch.autograd.grad(out.sum(), (q, slopes))

    first, again = step(), step()
    assert _functions._parsed.cache_info().misses == 1
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    slopes.data = slopes.data.clone() * 2  # other memory
    assert not torch.equal(step()[0], first[0])
    assert _functions._parsed.cache_info().misses == 2
