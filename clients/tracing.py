"""Adds request ids and trace contexts to a client's requests, and creates the client's spans.

A span is created if the program has set up OpenTelemetry. This module uses OpenTelemetry only if
the program has already imported it. Names follow OpenTelemetry's semantic conventions for
generative AI.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.messages import Generate, Score
from ..protocol.tracing import PROVIDER, TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from ..protocol.errors import TokenbusError
    from .results import GeneratedSequence


class Origin(NamedTuple):
    """The HTTP request that the current task of the gateway handles. The task's requests to the bus
    carry its ids."""

    request_id: str
    trace: str
    """The ``traceparent`` that the task received, or ``""``."""


origin: ContextVar[Origin | None] = ContextVar("tokenbus_origin", default=None)
"""The origin of the current task's requests. A client adds the origin to each request."""


class ClientSpan:
    """The span of one request of this client, from its call to the end of its stream."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, sequences: list[GeneratedSequence], error: TokenbusError | None) -> None:
        """Ends the span of a stream that has ended or will not be read any more."""
        span = self._span
        reasons = [s.finish_reason for s in sequences if s.finish_reason is not None]
        if reasons:
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if sequences:
            span.set_attribute("gen_ai.usage.input_tokens", sequences[0].prompt_tokens)
            generated = sum(len(s.tokens) for s in sequences)
            span.set_attribute("gen_ai.usage.output_tokens", generated)
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", str(error.code))
            span.set_status(Status(StatusCode.ERROR, error.message))
        span.end()


def identify(message: Generate | Score) -> ClientSpan | None:
    """Adds the request id of ``origin`` and a trace context to a request. If the program uses
    OpenTelemetry, this function creates a span, and the trace context is the span's. If it does
    not, the trace context is that of ``origin``. Returns the new span. Returns None if no span is
    recorded, or if the request already had a trace context."""
    given = origin.get()
    if given is not None and not message.request_id:
        message.request_id = given.request_id
    if message.trace:
        return None
    otel = sys.modules.get("opentelemetry.trace")
    if otel is not None:
        span = otel.get_tracer("tokenbus").start_span(
            _name(message), kind=otel.SpanKind.CLIENT, attributes=request_attributes(message)
        )
        context = span.get_span_context()
        if context.is_valid:
            sampled = bool(context.trace_flags & 1)
            message.trace = str(TraceContext(context.trace_id, context.span_id, sampled))
            return ClientSpan(span) if span.is_recording() else None
    if given is not None:
        message.trace = given.trace
    return None


def _name(message: Generate | Score) -> str:
    operation = "text_completion" if isinstance(message, Generate) else "score"
    return f"{operation} {message.model}".rstrip()


_OPTIONAL = {
    "top_k": 0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": None,
}


def request_attributes(message: Generate | Score) -> dict[str, Any]:
    """The attributes with which a span describes a request."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _name(message).split()[0],
        "gen_ai.provider.name": PROVIDER,
    }
    if message.model:
        attributes["gen_ai.request.model"] = message.model
    if isinstance(message, Score):
        return attributes
    attributes["gen_ai.request.max_tokens"] = message.max_tokens
    attributes["gen_ai.request.temperature"] = message.temperature
    for name, default in _OPTIONAL.items():
        value = getattr(message, name)
        if value != default:
            attributes[f"gen_ai.request.{name}"] = value
    stops = [stop for stop in message.stop if isinstance(stop, str)]
    if stops:
        attributes["gen_ai.request.stop_sequences"] = stops
    if message.n != 1:
        attributes["gen_ai.request.choice.count"] = message.n
    if message.controller:
        attributes["tokenbus.controller"] = message.controller
    return attributes
