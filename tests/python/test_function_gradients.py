"""Gradients of the tensors that functions of scores read, against the plain formula in float64."""

import oracle
import pytest
import tandem
import torch
import torch.nn.functional as F
from test_functions import BIAS, BUCKETS, SK, SLOPES, SQ, TABLE, B, H, inputs, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

GRADIENTS = {
    "ALiBi": ("alibi", SLOPES),
    "bias": ("bias", BIAS),
    "broadcast bias": ("bias", randn(1, H, 1, SK)),
    "16-bit bias": ("bias", randn(SQ, SK).to(torch.bfloat16)),
    "table": (lambda t: lambda s, b, h, q, k: s + t[h, q - k + SK - 1], TABLE),
    "buckets": (lambda t: lambda s, b, h, q, k: s + t[torch.clamp((q - k).abs(), max=15), h], BUCKETS),
    "gate": (lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h] * s), SLOPES),
    "a view": (lambda t: lambda s, b, h, q, k: s + t.permute(1, 0)[h, k % 16], BUCKETS),
    "one number": (lambda t: lambda s, b, h, q, k: s * t.exp(), torch.tensor([0.3])),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_tensors_that_functions_read(name):
    make, value = GRADIENTS[name]
    tensors = [t.requires_grad_() for t in inputs()]
    captured = value.clone().requires_grad_()

    def call(q, k, v, t, attend):
        if make == "alibi":
            return attend(q, k, v, lambda s, b, h, i, j: s - t[h] * (i + SK - SQ - j).abs())
        if make == "bias":
            dense = t.expand(B, H, SQ, SK)
            return attend(q, k, v, lambda s, b, h, i, j: s + dense[b, h, i, j])
        return attend(q, k, v, make(t))

    def formula(q, k, v, score):
        return oracle.attention(q, k, v, score_mod=score)[0]

    if make in ("alibi", "bias"):
        option = {"alibi_slopes" if make == "alibi" else "bias": captured}
        out = tandem.attention(*tensors, **option)
    else:
        out = tandem.attention(*tensors, score_mod=make(captured))
    out.square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (*tensors, captured)]
    call(*exact, formula).square().sum().backward()
    assert captured.grad.dtype == captured.dtype
    for t, e in zip((*tensors, captured), exact, strict=True):
        bound = 1e-5 if t.dtype == torch.float32 else 4e-3
        scale = max(1.0, e.grad.abs().max().item())
        torch.testing.assert_close(t.grad.double() / scale, e.grad / scale, rtol=0, atol=bound)


