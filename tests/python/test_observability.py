"""Prometheus, its rules and the dashboard; OpenTelemetry's spans."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tandem
from test_forward import qkv

metrics = pytest.importorskip("tandem.metrics", reason="prometheus_client is not installed")
tracing = pytest.importorskip("tandem.tracing", reason="opentelemetry-sdk is not installed")
from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def expressions() -> list[str]:
    """The dashboard's queries, for every job and instance."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = {"$job": ".*", "$instance": ".*", "$__rate_interval": "10s"}
    return [re.sub(r"\$\w+", lambda name: variables[name[0]], query) for query in queries]


def test_a_registry_serves_the_counters() -> None:
    q, k, v = qkv()
    registry = CollectorRegistry()
    counters = metrics.register(registry)

    def calls() -> float:
        return sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "tandem_calls_total" and sample.labels["operation"] == "forward"
        )

    before = calls()
    tandem.attention(q, k, v)
    assert calls() == before + 1
    registry.unregister(counters)
    assert calls() == 0


def test_queries_name_metrics_that_exist() -> None:
    served = set(re.findall(r"^# TYPE (\w+)", tandem._core.stats_text(), re.MULTILINE))
    for text in (*expressions(), (MONITORING / "alerts.yml").read_text()):
        named = set(re.findall(r"\btandem_\w+", text))
        assert named and named <= served, text


def test_alerts_are_rules_that_do_what_their_tests_say() -> None:
    promtool = needs("promtool")
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run([promtool, *command], cwd=MONITORING, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def serving() -> Iterator[str]:
    """host:port of examples/serve.py."""
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        address = re.search(r"http://(\S+)/metrics", server.stdout.readline())
        assert address
        yield address[1]
        server.terminate()


def test_prometheus_scrapes_a_server(serving: str, tmp_path: Path) -> None:
    """Counters arrive and grow, and every query of the dashboard is one that it answers."""
    prometheus = needs("prometheus")
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 500ms}}\nrule_files: [{MONITORING / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: serve, static_configs: [{{targets: ['{serving}']}}]}}]\n"
    )
    storage = ("--storage.tsdb.path", str(tmp_path / "data"), "--config.file", "prometheus.yml")
    command = [prometheus, *storage, "--web.listen-address", "127.0.0.1:0", "--log.format", "json"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr
        lines = (json.loads(line) for line in program.stderr)
        address = next(line["address"] for line in lines if line.get("msg") == "Listening on")
        assert any(line.get("msg", "").startswith("Server is ready") for line in lines)

        def query(expression: str) -> list[dict[str, Any]]:
            data = urllib.parse.urlencode({"query": expression}).encode()
            with urllib.request.urlopen(f"http://{address}/api/v1/query", data) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result

        def calls(operation: str) -> float:
            return sum(float(r["value"][1]) for r in query(f'tandem_calls_total{{operation="{operation}"}}'))

        try:
            end = time.monotonic() + 60
            while not query('sum(rate(tandem_calls_total{operation="forward"}[10s])) > 0'):
                assert time.monotonic() < end, query("up")
                time.sleep(0.2)
            assert calls("append") > 0 and calls("forward") > 0
            answered = [bool(query(expression)) for expression in expressions()]
            assert sum(answered) >= 5, answered  # those of kernels and errors have nothing to show here
            assert query('tandem_operations_total{job="serve", operation="forward"} > 0')
        finally:
            program.terminate()


@pytest.fixture
def spans() -> Iterator[tuple[trace.Tracer, InMemorySpanExporter]]:
    """A tracer of the caller's, and all spans that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.instrument(provider, every=1)
    yield provider.get_tracer("test"), exporter
    tracing.uninstrument()


def of_library(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name.startswith("tandem.")]


def test_a_call_is_a_span_in_its_callers(spans: tuple[trace.Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    q, k, v = qkv()
    with tracer.start_as_current_span("request") as request:
        tandem.attention(q, k, v, causal=True)
    (span,) = of_library(exporter)
    assert span.name == "tandem.forward" and span.parent and span.attributes
    assert span.parent.span_id == request.get_span_context().span_id
    assert span.start_time and span.end_time and span.end_time > span.start_time
    assert str(span.attributes["tandem.subject"]).startswith("forward f32 b")
    assert span.attributes["tandem.backend"] == "cpu" and span.attributes["tandem.kernel"] == "forward"
    assert "mask: causal" in str(span.attributes["tandem.plan"])


def test_calls_are_sampled_and_end_with_uninstrument(
    spans: tuple[trace.Tracer, InMemorySpanExporter],
) -> None:
    q, k, v = qkv()
    tracing.instrument(trace.NoOpTracerProvider(), every=10)
    tandem.attention(q, k, v)
    assert not of_library(spans[1])
    tracing.uninstrument()
    tandem.attention(q, k, v)
    assert not of_library(spans[1])
    for every in (0, -1):
        with pytest.raises(tandem.InvalidArgumentError, match=f"every is {every}; it must be at least 1"):
            tracing.instrument(every=every)


def test_records_have_their_callers_trace(
    spans: tuple[trace.Tracer, InMemorySpanExporter], caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = qkv()
    tandem.set_log_level("debug")
    try:
        with (
            caplog.at_level(logging.DEBUG, logger="tandem"),
            spans[0].start_as_current_span("request") as request,
        ):
            tandem.attention(q, k, v)
    finally:
        tandem.set_log_level("off")
    (record,) = caplog.records
    context = request.get_span_context()
    assert record.__dict__["otelTraceID"] == trace.format_trace_id(context.trace_id)
    assert record.__dict__["otelSpanID"] == trace.format_span_id(context.span_id)
