"""Traces: W3C trace contexts, and the spans that a process exports if ``OTEL_*`` is set.

A request carries the ``traceparent`` of its client to all processes. When a process has ended its
part of the request, it creates one span for this part. The id of this span is computed from the
request's number and the name of the process. So a process can compute the id of its parent span,
which another process creates. OpenTelemetry (the extra ``otel``) is imported only if one of the
variables ``NAMED_BY`` is set.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .logs import about

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

log = logging.getLogger(__name__)

NAMED_BY = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
"""Any of these variables turns traces on, unless ``OTEL_TRACES_EXPORTER`` is ``none`` or
``OTEL_SDK_DISABLED`` is ``true``."""
PARENTS = {"broker": "", "gpu": "broker", "controller": "gpu"}
"""The key and the value are kinds of processes. The parent of a span of the first kind is a span of
the second kind. "" stands for the client."""
PROVIDER = "tokenbus"
"""``gen_ai.provider.name`` of all spans."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """A ``traceparent``: a trace, the calling span, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def parse(cls, text: str) -> TraceContext | None:
        """The context in a header; None if it is not valid."""
        found = _TRACEPARENT.fullmatch(text)
        if found is None:
            return None
        context = cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & 1))
        return context if context.trace_id and context.span_id else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


class Happened(NamedTuple):
    """An event within a span, and its time (of ``time.monotonic``)."""

    name: str
    at: float
    attributes: Mapping[str, AttributeValue]


class Tracing:
    """Exports the spans of one process."""

    def __init__(self, process: str) -> None:
        """Raises ImportError without the extra ``otel``."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own: dict[str, AttributeValue] = {
            "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
            "tokenbus.process": process,
        }
        named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not named and not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = f"tokenbus-{process}"
        self._resource = Resource.create(own)
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        self.provider: TracerProvider = TracerProvider(resource=self._resource)
        """The provider creates spans that stay open while other code runs, for example in a
        gateway. At exit, it exports the remaining spans."""
        self.provider.add_span_processor(self._processor)
        self._process = process

    def record(
        self,
        name: str,
        trace: str,
        request: int,
        began: float,
        attributes: Mapping[str, AttributeValue],
        events: Sequence[Happened] = (),
        error: str | None = None,
    ) -> None:
        """Records a span for this process's part of a request. Called when this part has ended.

        ``began`` and the times of events are times of ``time.monotonic``. The method does not
        raise exceptions.
        """
        context = TraceContext.parse(trace)
        if context is None or not context.sampled:
            return
        try:
            self._export(name, context, request, began, attributes, events, error)
        except Exception:
            log.exception("a span was not exported", extra=about(request))

    def _export(
        self,
        name: str,
        context: TraceContext,
        request: int,
        began: float,
        attributes: Mapping[str, AttributeValue],
        events: Sequence[Happened],
        error: str | None,
    ) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        now, clock = time.monotonic(), time.time_ns()

        def wall(at: float) -> int:
            return clock - int((now - at) * 1e9)

        def span(number: int, remote: bool) -> SpanContext:
            sampled = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(context.trace_id, number, remote, sampled)

        parent = PARENTS[self._process]
        over = span_id(context, request, parent) if parent else context.span_id
        self._processor.on_end(
            ReadableSpan(
                name,
                context=span(span_id(context, request, self._process), False),
                parent=span(over, True),
                resource=self._resource,
                attributes={"tokenbus.request": str(request), **attributes},
                events=[Event(e.name, dict(e.attributes), wall(e.at)) for e in events],
                kind=SpanKind.SERVER if not parent else SpanKind.INTERNAL,
                instrumentation_scope=InstrumentationScope("tokenbus"),
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
                start_time=wall(began),
                end_time=clock,
            )
        )


_active: Tracing | None = None


def start(process: str) -> Tracing | None:
    """If traces are on, creates the exporter of this process, which ``active`` then returns.
    ``process``: a key of ``PARENTS``, or ``gateway``. Called at the start of the process."""
    global _active
    if not wanted(os.environ):
        return None
    try:
        _active = Tracing(process)
    except ImportError as error:
        log.warning("no traces are exported: %s; pip install 'tokenbus[otel]'", error)
    return _active


def active() -> Tracing | None:
    """The exporter of this process; None if it exports nothing."""
    return _active


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether these variables turn traces on."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "") == "none":
        return False
    return any(environ.get(name) for name in NAMED_BY)


def span_id(context: TraceContext, request: int, process: str) -> int:
    """The id of a process's span of a request; every process can compute it."""
    text = f"{context.trace_id:032x} {request} {process}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1