def test_a_captured_tensor_alone_may_require_a_gradient():
    q, k, v = inputs()
    bias = BIAS.clone().requires_grad_()
    weight = torch.ones((), requires_grad=True)
    out = tandem.attention(q, k, v, bias=bias * weight)
    out.sum().backward()
    torch.testing.assert_close(weight.grad, (bias.grad * bias).sum().detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(tandem.InvalidArgumentError, match="out= cannot be combined"):
        tandem.attention(q, k, v, bias=bias, out=torch.empty_like(q))


def test_training_a_position_bias():
    """A table that is learnt: the loss comes down to that of the table that made the targets."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    wanted, table = torch.randn(2, 63), torch.zeros(2, 63, requires_grad=True)

    def attend(t):
        return tandem.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[h, i - j + 31])

    target = attend(wanted)
    optimizer = torch.optim.Adam([table], lr=0.1)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (attend(table) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


CALLS = {
    "bias": lambda bias: {"bias": bias},
    "score": lambda bias: {"score_mod": lambda s, b, h, i, j: s * bias[b, h, i, j]},
    "mask": lambda bias: {"mask": bias > 0},
    "dropout": lambda bias: {"dropout_p": 0.2, "dropout_seed": 1},
}


@pytest.mark.parametrize("name", CALLS)
def test_many_gradients_in_one_pass(name):
    tensors = [t.requires_grad_() for t in inputs()]
    bias = BIAS.clone().requires_grad_(name in ("bias", "score"))
    wanted = [*tensors, bias] if bias.requires_grad else tensors
    out, lse = tandem.attention(*tensors, return_lse=True, **CALLS[name](bias))
    dout, dlse = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    for results, seeds in (((out, lse), (dout, dlse)), ((out,), (dout,)), ((lse,), (dlse,))):
        options = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(results, wanted, seeds, is_grads_batched=True, **options)
        for i in range(3):
            one = torch.autograd.grad(results, wanted, [t[i] for t in seeds], **options)
            for a, b in zip(found, one, strict=True):
                torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_an_error(name):
    q, k, v = (t.requires_grad_() for t in inputs())
    out = tandem.attention(q, k, v, **CALLS[name](BIAS))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(tandem.UnsupportedError, match="no second derivative"):
        torch.autograd.grad(dq.square().sum(), (q, k), allow_unused=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bias", {"bias": BIAS}),
        ("mask", {"mask": BIAS > 0}),
        ("score_mod", {"score_mod": lambda s, b, h, i, j: s * 2}),
        ("dropout_p", {"dropout_p": 0.1}),
    ],
)
def test_transforms_are_an_error_that_names_the_argument(name, options):
    q, k, v = inputs()
    with pytest.raises(
        tandem.UnsupportedError, match=f"^{name} is given, and q is under a transform of torch.func"
    ):
        torch.func.grad(lambda q: tandem.attention(q, k, v, **options).sum())(q)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v)]
        with pytest.raises(tandem.UnsupportedError, match=f"^{name} is given, and q is a FakeTensor on cpu"):
            tandem.attention(*fake, **options)


@pytest.mark.parametrize(
    "function",
    [
        *(torch.sin, torch.cos, torch.erf, torch.expm1, torch.floor, torch.round, torch.relu, torch.tan),
        *(F.softplus, F.gelu, F.silu, F.elu, F.mish, F.logsigmoid, F.hardswish),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: torch.log2(x * x + 0.5) + torch.log1p(x * x) + torch.rsqrt(x * x + 0.5),
        lambda x: torch.fmod(x, 0.7) + x % 0.7 + torch.fmod(x * 0 + 2.0, x * x + 0.3),
        lambda x: x * x.detach() + torch.tanh(x).detach(),
        lambda x: x * x.data,
        lambda x: x + (x.detach() * 2.0 - x) ** 2,
    ],
)
def test_derivatives_of_functions(function):
    """Of captured numbers, by the log-sum-exp of rows that see one key."""
    x = torch.tensor([-3.1, -1.2, -0.6, -0.2, 0.0, 0.1, 0.45, 1.3, 2.6, 30.0], requires_grad=True)
    q, k = torch.zeros(1, 10, 1, 8), torch.zeros(1, 1, 1, 8)
    lse = tandem.attention(q, k, k, score_mod=lambda s, b, h, i, j: s + function(x[i]), return_lse=True)[1]
    lse.sum().backward()
    expected = torch.autograd.grad(function(x).sum(), x, allow_unused=True)[0]
    expected = torch.zeros_like(x) if expected is None else expected
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=2e-6)


def test_nothing_has_a_gradient_inside_of_no_grad():
    q, k, v = (torch.randn(1, 20, 1, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(20, requires_grad=True)

    def gated(s, b, h, i, j):
        with torch.no_grad():
            gate = torch.sigmoid(s + table[j])
        return s * gate

    def stopped(s, b, h, i, j):
        return s * torch.sigmoid(s + table[j]).detach()

    dout = torch.randn(1, 20, 1, 16)
    results = []
    for score_mod in (gated, stopped):
        out = tandem.attention(q, k, v, score_mod=score_mod)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    with torch.no_grad():
        assert torch.equal(tandem.attention(q, k, v, score_mod=gated), results[0][0])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "bias", "dropout"])
def test_forward_mode_is_refused(name):
    """PyTorch would take the derivative for zero."""
    q, k, v = inputs()
    options = {"dropout_p": 0.1} if name == "dropout" else {"bias": BIAS}
    what = "tensor 0 that it reads" if name == "bias" else "q"
    with forward_ad.dual_level():
        if name == "bias":
            options["bias"] = forward_ad.make_dual(BIAS, torch.ones_like(BIAS))
        else:
            q = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(tandem.UnsupportedError, match=f"^{what} carries a tangent"):
            tandem.attention(q, k, v, **options)
