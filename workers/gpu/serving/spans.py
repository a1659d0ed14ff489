"""The OpenTelemetry span of a GPU worker for a traced request."""

from __future__ import annotations

from typing import Any

from ....protocol import tracing
from ....protocol.tracing import PROVIDER, Happened
from .streams import Stream


def record_span(stream: Stream, reason: str, error: str | None) -> None:
    """Records the span of an ended stream with a trace. Names follow OpenTelemetry's conventions
    for generative AI."""
    exporter = tracing.active()
    if exporter is None:
        return
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": stream.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": stream.named,
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.output_tokens": stream.num_tokens,
    }
    events = []
    usage = stream.usage
    if usage is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached or 0
        if usage.admitted_at is not None:
            events.append(Happened("admitted to the batch", usage.admitted_at, {}))
            attributes["gen_ai.latency.time_in_queue"] = usage.admitted_at - stream.arrived
    if stream.first_at:
        events.append(Happened("first token", stream.first_at, {}))
        attributes["gen_ai.latency.time_to_first_token"] = stream.first_at - stream.arrived
    name = f"{stream.operation} {stream.named}"
    # The broker's span contains the wait at the broker.
    exporter.record(name, stream.trace, stream.request, stream.received, attributes, events, error)
