"""Models on a GPU, by what computes their attention: training, the time to the first token, and generation.

    python bench gpu-models [--budget SECONDS] [--resume FILE] [--json FILE]

A row is a model (random weights, a few layers) and a task. Its contenders share the weights and run in turn
in one process, so that heat weighs on all alike: Tandem, PyTorch's attention (its default, held to cuDNN's
and held to FlashAttention-2), FlashAttention-3 where Transformers loads it, compiled FlexAttention where
PyTorch's attention would need a mask tensor, and no attention at all, which leaves the time of the rest.
One that raises, or whose results are not Tandem's, is left out, and the JSON says why.

Rows come in the order of their weight, and each is written when it is done; after --budget seconds none
begins. --device cpu --small tries the program itself.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import model_shapes
import torch
import transformers
from model_shapes import KINDS, SHAPES, attention_by

#: Relative RMS of what a contender may be away from Tandem, by the last layer's attention and by the first
#: layer's gradients; another mask makes it about 1.
BOUND = 0.1


@dataclass(frozen=True)
class Row:
    """What is measured: `seqlen` tokens that are trained on, or are the prompt."""

    task: str
    model: str
    seqlen: int
    layers: int = 4
    batch: int = 1
    documents: int = 1  #: training: how many are packed into the sequence
    recompute: bool = False  #: training: keep each layer's input alone, as long sequences want
    chunk: int = 0  #: first token: how many tokens at a time, into a static cache; 0: all at once
    graph: bool = False  #: generation: a step is a CUDA graph
    new: int = 128  #: generation: tokens of each sequence

    @property
    def tokens(self) -> int:
        """Of one call."""
        return self.batch * (self.new if self.task == "generation" else self.seqlen)

    def __str__(self) -> str:
        told = [self.task, self.model, f"{self.seqlen} tokens", f"{self.layers} layers"]
        told += [f"{self.documents} documents"] * (self.documents > 1)
        told += [f"chunks of {self.chunk}"] * (self.chunk > 0)
        return ", ".join(told + ["CUDA graph"] * self.graph)


ROWS = [
    Row("training", "llama", 32768),
    Row("training", "llama", 8192),
    Row("first token", "llama", 131072),
    Row("generation", "llama", 8192, batch=16, graph=True),
    Row("generation", "llama", 1024, batch=16, graph=True),
    Row("first token", "llama", 32768),
    Row("first token", "llama", 131072, chunk=8192),
    Row("training", "llama", 32768, documents=8),
    Row("training", "gpt-oss", 8192),
    Row("training", "gemma3", 8192, layers=6),
    Row("training", "qwen3", 32768),
    Row("generation", "llama", 1024, batch=16),
    Row("training", "gpt-oss", 32768),
    Row("training", "gemma3", 32768, layers=6),
    Row("training", "qwen3", 8192),
    Row("training", "llama", 131072, layers=2, recompute=True),
    Row("first token", "llama", 32768, chunk=8192),
    Row("training", "qwen3", 131072, layers=2, recompute=True),
    Row("training", "gpt-oss", 131072, layers=2, recompute=True),
    Row("training", "gemma3", 131072, layers=6, recompute=True),
]


class Task:
    """A row's model and inputs. Subclasses tell a call of it."""

    def __init__(self, row: Row, device: str, small: bool) -> None:
        self.row, self.device = row, device
        self.model = model_shapes.make_model(row.model, row.layers, row.seqlen + row.new, device, small)
        draw = torch.Generator(device=device).manual_seed(1)
        shape, vocabulary = (row.batch, row.seqlen), self.model.config.vocab_size
        self.ids = torch.randint(1, vocabulary, shape, generator=draw, device=device)
        self.seen: list[torch.Tensor] = []
        last = self.model.model.layers[-1].self_attn
        self.watch = last.register_forward_hook(self.watched)

    def watched(self, _module: Any, _given: Any, out: Any) -> None:
        self.seen.append(out[0].detach()[:, -64:].float())

    def kinds(self) -> list[str]:
        needs_flex = SHAPES[self.row.model].needs_mask or self.row.documents > 1
        return [kind for kind in KINDS if kind != "flex" or needs_flex]

    def prepared(self, kind: str) -> Callable[[], Any]:
        """The call of a contender, which must have run once."""
        raise NotImplementedError

    def results(self, kind: str) -> list[torch.Tensor]:
        """What tells whether a contender computes the same."""
        raise NotImplementedError


