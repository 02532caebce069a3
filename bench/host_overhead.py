"""Host time of a call from Python: tandem.flash_attn beside PyTorch's scaled_dot_product_attention.

    python bench host-overhead [--device cpu|cuda] [--json FILE]

On a GPU the calls are of a small problem and only their launches are timed, by the wall clock. On the CPU the
batch is empty, so that everything but the arithmetic is done, and the thread's CPU time counts; calls with
functions, compiled ones, and the one with a window beside them, have 8 queries. Each number is the least of
many rounds of 20 calls, of all contenders in turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import harness
import tandem
import torch
from gpu_tables import host
from tandem.flash_attn import flash_attn_func, flash_attn_varlen_func

CALLS = 20
BAR_US = 15.0


def contenders(device: str) -> dict[str, Callable[[], Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch = 1 if device == "cuda" else 0
    q, k, v = (torch.randn(batch, 64, 4, 64, device=device, dtype=dtype) for _ in range(3))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    cu = torch.arange(0, packed[0].shape[0] + 1, 64, device=device, dtype=torch.int32)
    trained = [t.clone().requires_grad_() for t in (q, k, v)]
    trained_first = [t.transpose(1, 2).detach().requires_grad_() for t in trained]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def step(out: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return torch.autograd.grad(out, tensors, out)

    small = (q, k, v) if batch else [torch.randn(1, 8, 1, 8) for _ in range(3)]
    return {
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flash_attn_func, with LSE": lambda: flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*packed, cu, cu, causal=True),
        "sdpa": lambda: sdpa(*heads_first, is_causal=True),
        "flash_attn_func, recorded": lambda: flash_attn_func(*trained, causal=True),
        "sdpa, recorded": lambda: sdpa(*trained_first, is_causal=True),
        "flash_attn_func, forward and backward": lambda: step(
            flash_attn_func(*trained, causal=True), trained
        ),
        "sdpa, forward and backward": lambda: step(sdpa(*trained_first, is_causal=True), trained_first),
        **compiled(*small),
        **with_functions(*small),
    }


def compiled(*tensors: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Graphs of torch.compile, each of eight calls one after the other."""
    trained = [t.clone().requires_grad_() for t in tensors]
    trained_first = [t.transpose(1, 2).detach().requires_grad_() for t in tensors]

    def layers(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                q = function(q, k, v)
            return q

        return torch.compile(run)

    attention = layers(lambda q, k, v: tandem.attention(q, k, v, causal=True))
    sdpa = layers(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return {
        "attention, 8 compiled": lambda: attention(*trained).sum().backward(),
        "sdpa, 8 compiled": lambda: sdpa(*trained_first).sum().backward(),
    }


def with_functions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls with a window, which may be a function, and one whose function reads an array."""
    document = torch.arange(k.shape[1], device=k.device, dtype=torch.int32) // 16

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < 16)

    def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (j <= i)

    return {
        "attention, a window": lambda: tandem.attention(q, k, v, window=(15, 0)),
        "attention, a window as a function": lambda: tandem.attention(q, k, v, mask_mod=window),
        "attention, documents as a function": lambda: tandem.attention(q, k, v, mask_mod=documents),
    }


class Host:
    """Microseconds of the calling thread, the mean of a few calls."""

    def __init__(self, call: Callable[[], Any], device: str) -> None:
        self.call = call
        self.device = device
        self.clock = time.perf_counter_ns if device == "cuda" else time.thread_time_ns

    def round(self, milliseconds: float) -> list[float]:
        self.call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = self.clock()
        for _ in range(CALLS):
            self.call()
        return [(self.clock() - start) / CALLS / 1000]


def measure(device: str, rounds: int) -> dict[str, float]:
    calls = {name: Host(call, device) for name, call in contenders(device).items()}
    return {name: min(us) for name, us in harness.in_turn(calls, rounds, 0.0).items()}


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    document = harness.origin(harness.device_name(args.device), args.commit)
    us = document["us"] = measure(args.device, args.rounds)
    print("{device}, PyTorch {torch}, commit {commit}: host microseconds a call".format(**document))
    print("\n".join(host(document)))
    harness.write_json(document, args.json)
    return 0 if us["flash_attn_func"] < BAR_US else 1


if __name__ == "__main__":
    sys.exit(main())
