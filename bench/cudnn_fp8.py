"""cuDNN's backward pass in FP8, where the package `cudnn` (nvidia-cudnn-frontend) is installed.

Its tensors are e4m3 before the clock starts, with a scale each, so that no quantiser runs. Scales of dP and
of the gradients are by their largest values, which a call before the first has found.
"""

from __future__ import annotations

import math
from typing import Any

import harness

try:
    import cudnn
    import gpu_peers
    import torch
except ImportError:
    cudnn = None

SCALES = [f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")]
SCALES += [f"scale_{name}" for name in ("s", "dQ", "dK", "dV", "dP")]
LARGEST = 448.0


def build(q: Any, causal: bool) -> tuple[Any, dict[str, Any], Any]:
    """The graph for tensors like q, (batch, seqlen, heads, head_dim), its inputs by name, and its outputs."""
    batch, seqlen, heads, head_dim = q.shape
    e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32)
    rows = {"dim": (batch, heads, seqlen, head_dim), "stride": q.transpose(1, 2).stride(), "data_type": e4m3}
    stats = {"dim": (batch, heads, seqlen, 1), "stride": (heads * seqlen, seqlen, 1, 1), "data_type": f32}
    one = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "data_type": f32}
    inputs = {name: graph.tensor(name=name, **rows) for name in ("q", "k", "v", "o", "dO")}
    inputs["stats"] = graph.tensor(name="stats", **stats)
    inputs |= {name: graph.tensor(name=name, **one) for name in SCALES}
    outputs = graph.sdpa_fp8_backward(**inputs, attn_scale=head_dim**-0.5, use_causal_mask=causal)
    for output, of in zip(outputs, [rows] * 3 + [one] * 4, strict=True):
        output.set_output(True).set_dim(of["dim"]).set_stride(of["stride"]).set_data_type(of["data_type"])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, inputs, outputs


def bytes_of(x: Any) -> Any:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def backward(cell: dict[str, Any]) -> harness.OnGpu | None:
    """A cell's call, after its gradients were compared with PyTorch's; None without the package, and where
    cuDNN has no kernel."""
    if cudnn is None:
        return None
    tensors = gpu_peers.Cell({**cell, "dtype": "e4m3"}, "cuda")
    q, k, v, dout = tensors.q, tensors.k, tensors.v, tensors.dout
    wide = [x.to(torch.bfloat16).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(*wide, 0.0, bool(cell["causal"]))[:2]
    expected = torch.autograd.grad(out, wide, dout.to(torch.bfloat16).transpose(1, 2))

    try:
        graph, inputs, outputs = build(q, bool(cell["causal"]))
    except cudnn.cudnnGraphNotSupportedError:  # on Hopper, heads of other than 128 dimensions
        return None
    o = out.detach().transpose(1, 2).contiguous().to(torch.float8_e4m3fn)
    given = {"q": q, "k": k, "v": v, "o": o, "dO": dout, "stats": lse.float().contiguous()}
    given |= {name: torch.ones(1, device="cuda") for name in inputs if name not in given}
    given["scale_s"].fill_(256.0)
    given["descale_s"].fill_(1 / 256.0)
    made = [torch.empty_like(q) for _ in range(3)] + [torch.zeros(1, device="cuda") for _ in range(4)]
    memory = {inputs[name]: bytes_of(x) for name, x in given.items()}
    memory |= {output: bytes_of(x) for output, x in zip(outputs, made, strict=True)}
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)

    def call() -> None:
        graph.execute(memory, workspace)

    call()
    for name, largest in zip(("dQ", "dK", "dV", "dP"), made[3:], strict=True):
        given[f"scale_{name}"].copy_(LARGEST / 2 / largest)
    given["descale_dP"].copy_(1 / given["scale_dP"])
    call()
    for name, x, y in zip(("dq", "dk", "dv"), made, expected, strict=False):
        cosine = torch.cosine_similarity(x.float().flatten(), y.transpose(1, 2).float().flatten(), 0).item()
        if math.isnan(cosine) or cosine < 0.98:
            raise RuntimeError(f"cuDNN's {name} has a cosine of {cosine:.4f} with PyTorch's")
    return harness.OnGpu(call)