class Training(Task):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.model.train()
        if self.row.recompute:
            self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs: dict[str, Any] = {"input_ids": self.ids, "labels": self.ids}
        if self.row.documents > 1:  # of lengths as 1 to 2: Transformers sees them by their places
            shares = torch.linspace(1, 2, self.row.documents).cumsum(0)
            ends = (shares / shares[-1] * self.row.seqlen).round().long().tolist()
            places = [torch.arange(end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
            self.inputs["position_ids"] = torch.cat(places)[None].to(self.device)

    def gradients(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(**self.inputs).loss
        loss.backward()
        return loss.detach()

    def results(self, kind: str) -> list[torch.Tensor]:
        self.seen.clear()
        loss = self.gradients()
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss is {loss.item()}")
        projections = self.model.model.layers[0].self_attn
        found = [self.seen[0], *(getattr(projections, f"{x}_proj").weight.grad.float() for x in "qkv")]
        self.optimizer.zero_grad()
        return found

    def prepared(self, kind: str) -> Callable[[], Any]:
        def step() -> None:
            self.gradients()
            self.optimizer.step()

        return step


class FirstToken(Task):
    def call(self) -> torch.Tensor:
        sizes = self.row.seqlen, self.row.chunk
        if self.row.chunk:
            cache: Any = transformers.StaticCache(config=self.model.config, max_cache_len=sizes[0])
        else:
            cache = transformers.DynamicCache(config=self.model.config)
        with torch.no_grad():
            for ids in self.ids.split(self.row.chunk or self.row.seqlen, 1):
                out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            found: torch.Tensor = out.logits.argmax(-1)
        return found

    def results(self, kind: str) -> list[torch.Tensor]:
        self.seen.clear()
        self.call()
        return self.seen[-1:]

    def prepared(self, kind: str) -> Callable[[], Any]:
        return self.call


class Generation(Task):
    """Greedy decoding on a static cache, a call for `new` tokens of each sequence."""

    def kinds(self) -> list[str]:
        return ["tandem", "sdpa", "cudnn", "none"]

    def started(self, kind: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """One step, and what goes back to the prompt's end: the cache has room for `new` tokens."""
        cache = transformers.StaticCache(self.model.config, max_cache_len=self.row.seqlen + self.row.new)
        with torch.no_grad(), attention_by(self.model, "tandem"):
            logits = self.model(self.ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits.argmax(-1)
        lengths = [layer.cumulative_length for layer in cache.layers]
        places = torch.arange(cache.layers[0].max_cache_len, device=self.device)

        def step() -> None:
            mask = None
            if KINDS[kind][0] == "sdpa":  # as generate() does: one a step, of the rows that there are
                mask = (places <= lengths[0])[None, None, None].expand(self.row.batch, 1, 1, -1)
            out = self.model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
            token.copy_(out.logits.argmax(-1))

        def rewind() -> None:
            for length in lengths:
                length.fill_(self.row.seqlen)

        return step, rewind

    def results(self, kind: str) -> list[torch.Tensor]:
        step, _ = self.started(kind)
        with torch.no_grad(), attention_by(self.model, kind):
            self.seen.clear()
            step()
        return self.seen[:1]

    def prepared(self, kind: str) -> Callable[[], Any]:
        step, rewind = self.started(kind)
        if self.row.graph and self.device == "cuda":
            with torch.no_grad(), attention_by(self.model, kind):
                step = captured(step)

        def generate() -> None:
            rewind()
            with torch.no_grad():
                for _ in range(self.row.new):
                    step()

        return generate


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, after two on a stream of their own."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda: graph.replay() if step else None  # the step holds the tensors that the graph reads


TASKS: dict[str, Callable[..., Task]] = {
    "training": Training,
    "first token": FirstToken,
    "generation": Generation,
}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Contender:
    """Blocks of calls of about so many seconds: the time of a call, joules, and the most memory."""

    def __init__(self, task: Task, kind: str, seconds: float) -> None:
        self.task, self.kind, self.device = task, kind, task.device
        self.call = task.prepared(kind)
        self.calls, self.joules, self.peak, self.runs = 1, 0.0, 0, 0
        self.counter = harness.energy_meter(self.device == "cuda")[1]
        self.round(0)
        self.calls = max(1, round(seconds / self.round(0)[0]))
        self.joules, self.peak, self.runs = 0.0, 0, 0

    def round(self, _milliseconds: float) -> list[float]:
        """Seconds of a call."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with attention_by(self.task.model, self.kind):
            wait(self.device)
            before = self.counter() if self.counter else 0.0
            start = time.perf_counter()
            for _ in range(self.calls):
                self.call()
            wait(self.device)
            spent = time.perf_counter() - start
        self.joules += self.counter() - before if self.counter else 0.0
        self.runs += self.calls
        if self.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return [spent / self.calls]


def distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """RMS of the differences over RMS of what is expected."""
    pairs = zip(got, expected, strict=True)
    return [float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs]


def measure(row: Row, args: Any) -> dict[str, Any]:
    """What JSON says of a row."""
    torch.compiler.reset()  # FlexAttention is then compiled for this row's sizes, not for any
    task = TASKS[row.task](row, args.device, args.small)
    found: dict[str, Any] = {**asdict(row), "errors": {}, "left_out": {}}
    expected: list[torch.Tensor] = []
    contenders: dict[str, Contender] = {}

    def check(kind: str) -> None:
        nonlocal expected
        with attention_by(task.model, kind):
            results = task.results(kind)
        expected = expected or results
        if kind != "none":
            errors = found["errors"][kind] = distance(results, expected)
            if not max(errors) <= BOUND:
                raise ArithmeticError(f"wrong by {max(errors):.2g}")

    def prepare(kind: str) -> None:
        contenders[kind] = Contender(task, kind, args.block)

    for attempt in (check, prepare):  # all are checked on the same weights, before any trains them
        for kind in task.kinds():
            try:
                if kind not in found["left_out"]:
                    attempt(kind)
            except Exception as error:  # whatever keeps a contender from its row: the row goes on without it
                if kind == "tandem":
                    raise
                found["left_out"][kind] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            task.seen.clear()
            if args.device == "cuda":
                torch.cuda.empty_cache()
        if attempt is check:
            task.watch.remove()
    found["seconds"] = harness.in_turn(contenders, args.rounds, 0.0)
    for kind, c in contenders.items():
        if c.counter:
            found.setdefault("joules_per_token", {})[kind] = c.joules / c.runs / row.tokens
        if c.peak and row.task != "generation":  # there each contender's cache counts for all
            found.setdefault("peak_bytes", {})[kind] = c.peak
    return found


def shrunk(row: Row) -> Row:
    told = asdict(row) | {"seqlen": row.seqlen // 512, "chunk": row.chunk // 512, "batch": min(row.batch, 2)}
    return Row(**told | {"layers": 2, "new": 2})


def print_row(row: Row, found: dict[str, Any]) -> None:
    medians = {kind: statistics.median(seconds) for kind, seconds in found["seconds"].items()}
    print(row)
    for kind, seconds in medians.items():
        line = f"  {kind:7}{seconds * 1e3:11.2f} ms{row.tokens / seconds:12.0f} tokens/s"
        line += f"   Tandem {seconds / medians['tandem']:5.2f} times as fast"
        line += f"   attention {1 - medians['none'] / seconds:4.0%}" if "none" in medians else ""
        line += f"{found['peak_bytes'][kind] / 2**30:8.1f} GiB" if "peak_bytes" in found else ""
        if "joules_per_token" in found:
            line += f"{found['joules_per_token'][kind] * 1e3:9.3f} mJ/token"
        print(line + "".join(f" {e:.1e}" for e in found["errors"].get(kind, [])))
    for kind, why in found["left_out"].items():
        print(f"  {kind:7} left out: {why}")
    sys.stdout.flush()


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and inputs, to try the program")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no row begins")
    parser.add_argument("--only", default="", help="rows whose names, as printed, match this expression")
    parser.add_argument("--resume", type=Path, help="an earlier run's JSON, whose rows are kept")
    parser.add_argument("--rounds", type=int, default=4, help="of each contender, in turn")
    parser.add_argument("--block", type=float, default=0.4, help="seconds of a contender's round")
    args = parser.parse_args()
    end = time.monotonic() + args.budget
    model_shapes.register()
    document: dict[str, Any] = {
        **harness.origin(harness.device_name(args.device), args.commit),
        "transformers": transformers.__version__,
        "energy": harness.energy_meter(args.device == "cuda")[0],
        "rounds": args.rounds,
        "rows": [],
        "failed": {},
    }
    if args.resume:
        earlier = json.loads(args.resume.read_text())
        if any(earlier[name] != document[name] for name in ("device", "torch", "transformers")):
            raise SystemExit(f"bench: {args.resume} is of another device or release; start anew")
        document["rows"] = earlier["rows"]
    print(", ".join(str(document[name]) for name in ("device", "torch", "transformers", "commit", "energy")))
    done = [{name: row[name] for name in asdict(ROWS[0])} for row in document["rows"]]
    for row in map(shrunk, ROWS) if args.small else ROWS:
        if asdict(row) in done or not re.search(args.only, str(row)) or time.monotonic() > end:
            continue
        try:
            document["rows"].append(measure(row, args))
            print_row(row, document["rows"][-1])
        except Exception as error:  # Tandem's own failure; the rows behind it may do
            document["failed"][str(row)] = f"{type(error).__name__}: {error}".split("\n")[0]
            print(f"{row}: {document['failed'][str(row)]}", flush=True)
            if isinstance(error, torch.AcceleratorError):  # the GPU refuses all that follows
                end = 0.0
        harness.write_json(document, args.json)
    return 1 if document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
