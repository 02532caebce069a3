"""Spans of OpenTelemetry for calls and compilations: ``pip install tandem-attention[tracing]``."""

from __future__ import annotations

import logging
import time

from opentelemetry import trace

from tandem import _core
from tandem._errors import InvalidArgumentError

__all__ = ["instrument", "uninstrument"]

_logger = logging.getLogger("tandem")


def instrument(tracer_provider: trace.TracerProvider | None = None, *, every: int = 100) -> None:
    """Makes spans of what the library does, as children of the span that the caller is in.

    A span "tandem.kernel" is a GPU kernel's first use, compilation included. "tandem.forward",
    "tandem.backward", "tandem.append", "tandem.merge" and "tandem.quantize" are calls, from their launch to
    their return; a GPU's work is queued then. Attributes have the shapes, the kernel and the plan. Records of
    ``logging.getLogger("tandem")`` get ``otelTraceID`` and ``otelSpanID`` of the caller's span.

    Args:
      tracer_provider: whose spans they are; the global one by default.
      every: of each thread's calls the first and every so many more are spans. A span costs some 20 us.

    Raises:
      InvalidArgumentError: every is below 1.
    """
    if every < 1:
        raise InvalidArgumentError(f"every is {every}; it must be at least 1: uninstrument() ends all spans")
    tracer = trace.get_tracer("tandem", _core.version(), tracer_provider)

    def write(
        operation: str, subject: str, backend: str, family: str, kernel: str, plan: str, nanoseconds: int
    ) -> None:
        end = time.time_ns()
        named = {"origin": kernel} if operation == "kernel" else {"kernel": kernel, "plan": plan}
        values = {"subject": subject, "backend": backend, "family": family, **named}
        span = tracer.start_span(
            f"tandem.{operation}",
            attributes={f"tandem.{name}": value for name, value in values.items() if value},
            start_time=end - nanoseconds,
        )
        span.end(end_time=end)

    _core.set_events(every, write)
    _logger.addFilter(_add_trace)


def uninstrument() -> None:
    """Ends what `instrument` began."""
    _core.set_events(0, None)
    _logger.removeFilter(_add_trace)


def _add_trace(record: logging.LogRecord) -> bool:
    """Gives a record the names that OpenTelemetry's own instrumentation of logging does."""
    context = trace.get_current_span().get_span_context()
    record.otelTraceID = trace.format_trace_id(context.trace_id)
    record.otelSpanID = trace.format_span_id(context.span_id)
    return True
