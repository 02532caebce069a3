"""What works on this machine, in a few lines: ``python -m tandem.selftest``.

Each line is a thing tried here and now: attention on each backend checked against the plain formula in
float64, and one call through each of the libraries that are installed. The exit status is 1 if any of them
gives a wrong result or fails; what is not installed, or not there, is said and counts as neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import tandem
from tandem import _core
from tandem._errors import TandemError

_SHAPE = (1, 70, 2, 64)


def _inputs() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(_SHAPE, np.float32) for _ in range(3))  # type: ignore[return-value]


def _bf16(x: Any) -> Any:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def _formula(q: Any, k: Any, v: Any, rounded: Callable[[Any], Any] = lambda x: x) -> Any:
    """Causal attention. With `rounded` as fused attention does: P and the result are rounded once."""
    scores = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(q.shape[1])
    out = np.einsum("bhij,bjhd->bhid", rounded(weights), v) / weights.sum(-1, keepdims=True)
    return rounded(out.swapaxes(1, 2))


def _check(name: str, found: Any, right: Any, yardstick: Any = None) -> str:
    """The package's accuracy rule (docs/numerics.md): f32, or 16 bits beside fused attention's results."""
    found, right = np.asarray(found, np.float64), np.asarray(right, np.float64)
    errors, f32 = found - right, 1e-5 * max(1.0, float(np.abs(right).max()))
    largest, rms = float(np.abs(errors).max()), float(np.sqrt(np.square(errors).mean()))
    bound, rms_bound = f32, f32
    if yardstick is not None:
        others = np.asarray(yardstick, np.float64) - right
        bound = 2.0 * float(np.abs(others).max()) + 3e-5
        rms_bound = 1.5 * float(np.sqrt(np.square(others).mean())) + f32 / 4
    gain = float((found * right).sum() / np.square(right).sum())
    if not (largest <= bound and rms <= rms_bound and abs(gain - 1.0) <= 0.004):
        raise ArithmeticError(
            f"wrong: the largest error of {name} is {largest:.1e}, allowed {bound:.1e}, its RMS {rms:.1e}, "
            f"allowed {rms_bound:.1e}, the gain {gain:.4f}, allowed 1 within 0.004"
        )
    return f"largest error {largest:.1e}"


def _check_out(out: Any, rounded: Callable[[Any], Any] | None = None) -> str:
    """Validates the output of causal attention on _inputs, as `rounded` rounds them."""
    if rounded is None:
        return _check("out", out, _formula(*_inputs()))
    q, k, v = map(rounded, _inputs())
    return _check("out", out, _formula(q, k, v), _formula(q, k, v, rounded))


def _cpu() -> str:
    info = _core.cpu_info()
    forward = _check_out(tandem.attention(*_inputs(), causal=True))
    return f"{info['target']} of {', '.join(info['targets'])}; {forward}"


def _torch() -> str:
    import torch

    q, k, v = (torch.from_numpy(array).requires_grad_() for array in _inputs())
    out = tandem.attention(q, k, v, causal=True)
    out.sum().backward()  # type: ignore[no-untyped-call]
    if q.grad is None or not bool(q.grad.isfinite().all()):
        raise ArithmeticError("wrong: no finite gradient came back")
    return f"{torch.__version__}; forward and backward, {_check_out(out.detach().numpy())}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ModuleNotFoundError("PyTorch sees no CUDA device here")
    return f"{torch.cuda.get_device_name()}; bf16 forward and backward, {_bf16_on('cuda')}"


def _bf16_on(device: str) -> str:
    """Forward and backward, the gradients beside those of f32 on the CPU and of PyTorch's own attention."""
    import torch

    inputs = [torch.from_numpy(array).bfloat16() for array in _inputs()]
    dout = inputs[1].flip(1)

    def run(attend: Callable[..., Any], wanted: Any) -> tuple[Any, ...]:
        q, k, v = (t.to(wanted).requires_grad_() for t in inputs)
        out = attend(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), dout.to(wanted))
        return tuple(t.detach().float().cpu().numpy() for t in (out, *gradients))

    def plain(*tensors: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in tensors)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def ours(*tensors: Any) -> Any:
        return tandem.attention(*tensors, causal=True)

    right, found, yardstick = run(ours, torch.float32), run(ours, device), run(plain, device)
    for name, *gradient in zip(("dq", "dk", "dv"), found[1:], right[1:], yardstick[1:], strict=True):
        _check(name, *gradient)
    return _check_out(found[0], _bf16)


def _transformers() -> str:
    import transformers

    from tandem.integrations import transformers as integration

    integration.register()
    return f'{transformers.__version__}; attn_implementation="tandem" is registered'


def _jax() -> str:
    import jax

    from tandem.jax import attention

    device = jax.devices()[0]  # the one that a call takes
    on_gpu = device.platform == "gpu"
    dtype = jax.numpy.bfloat16 if on_gpu else jax.numpy.float32
    inputs = (jax.numpy.asarray(array, dtype) for array in _inputs())
    error = _check_out(np.asarray(attention(*inputs, causal=True), np.float32), _bf16 if on_gpu else None)
    return f"{jax.__version__} on {device.device_kind}; {np.dtype(dtype).name} forward, {error}"


_TRIALS: tuple[tuple[str, str | None, Callable[[], str]], ...] = (
    ("CPU", None, _cpu),
    ("PyTorch", "torch", _torch),
    ("GPU", "torch", _gpu),
    ("Transformers", "transformers", _transformers),
    ("JAX", "jax", _jax),
)


def main() -> int:
    print(f"tandem {tandem.__version__}")
    failed = 0
    for name, needed, trial in _TRIALS:
        if needed is not None and find_spec(needed) is None:
            outcome = f"not tried: {needed} is not installed"
        else:
            try:
                outcome = f"works: {trial()}"
            except ImportError as reason:
                outcome = f"not tried: {reason}"
            except (TandemError, ArithmeticError, RuntimeError) as reason:
                outcome, failed = f"FAILS: {reason}", 1
        print(f"  {name:13}{outcome}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
