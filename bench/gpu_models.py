"""A Llama-shaped model on a GPU, by its attention: tokens a second of training and of generation.

    python bench/gpu_models.py [--seqlen 8192] [--steps 50] [--json FILE]

Training: the same weights and batches with attn_implementation "tandem", "sdpa" and "eager", blocks of steps
of each in turn in one process, so that heat weighs on all alike; the median block counts, the first (kernels
are found, memory is taken) left out. Generation: greedy, batch 16, with a cache, "tandem" and "sdpa" in turn.
--device cpu and small sizes try the program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gpu_speed
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import tandem.integrations.transformers  # noqa: E402
import transformers  # noqa: E402

BLOCKS = 5


def make_model(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4 // 8 * 8,
        num_attention_heads=args.hidden // args.head_dim,
        num_key_value_heads=max(1, args.hidden // args.head_dim // 4),
        num_hidden_layers=args.layers,
        vocab_size=args.vocabulary,
        max_position_embeddings=2 * args.seqlen,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=None,
        attn_implementation="tandem",
    )
    with torch.device(args.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Training:
    """A model and its optimizer, on one implementation of attention."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        self.args = args
        self.model = make_model(args).train()
        self.model.set_attn_implementation(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = torch.Generator(device=args.device).manual_seed(1)
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def block(self, steps: int) -> None:
        shape = (self.args.batch, self.args.seqlen)
        wait(self.args.device)
        start = time.perf_counter()
        for _ in range(steps):
            ids = torch.randint(
                1, self.args.vocabulary, shape, generator=self.batches, device=self.args.device
            )
            loss = self.model(input_ids=ids, labels=ids).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.detach())
        wait(self.args.device)
        self.seconds.append((time.perf_counter() - start) / steps)

    def result(self) -> dict[str, Any]:
        tokens = self.args.batch * self.args.seqlen
        return {
            "tokens_per_second": tokens / statistics.median(self.seconds[1:]),
            "seconds_per_step": self.seconds,
            "losses": torch.stack(self.losses).tolist(),
        }


def train(kinds: list[str], args: argparse.Namespace) -> dict[str, Any]:
    runs = {kind: Training(kind, args) for kind in kinds}
    for _ in range(BLOCKS):
        for run in runs.values():
            run.block(max(1, args.steps // BLOCKS))
    return {kind: run.result() for kind, run in runs.items()}


def generate(kinds: list[str], args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(args).eval()
    ids = torch.randint(1, args.vocabulary, (args.generation_batch, args.prompt), device=args.device)
    mask = torch.ones_like(ids)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(8):  # of which the first warms up; runs differ by several percent
        for kind in kinds:
            model.set_attn_implementation(kind)
            wait(args.device)
            start = time.perf_counter()
            model.generate(
                ids, attention_mask=mask, max_new_tokens=args.new_tokens, do_sample=False, use_cache=True
            )
            wait(args.device)
            seconds[kind].append(time.perf_counter() - start)
    tokens = args.generation_batch * args.new_tokens
    return {
        kind: {"tokens_per_second": tokens / statistics.median(times[1:]), "seconds": times}
        for kind, times in seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    for name, default in (
        ("seqlen", 8192),
        ("batch", 1),
        ("steps", 50),
        ("layers", 4),
        ("hidden", 2048),
        ("head-dim", 128),
        ("vocabulary", 32000),
        ("generation-batch", 16),
        ("prompt", 1024),
        ("new-tokens", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", default="tandem,sdpa,eager")
    parser.add_argument("--commit", help="what the package was built from, where that is no checkout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tandem.integrations.transformers.register()
    commit = args.commit or gpu_speed.commit()
    kinds = args.kinds.split(",")
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "command": " ".join(sys.argv),
        "sizes": {name: value for name, value in vars(args).items() if isinstance(value, int)},
    }
    print(", ".join(str(document[name]) for name in ("device", "torch", "transformers", "commit")))
    for what, results in (
        ("training", train(kinds, args)),
        ("generation", generate([kind for kind in kinds if kind != "eager"], args)),
    ):
        document[what] = results
        for kind, result in results.items():
            print(f"{what} {kind:8}{result['tokens_per_second']:12.0f} tokens/s", end="")
            print(f"   last loss {result['losses'][-1]:.4f}" if "losses" in result else "", flush=True)
        if args.json:
            args.json.write_text(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
