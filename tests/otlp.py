"""A receiver of OpenTelemetry spans. Like a collector, it receives OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(NamedTuple):
    """A span, and the service that sent it. ``service`` ends with ``(client)`` if the span is of
    the kind CLIENT. ``start`` and ``end`` are in nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    start: int
    end: int


class Receiver:
    """Listens on a random port, and receives spans on separate threads."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, trace_id: str) -> dict[str, Received]:
        """The last span of each ``service`` in a trace."""
        return {span.service: span for span in list(self.spans) if span.trace_id == trace_id}

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            self.spans += [
                Received(
                    service if span.kind != 3 else f"{service} (client)",
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    _values(span.attributes),
                    [(event.name, _values(event.attributes)) for event in span.events],
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )
                for scope in group.scope_spans
                for span in scope.spans
            ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
