"""A Llama-shaped model on a GPU, by its attention: tokens a second of training and of generation.

    python bench gpu-models [--seqlen 8192] [--steps 50] [--json FILE]

Training: the same weights and batches with attn_implementation "tandem", "sdpa" and "eager", blocks of steps
of each in turn in one process, so that heat weighs on all alike; the median block counts, the first (kernels
are found, memory is taken) left out. Generation: greedy, batch 16, with a cache, "tandem" and "sdpa" in turn.
--device cpu and small sizes try the program itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import harness
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

    def round(self, milliseconds: float) -> list[float]:
        """Seconds a step of one block of steps."""
        steps = max(1, self.args.steps // BLOCKS)
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
        return [(time.perf_counter() - start) / steps]


def train(kinds: list[str], args: argparse.Namespace) -> dict[str, Any]:
    runs = {kind: Training(kind, args) for kind in kinds}
    tokens = args.batch * args.seqlen
    return {
        kind: {
            "tokens_per_second": tokens / statistics.median(seconds[1:]),
            "seconds_per_step": seconds,
            "losses": torch.stack(runs[kind].losses).tolist(),
        }
        for kind, seconds in harness.in_turn(runs, BLOCKS, 0.0).items()
    }


class Generation:
    """Greedy generation by a model that others share, on one implementation of attention."""

    def __init__(self, kind: str, model: Any, prompt: torch.Tensor, args: argparse.Namespace) -> None:
        self.kind = kind
        self.model = model
        self.args = args
        self.inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}

    def round(self, milliseconds: float) -> list[float]:
        """Seconds of one generation."""
        self.model.set_attn_implementation(self.kind)
        wait(self.args.device)
        start = time.perf_counter()
        new = {"max_new_tokens": self.args.new_tokens, "do_sample": False, "use_cache": True}
        self.model.generate(**self.inputs, **new)
        wait(self.args.device)
        return [time.perf_counter() - start]


def generate(kinds: list[str], args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(args).eval()
    ids = torch.randint(1, args.vocabulary, (args.generation_batch, args.prompt), device=args.device)
    runs = {kind: Generation(kind, model, ids, args) for kind in kinds}
    tokens = args.generation_batch * args.new_tokens
    # Of eight rounds, the first warms up; they differ by several percent.
    return {
        kind: {"tokens_per_second": tokens / statistics.median(seconds[1:]), "seconds": seconds}
        for kind, seconds in harness.in_turn(runs, 8, 0.0).items()
    }


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
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
    args = parser.parse_args()
    tandem.integrations.transformers.register()
    kinds = args.kinds.split(",")
    document: dict[str, Any] = {
        **harness.origin(harness.device_name(args.device), args.commit),
        "transformers": transformers.__version__,
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
        harness.write_json(document, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
