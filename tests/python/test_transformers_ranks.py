"""Transformers models whose rows are divided among two gloo processes: the loss and gradients of one."""

from __future__ import annotations

from typing import Any

import distributed_cases as cases
import pytest
import tandem
import torch
from distributed_pool import Pool
from hub import integration, transformers
from tandem.distributed import gather
from test_transformers import MODELS, SMALL
from torch.nn.parallel import DistributedDataParallel

PAIR = (0, 1)


def _model(kind: str) -> Any:
    integration.register()
    name, options = MODELS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, name)(**{**SMALL, **options, "attn_implementation": "tandem"})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def _batches() -> dict[str, dict[str, Any]]:
    torch.manual_seed(4)
    dense = torch.randint(3, 64, (2, 30))
    packed = torch.randint(3, 64, (1, 41))
    ends = torch.tensor([0, 17, 20, 41], dtype=torch.int32)
    places = torch.cat([torch.arange(n) for n in ends.diff().tolist()])[None]
    labels = dense.masked_fill(torch.rand(dense.shape) < 0.3, -100)  # unevenly on the ranks
    flat = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 21, "max_length_k": 21}
    return {
        "dense": {"input_ids": dense, "labels": labels, "attention_mask": torch.ones_like(dense)},
        "packed": {"input_ids": packed, "labels": packed, "position_ids": places, **flat},
    }


def _trained(rank: int, kind: str, name: str, layout: str, strategy: str) -> None:
    """A step under DDP, with the gradients of one process."""
    group = cases.subgroup(PAIR)
    if rank not in PAIR:
        return
    batch = _batches()[name]
    alone = _model(kind)
    wanted = alone(**batch, use_cache=False)
    wanted.loss.backward()

    model = _model(kind)
    handle = integration.context_parallel(model, group=group, layout=layout, strategy=strategy)
    if name == "dense":
        model.gradient_checkpointing_enable()
    parallel = DistributedDataParallel(model, process_group=group)
    out = parallel(**batch)
    out.loss.backward()
    loss = out.loss.detach().clone()
    torch.distributed.all_reduce(loss, group=group)
    torch.testing.assert_close(loss / 2, wanted.loss)
    divided = handle.layout_of(batch)
    logits = gather(out.logits, layout=divided, group=group, dim=1)
    torch.testing.assert_close(logits, wanted.logits, atol=1e-5, rtol=1e-4)
    for (what, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, what
        torch.testing.assert_close(
            a.grad, b.grad, atol=1e-5, rtol=1e-3, msg=lambda m, what=what: f"{what}: {m}"
        )
    assert sum(int(p.grad.any()) for p in alone.parameters()) > 12  # a router of one expert has none
    handle.remove()
    assert model(**batch).logits.shape == wanted.logits.shape


@pytest.mark.parametrize(
    ("kind", "name", "layout", "strategy"),
    [
        ("llama", "dense", "zigzag", "gather"),
        ("llama", "packed", "balanced", "auto"),
        ("gemma2", "dense", "striped", "ring"),
        ("gemma3", "dense", "contiguous", "heads"),
        ("qwen3", "packed", "zigzag", "gather"),
        ("gpt_oss", "dense", "zigzag", "ring"),
    ],
)
def test_a_step_is_that_of_one_process(pool: Pool, kind: str, name: str, layout: str, strategy: str) -> None:
    pool.run(_trained, kind, name, layout, strategy)


def _refused(rank: int) -> dict[str, str]:
    """What every rank is told where rank 1 passes something else, and where it passes something wrong."""
    group = cases.subgroup(PAIR)
    if rank not in PAIR:
        return {}
    model = _model("llama")
    integration.context_parallel(model, group=group)
    batch, odd = _batches()["dense"], rank == 1

    def told(**more: Any) -> str:
        return cases.refused(model, **{**batch, **more})

    ids = batch["input_ids"]
    padded = batch["attention_mask"].clone()
    padded[0, 0] = 0
    return {
        "batch": told(input_ids=ids.flip(0) if odd else ids),
        "layout": told(input_ids=ids[:, :-1] if odd else ids, attention_mask=None, labels=None),
        "padding": told(attention_mask=padded if odd else None),
        "cache": told(use_cache=odd),
        "other": told(**({"pixel_values": ids} if odd else {})),
    }


def test_what_is_wrong_is_told_on_both_ranks(pool: Pool) -> None:
    with pytest.raises(tandem.InvalidArgumentError, match="layout is 'tree'; it must be one of 'zigzag'"):
        integration.context_parallel(_model("llama"), layout="tree")
    for rank, told in enumerate(pool.run(_refused)[:2]):
        assert told["batch"].startswith("ranks disagree on batch: rank 0 of the group has ")
        assert told["layout"].startswith("ranks disagree on layout: rank 0 of the group has zigzag ")
        parts = {"padding": "has padding", "cache": "use_cache=False", "other": "pixel_values is not divided"}
        for name, part in parts.items():
            assert part in told[name] and told[name].startswith("rank 1 of the group: ") == (rank == 0)
