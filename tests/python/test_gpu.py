"""CUDA tensors through the Python package."""

from __future__ import annotations

import oracle
import pytest
import tandem
import torch
from test_forward import qkv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_on_the_device(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q=200, seqlen_k=300, head_dim=128, dtype=dtype)
    out, lse = tandem.attention(q.cuda(), k.cuda(), v.cuda(), causal=causal, return_lse=True)
    assert out.is_cuda and lse.is_cuda and out.dtype == dtype
    expected_out, expected_lse = oracle.exact(q, k, v, causal=causal)
    oracle.assert_close(out.cpu(), expected_out, oracle.same_dtype(q, k, v, causal=causal)[0])
    oracle.assert_close(lse.cpu(), expected_lse)


def test_work_goes_to_the_current_stream() -> None:
    q, k, v = (t.cuda() for t in qkv(head_dim=128, dtype=torch.bfloat16))
    expected = tandem.attention(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            200_000_000
        )  # about 0.1 s: a launch elsewhere would read `late` before it is written
        late = q * 1.0
        got = tandem.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(got, expected)


def test_tensors_of_two_devices_are_refused() -> None:
    q, k, v = qkv(head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(tandem.InvalidArgumentError, match="^k is on"):
        tandem.attention(q.cuda(), k, v)
