"""sm_limit: plans of GPUs with fewer SMs; on the CPU it is validated and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tandem
import torch
from test_forward import qkv


@pytest.mark.parametrize("backward", [False, True])
def test_explain_says_so(backward: bool) -> None:
    q, k, v = (t.to(torch.bfloat16) for t in qkv(seqlen_q=4096, seqlen_k=4096, dtype=torch.bfloat16))
    text = tandem.explain(q, k, v, device="H200", backward=backward, sm_limit=np.int64(40))
    assert "sm_limit 40: persistent grids are those of a GPU with 40 SMs" in text
    assert "sm_limit" not in tandem.explain(q, k, v, device="H200", backward=backward)
    assert "sm_limit" not in tandem.explain(q, k, v, sm_limit=40)


def test_forward_kernels_that_are_not_persistent_refuse_it() -> None:
    tensors = qkv(dtype=torch.bfloat16)
    with pytest.raises(tandem.UnsupportedError, match="^sm_limit is 40, but the forward kernels sm80"):
        tandem.explain(*tensors, device="A100", sm_limit=40)
    assert tandem.explain(*tensors, device="A100", sm_limit=1000)


@pytest.mark.parametrize("limit", [-1, 1.5, "all", True, None, 2**31])
def test_errors(limit: Any) -> None:
    message = "^sm_limit is .*; pass an integer, at least 1, or 0 for all SMs$"
    tensors = qkv()
    for call in (tandem.attention, tandem.explain):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            call(*tensors, sm_limit=limit)
    out, lse = tandem.attention(*tensors, return_lse=True)
    with pytest.raises(tandem.InvalidArgumentError, match=message):
        tandem.attention_backward(out, *tensors, out, lse, sm_limit=limit)


def test_on_the_cpu_it_changes_nothing() -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    wanted = tandem.attention(*tensors, causal=True)
    expected = torch.autograd.grad(wanted.sum(), tensors)
    compiled = torch.compile(tandem.attention, backend="aot_eager", fullgraph=True)
    for call in (tandem.attention, compiled):
        out = call(*tensors, causal=True, sm_limit=2)
        assert torch.equal(out, wanted)
        oracle.assert_equal(torch.autograd.grad(out.sum(), tensors), expected)
