"""`tandem trace`: the timeline of an emulated CTA, as a table, a trace for Perfetto and a picture."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from program import ROOT, TANDEM

Run = Callable[..., subprocess.CompletedProcess]
RunJson = Callable[..., dict]

SHORT = ("--seqlen", 512)
SERIAL = ("--overlap", 0)


def spans_of(path: Path) -> dict[str, list[dict]]:
    """The spans of a trace by track, each with `begin`, `end` and `depth`. Every begin has its end, ends
    close the span that began last, and time never goes back."""
    document = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e.get("name") == "thread_name"}
    found: dict[str, list[dict]] = defaultdict(list)
    open_spans: dict[int, list[dict]] = defaultdict(list)
    now: dict[int, float] = defaultdict(float)
    for event in document["traceEvents"]:
        tid = event["tid"]
        if event["ph"] == "M":
            continue
        assert event["ph"] in "BE"
        assert event["ts"] >= now[tid]
        now[tid] = event["ts"]
        cycle = round(event["ts"] * 1000)
        if event["ph"] == "B":
            span = {**event, "begin": cycle, "depth": len(open_spans[tid])}
            open_spans[tid].append(span)
            found[names[tid]].append(span)
        else:
            open_spans[tid].pop()["end"] = cycle
    assert not any(open_spans.values()), "a begin has no end"
    return found


def test_a_trace_is_valid_and_its_spans_nest(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    printed = run("trace", *SHORT, "--out", path, "--json").stdout
    spans = spans_of(path)
    total = json.loads(printed)["cycles"]
    assert {"producer", "warpgroup 0", "warpgroup 1", "tensor cores", "TMA in flight 1"} <= set(spans)
    for track, those in spans.items():
        assert all(0 <= s["begin"] < s["end"] <= total for s in those), track
        assert all(s["args"]["cycles"] == s["end"] - s["begin"] for s in those)
    # Four blocks of keys: four softmaxes, and an epilogue behind them.
    for warpgroup in ("warpgroup 0", "warpgroup 1"):
        assert sum(s["name"] == "softmax" for s in spans[warpgroup]) == 4
        assert [s["name"] for s in spans[warpgroup] if s["depth"] == 0][-1] == "epilogue"
    # Each product of both warpgroups: 64 x 128 x 128 of S, and of O, take 512 cycles a block.
    products = sum(s["end"] - s["begin"] for s in spans["tensor cores"])
    assert products == 2 * 2 * 4 * 512
    assert {s["name"] for s in spans["tensor cores"]} == {"S = Q K", "O += P V"}
    assert all(s["depth"] == 0 for s in spans["tensor cores"])
    assert {s["name"] for t in spans if t.startswith("TMA") for s in spans[t]} == {"Q", "K", "V"}


def share_under_others(document: dict) -> float:
    groups = document["warpgroups"]
    return sum(g["softmax_under_others"] for g in groups) / sum(g["softmax"] for g in groups)


@pytest.mark.parametrize(("schedule", "most_without"), [((), 0.55), (SERIAL, 0.2)], ids=["overlap", "serial"])
def test_ping_pong_puts_softmax_under_the_other_warpgroups_products(
    run_json: RunJson, schedule: tuple, most_without: float
) -> None:
    """A softmax takes 1.6 times as long as the products of a block, so its share cannot be 1."""
    with_it = run_json("trace", *schedule)
    without = run_json("trace", *schedule, "--pingpong", 0)
    assert share_under_others(with_it) > 0.5
    assert share_under_others(without) < min(most_without, share_under_others(with_it) - 0.15)
    assert with_it["cycles"] < without["cycles"]
    assert any(w["for"] == "ping-pong" for w in with_it["waits"])
    assert not any(w["for"] == "ping-pong" for w in without["waits"])


def test_ping_pong_gives_the_tensor_cores_to_one_warpgroup_after_the_other(run: Run, tmp_path: Path) -> None:
    run("trace", *SERIAL, "--out", tmp_path / "t.json")
    turns = [s["args"]["detail"] for s in spans_of(tmp_path / "t.json")["tensor cores"]]
    changes = sum(a != b for a, b in zip(turns, turns[1:], strict=False))
    # Eight blocks and a last product each: a turn is two products.
    assert changes <= len(turns) // 2 + 2
    run("trace", *SERIAL, "--pingpong", 0, "--out", tmp_path / "t.json")
    mixed = [s["args"]["detail"] for s in spans_of(tmp_path / "t.json")["tensor cores"]]
    assert sum(a != b for a, b in zip(mixed, mixed[1:], strict=False)) > 4 * changes


def test_overlap_lets_a_warpgroups_own_products_run_beside_its_softmax(run_json: RunJson) -> None:
    overlapped, serial = run_json("trace", "--pingpong", 0), run_json("trace", "--pingpong", 0, *SERIAL)
    assert overlapped["cycles"] < serial["cycles"]
    assert overlapped["tensor_cores_busy"] == serial["tensor_cores_busy"]


def test_the_longest_wait_is_named(run: Run, run_json: RunJson) -> None:
    # With copies this slow every block of keys is waited for.
    slow = run_json("trace", *SHORT, "--cost", "copy_latency=20000")
    longest = slow["longest_wait"]
    assert longest["for"] in {"Q full", "K full", "V full"}
    assert longest["cycles"] >= 20000
    assert longest["track"] in {"warpgroup 0", "warpgroup 1"}
    # With slow products it is those.
    slow = run_json("trace", *SHORT, "--pingpong", 0, "--cost", "product_rate=64")
    assert slow["longest_wait"]["for"] == "own products"
    waits = [w for w in slow["waits"] if w["track"].startswith("warpgroup")]
    assert max(w["longest"] for w in waits) == slow["longest_wait"]["cycles"]
    assert [w["cycles"] for w in slow["waits"]] == sorted((w["cycles"] for w in slow["waits"]), reverse=True)
    assert "\nlongest wait  warpgroup" in run("trace", *SHORT).stdout


def test_a_picture_is_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.svg"
    run("trace", *SHORT, "--picture", path)
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"producer", "warpgroup 0", "warpgroup 1", "tensor cores", "longest wait"} <= set(texts)
    assert any("not a measurement" in t for t in texts)
    frames = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("stroke-width") == "2.5"]
    assert len(frames) == 1, "the longest wait has a frame"
    whole = len(list(root.iter()))
    run("trace", *SHORT, "--picture", path, "--from", 2000, "--to", 4000)
    assert 0 < len(list(ET.parse(path).getroot().iter())) < whole


@pytest.mark.parametrize(
    "arguments",
    [
        ("--head-dim", "64", "--seqlen", "300"),
        ("--head-dim", "64", "--pingpong", "0", "--seqlen", "256"),
        ("--head-dim", "256", "--seqlen", "256"),
        ("--head-dim", "256", "--pingpong", "0", "--seqlen", "256"),
        ("--causal", "--seqlen", "300", "--tiles", "2"),
        ("--seqlen", "1"),
    ],
    ids=" ".join,
)
def test_every_kernel_has_a_timeline(run: Run, tmp_path: Path, arguments: tuple) -> None:
    path = tmp_path / "trace.json"
    document = json.loads(run("trace", *arguments, "--out", path, "--json").stdout)
    spans = spans_of(path)
    assert document["longest_wait"]["cycles"] > 0
    consumers = 3 if "64" in arguments else 2
    for w in range(consumers):
        assert any(s["name"] == "epilogue" for s in spans[f"warpgroup {w}"])


@pytest.mark.parametrize("drawing", ["trace-forward.svg", "trace-serial.svg"])
def test_the_documentations_drawings_are_what_the_program_draws(
    run: Run, tmp_path: Path, drawing: str
) -> None:
    page = (ROOT / "docs/trace.md").read_text()
    (command,) = re.findall(rf"^tandem (trace .*--picture {drawing})$", page, re.MULTILINE)
    run(*command.split(), cwd=tmp_path)
    assert f"(drawings/{drawing})" in page
    assert (tmp_path / drawing).read_text() == (ROOT / "docs/drawings" / drawing).read_text()


def test_a_trace_is_the_same_at_each_run(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run("trace", *SHORT, "--out", tmp_path / f"{name}.json", "--picture", tmp_path / f"{name}.svg")
    for kind in ("json", "svg"):
        assert (tmp_path / f"a.{kind}").read_text() == (tmp_path / f"b.{kind}").read_text()


def test_without_a_gpu_its_clock_is_one_clear_error(run: Run, tmp_path: Path) -> None:
    """With one, the trace is as valid as the emulator's."""
    path = tmp_path / "trace.json"
    done = subprocess.run(
        [TANDEM, "trace", *map(str, SHORT), "--device", "gpu", "--out", path], capture_output=True, text=True
    )
    if done.returncode == 0:
        assert {"producer", "warpgroup 0", "products of 0"} <= set(spans_of(path))
        return
    assert done.returncode == 3
    assert done.stderr.startswith("tandem: ") and done.stderr.count("\n") == 1
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--head-dim", "96"), "no emulated kernel of --head-dim 96"),
        (("--seqlen", "0"), "--seqlen is 0"),
        (("--tiles", "65"), "--tiles is 65"),
        (("--cost", "speed=3"), "product_rate"),
        (("--cost", "barrier"), "NAME=CYCLES"),
        (("--cost", "barrier=0"), "NAME=CYCLES"),
        (("--cost", "barrier=1x"), "NAME=CYCLES"),
        (("--out", "trace.txt"), ".json"),
        (("--device", "cpu"), "emulator or gpu"),
        (("--device", "gpu", "--cost", "barrier=3"), "--cost changes the model"),
        (("--picture", "trace.png"), ".svg"),
        (("--from", "9", "--to", "9"), "--from must be less"),
        (("--out", "no/such/directory/trace.json"), "no/such/directory"),
    ],
)
def test_bad_input_is_one_clear_error(run: Run, tmp_path: Path, arguments: tuple, words: str) -> None:
    done = run("trace", *arguments, code=3 if "no/such" in arguments[-1] else 2, cwd=tmp_path)
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is written"
