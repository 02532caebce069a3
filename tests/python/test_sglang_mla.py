"""The SGLang backend with latent attention: whole prompts by expanded heads, the rest by the latent cache."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from test_sglang import CONTEXT, batch, layer, runner, sglang

__all__ = ["sglang"]  # the fixture

HEADS, RANK, ROPE, NOPE, HEAD_DIM_V = 4, 64, 16, 24, 32


class LatentPool:
    """MLATokenToKVPool: a latent vector a slot, whose first columns are the values. It takes no scales."""

    kv_lora_rank = RANK

    def __init__(self, slots: int) -> None:
        self.keys = torch.full((slots, 1, RANK + ROPE), torch.nan)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.keys[..., :RANK]

    def set_kv_buffer(self, layer: Any, at: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[at.loc] = k


def latent_runner(page_size: int, **other: Any) -> Any:
    pool = LatentPool(6 * CONTEXT + page_size)
    return runner(page_size, **{"use_mla_backend": True, "token_to_kv_pool": pool, **other})


def latent_layer(**other: Any) -> Any:
    sizes = {"tp_q_head_num": HEADS, "tp_k_head_num": 1, "qk_head_dim": RANK + ROPE, "v_head_dim": RANK}
    return layer(**{**sizes, "scaling": 0.2, **other})


def expanded_layer() -> Any:
    return latent_layer(tp_k_head_num=HEADS, qk_head_dim=NOPE + ROPE, v_head_dim=HEAD_DIM_V)


def with_prefix(step: Any, before: list[int]) -> Any:
    step.extend_prefix_lens_cpu = before
    return step


@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_with_the_latent_cache(sglang: Any, page_size: int) -> None:
    """Prompts behind a prefix, then single tokens: queries and keys of both parts side by side."""
    sglang.plugin.register()
    of = latent_runner(page_size)
    backend, one = sglang.backends["tandem"](of), latent_layer()
    q, keys = torch.randn(3, CONTEXT, HEADS, RANK + ROPE), torch.randn(3, CONTEXT, 1, RANK + ROPE)
    at = [0, 0, 0]
    for mode, new in (("extend", [15, 16, 17]), ("extend", [2, 33, 1]), ("decode", [1, 1, 1])):
        step = with_prefix(batch(of, mode, [4, 0, 2], at, new), at)
        backend.init_forward_metadata(step)
        rows = [slice(a, a + n) for a, n in zip(at, new, strict=True)]
        queries, k = (torch.cat([t[b, r] for b, r in enumerate(rows)]) for t in (q, keys))
        out = backend.forward_extend(queries, k, k[..., :RANK], one, step)
        assert out.shape == (sum(new), HEADS * RANK)
        for b, (part, r) in enumerate(zip(out.view(-1, HEADS, RANK).split(new), rows, strict=True)):
            seen = keys[b : b + 1, : r.stop]
            wanted = oracle.exact(q[b : b + 1, r], seen, seen[..., :RANK], causal=True, scale=0.2)
            oracle.assert_close(part[None], wanted[0])
        at = [a + n for a, n in zip(at, new, strict=True)]


def test_whole_prompts_with_expanded_heads(sglang: Any) -> None:
    """The cache, which the model itself has filled, is neither read nor written."""
    sglang.plugin.register()
    of = latent_runner(16)
    backend, new = sglang.backends["tandem"](of), [7, 0, 20]
    step = with_prefix(batch(of, "extend", [4, 0, 2], [0, 0, 0], new), [0, 0, 0])
    backend.init_forward_metadata(step)
    q, k = torch.randn(2, 27, HEADS, NOPE + ROPE)
    v = torch.randn(27, HEADS, HEAD_DIM_V)
    given = q.flatten(1), k, v, expanded_layer(), step
    out = backend.forward_extend(*given, save_kv_cache=False).view(27, HEADS, HEAD_DIM_V)
    assert of.token_to_kv_pool.keys.isnan().all()
    for own in (slice(0, 7), slice(7, 27)):
        wanted = oracle.exact(q[None, own], k[None, own], v[None, own], causal=True, scale=0.2)
        oracle.assert_close(out[None, own], wanted[0])
    with pytest.raises(tandem.UnsupportedError, match="^expanded keys are to be put into a latent cache"):
        backend.forward_extend(*given)
    step.extend_prefix_lens_cpu = [0, 0, 3]
    with pytest.raises(tandem.UnsupportedError, match="^a prompt of latent attention has expanded keys of a"):
        backend.forward_extend(*given, save_kv_cache=False)


def test_a_latent_cache_of_8_bits_is_refused(sglang: Any) -> None:
    sglang.plugin.register()
    with pytest.raises(tandem.UnsupportedError, match="^the cache of latent attention is torch.float8"):
        sglang.backends["tandem"](latent_runner(16, kv_cache_dtype=torch.float8_e4m3fn))
