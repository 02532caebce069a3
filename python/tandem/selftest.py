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


def _formula(q: Any, k: Any, v: Any) -> Any:
    scores = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) * q.shape[-1] ** -0.5
    weights = np.exp(scores) * np.tri(q.shape[1])
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)


def _error(out: Any, bound: float) -> str:
    """The largest error of causal attention on _inputs, which must stay below `bound`."""
    error = float(np.abs(np.asarray(out, np.float64) - _formula(*_inputs())).max())
    if not error <= bound:
        raise ArithmeticError(f"wrong: the largest error is {error:.1e}, above {bound:.0e}")
    return f"largest error {error:.1e}"


def _cpu() -> str:
    info = _core.cpu_info()
    forward = _error(tandem.attention(*_inputs(), causal=True), 1e-5)
    return f"{info['target']} of {', '.join(info['targets'])}; {forward}"


def _torch() -> str:
    import torch

    q, k, v = (torch.from_numpy(array).requires_grad_() for array in _inputs())
    out = tandem.attention(q, k, v, causal=True)
    out.sum().backward()  # type: ignore[no-untyped-call]
    if q.grad is None or not bool(q.grad.isfinite().all()):
        raise ArithmeticError("wrong: no finite gradient came back")
    return f"{torch.__version__}; forward and backward, {_error(out.detach().numpy(), 1e-5)}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ModuleNotFoundError("PyTorch sees no CUDA device here")
    q, k, v = (torch.from_numpy(array).bfloat16() for array in _inputs())
    gradients = []
    for tensors in ([t.float() for t in (q, k, v)], [t.cuda() for t in (q, k, v)]):
        out = tandem.attention(*(t.requires_grad_() for t in tensors), causal=True)
        gradients.append(torch.autograd.grad(out.square().sum(), tensors))
    error = _error(out.detach().float().cpu().numpy(), 3e-2)
    for right, found in zip(*gradients, strict=True):
        if not bool((found.float().cpu() - right).abs().max() <= 3e-2 * right.abs().max()):
            raise ArithmeticError("wrong: the gradients are not those of the CPU")
    return f"{torch.cuda.get_device_name()}; bf16 forward and backward, {error}"


def _transformers() -> str:
    import transformers

    from tandem.integrations import transformers as integration

    integration.register()
    return f'{transformers.__version__}; attn_implementation="tandem" is registered'


def _jax() -> str:
    import jax

    from tandem.jax import attention

    device = jax.devices()[0]  # the one that a call takes
    dtype, bound = (jax.numpy.bfloat16, 3e-2) if device.platform == "gpu" else (jax.numpy.float32, 1e-5)
    inputs = (jax.numpy.asarray(array, dtype) for array in _inputs())
    error = _error(attention(*inputs, causal=True), bound)
    return f"{jax.__version__} on {device.device_kind}; {dtype.dtype} forward, {error}"


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
