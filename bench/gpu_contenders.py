"""What `python bench gpu-speed` compares: Tandem, PyTorch's backends, and products of matrices."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import harness

try:
    import torch
except ImportError:
    torch = None


class Tandem:
    """The program gpu_speed, which answers each line by a line of JSON."""

    name = "tandem"

    def __init__(self, program: Path) -> None:
        # Path drops a leading "./", and a bare name would be looked for in PATH.
        command = [program.resolve()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.device = self.ask("device")["device"]

    def ask(self, line: str) -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the program ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def prepare(self, cell: dict) -> dict:
        return self.ask("problem " + " ".join(f"{key}={value}" for key, value in cell.items()))

    def round(self, milliseconds: float) -> list[float]:
        return [self.ask(f"round {milliseconds}")["us"]]


class Variants:
    """Tandem in several ways, a process each, so that rounds of them alternate."""

    def __init__(self, program: Path, changes: dict[str, dict]) -> None:
        self.changes = changes
        self.contenders = {name: Tandem(program) for name in changes}

    def measure(self, cell: dict, rounds: int) -> tuple[dict[str, dict], dict[str, list[float]]]:
        """What each prepared for `cell` with its changes, and its microseconds."""
        prepared = {n: c.prepare({**cell, **self.changes[n]}) for n, c in self.contenders.items()}
        return prepared, harness.in_turn(self.contenders, rounds, harness.ROUND_MS)


class Sdpa(harness.OnGpu):
    """torch.nn.functional.scaled_dot_product_attention, held to one backend."""

    def __init__(self, name: str, backend: object) -> None:
        super().__init__(self.attend)
        self.name = name
        self.backend = backend

    def prepare(self, cell: dict) -> None:
        """Makes the tensors and runs once. Throws RuntimeError where the backend does not have the shape."""
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[cell["dtype"]]
        shape = (cell["batch"], cell["seqlen"], cell["heads"], cell["head_dim"])
        tensors = [torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)]
        *self.tensors, self.dout = tensors
        self.causal = bool(cell["causal"])
        self.out = None
        if cell["pass"] == "backward":
            for tensor in self.tensors:
                tensor.requires_grad_()
            self.out = self.forward()
        self.time(1)

    def forward(self) -> object:
        with torch.nn.attention.sdpa_kernel(self.backend):
            return torch.nn.functional.scaled_dot_product_attention(*self.tensors, is_causal=self.causal)

    def attend(self) -> None:
        if self.out is None:
            self.forward()
        else:
            torch.autograd.grad(self.out, self.tensors, self.dout, retain_graph=True)


def peers() -> list[Sdpa]:
    if torch is None or not torch.cuda.is_available():
        return []
    backends = torch.nn.attention.SDPBackend
    return [Sdpa("cudnn", backends.CUDNN_ATTENTION), Sdpa("fa2", backends.FLASH_ATTENTION)]


class Product(harness.OnGpu):
    """A product of n x n matrices through cuBLAS, bf16 or FP8: what the tensor cores reach."""

    def __init__(self, fp8: bool, n: int = 8192) -> None:
        self.flops = 2.0 * n**3
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if fp8:
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
            one = torch.ones((), device="cuda")
            super().__init__(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16))
        else:
            super().__init__(lambda: a @ b)
        self.call()


def ceilings(fp8: bool) -> dict[str, float]:
    """TFLOP/s of large products, in turn as attention is measured: medians of 9 rounds."""
    if torch is None or not torch.cuda.is_available():
        return {}
    products = {"gemm_tflops": Product(fp8=False)}
    if fp8:
        products["gemm_fp8_tflops"] = Product(fp8=True)
    return harness.tflops(products["gemm_tflops"].flops, harness.in_turn(products, 9, harness.ROUND_MS))
