"""The outermost layer of the gateway. It gives each request an id, and counts, traces and logs the
request."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...protocol import tracing
from ...protocol.logs import task_ids
from ...protocol.metrics import OTHER, REQUEST_S, Histogram, Series
from ...protocol.tracing import TraceContext
from ..tracing import Origin, origin
from .users.idempotency import current_named
from .users.turns import current_user

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Matches the values of ``x-request-id`` that the gateway accepts from a client."""
PROBES = frozenset({"/live", "/ready", "/health", "/health_generate", "/metrics"})
"""Paths that load balancers and Prometheus poll. Requests for these paths are logged at the level
``debug`` and are not traced."""
PART_BYTES = 64 * 1024
"""Maximum number of bytes of an answer that are sent at once. The next part is sent when the client
has read most of the buffered parts."""
MAX_SHOWN_PATH = 256
"""Maximum number of characters of a request's path in the log and in spans. A path may have 64 KiB,
and a client without an API key could otherwise fill all files of the log with some 600 requests."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Counts:
    """The HTTP metrics of a gateway process."""

    def __init__(self) -> None:
        self._name = os.environ.get("SUPERVISOR_PROCESS_NAME") or f"gateway-{os.getpid()}"
        self._answered: dict[tuple[str, str, str], int] = {}
        self._durations: dict[str, Histogram] = {}
        self.in_progress = 0
        self.websockets = 0

    def answered(self, method: str, path: str, status: int, duration_s: float) -> None:
        """Counts an answered request; ``path`` is the path of its route."""
        key = (method if method in METHODS else OTHER, path, str(status))
        self._answered[key] = self._answered.get(key, 0) + 1
        histogram = self._durations.get(path)
        if histogram is None:
            histogram = self._durations[path] = Histogram.over(REQUEST_S)
        histogram.observe(duration_s)

    def series(self) -> list[Series]:
        """All metrics. The label ``gateway`` distinguishes the processes that share a port."""
        own = {"gateway": self._name}
        found = [
            Series("http_requests_in_progress", own, self.in_progress),
            Series("websockets", own, self.websockets),
        ]
        for (method, path, status), count in self._answered.items():
            labels = {"method": method, "path": path, "status": status, **own}
            found.append(Series("http_requests", labels, count))
        for path, histogram in self._durations.items():
            labels = {"path": path, **own}
            found.append(Series("http_request_duration_seconds", labels, histogram=histogram))
        return found


class Traffic:
    """ASGI middleware around the whole application, including error handlers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, one WebSocket, or the lifespan."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = scope["app"].state.gateway
        counts: Counts = gateway.traffic
        request = _Request(scope)
        began = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", request.id)
                if gateway.draining:
                    # Because of this header, the client opens a new connection for its next
                    # request. The new connection reaches another process.
                    headers["connection"] = "close"
            elif len(message.get("body", b"")) > PART_BYTES:
                message = await _sent_in_parts(message, send)
            await send(message)

        counts.in_progress += 1
        if scope.get("client") is not None:
            current_user.set(scope["client"][0])
        try:
            with request, gateway.shares.request(), gateway.programs.request(request.id):
                await self._app(scope, receive, sending)
        finally:
            named = current_named.get()
            if named is not None:
                current_named.set(None)
                await named.close(gateway.shares.leaving)
            counts.in_progress -= 1
            duration_s = time.perf_counter() - began
            path = route_path(scope)
            counts.answered(scope["method"], path, status, duration_s)
            request.end(path, status, duration_s)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts: Counts = scope["app"].state.gateway.traffic
        request = _Request(scope)
        counts.websockets += 1
        if scope.get("client") is not None:
            current_user.set(scope["client"][0])
        try:
            with request:
                await self._app(scope, receive, send)
        finally:
            counts.websockets -= 1
            request.end(route_path(scope), None, None)


async def _sent_in_parts(message: Message, send: Send) -> Message:
    """Sends a long body in parts. Returns an empty message, which the caller sends after the body.

    Because of the empty message, the request ends only when the client has read most of the body.
    Until then, the body counts towards the user's share.
    """
    body = message["body"]
    for at in range(0, len(body), PART_BYTES):
        part = bytes(body[at : at + PART_BYTES])
        await send({"type": "http.response.body", "body": part, "more_body": True})
    return {**message, "body": b""}


class _Request:
    """The id and the trace span of one HTTP request or WebSocket. In its ``with`` block, the bus
    client's calls carry this id and the client's trace context."""

    def __init__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._scope = scope
        self._probe = scope["path"] in PROBES
        self._method = scope.get("method", "WEBSOCKET")
        text = headers.get("traceparent", "")
        context = TraceContext.parse(text)
        self._trace = text if context is not None else ""
        self._span = self._started(headers)
        if self._span is not None:
            own = self._span.get_span_context()
            context = TraceContext(own.trace_id, own.span_id, bool(own.trace_flags & 1))
        given = headers.get("x-request-id", "")
        if REQUEST_ID.fullmatch(given):
            self.id = given
        else:
            self.id = f"{context.trace_id:032x}" if context else secrets.token_hex(16)
        self._ids = self.id, f"{context.trace_id:032x}" if context else ""

    def _started(self, headers: Headers) -> Span | None:
        """A new span for the request. None if this process does not export spans, or if the request
        is a probe."""
        exporter = tracing.active()
        if exporter is None or self._probe:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return exporter.provider.get_tracer("tokenbus.gateway").start_span(
            self._method,
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": self._method,
                "url.path": _shown(self._scope["path"]),
            },
        )

    def __enter__(self) -> None:
        self._tokens = origin.set(Origin(self.id, self._trace)), task_ids.set(self._ids)
        self._attached: Any = None
        if self._span is not None:
            from opentelemetry import context, trace

            self._attached = context.attach(trace.set_span_in_context(self._span))

    def __exit__(self, *_: object) -> None:
        origin.reset(self._tokens[0])
        task_ids.reset(self._tokens[1])
        if self._attached is not None:
            from opentelemetry import context

            context.detach(self._attached)

    def end(self, path: str, status: int | None, duration_s: float | None) -> None:
        """Logs the end of the request and ends its span."""
        extra = dict(zip(("request_id", "trace_id"), self._ids, strict=True))
        if status is None or duration_s is None:
            log.info("WebSocket at %s closed", path, extra=extra)
        else:
            level = logging.DEBUG if self._probe else logging.INFO
            shown = (self._method, _shown(self._scope["path"]), status, 1000 * duration_s)
            log.log(level, "%s %s %d, %.0f ms", *shown, extra=extra)
        span = self._span
        if span is None:
            return
        span.update_name(f"{self._method} {path}")
        span.set_attribute("http.route", path)
        span.set_attribute("tokenbus.request_id", self.id)
        if status is not None:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                from opentelemetry.trace import Status, StatusCode

                span.set_status(Status(StatusCode.ERROR))
        span.end()


def _shown(path: str) -> str:
    """A path for the log and for spans, shortened if it is long."""
    return path if len(path) <= MAX_SHOWN_PATH else path[:MAX_SHOWN_PATH] + "…"


def route_path(scope: Scope) -> str:
    """The path of a request's route, such as ``/v1/models/{model}``. Metrics have this path as a
    label. With the requests' own paths as labels, there would be too many series."""
    if "endpoint" not in scope:
        return OTHER
    path: str = scope["path"]
    for name, value in scope.get("path_params", {}).items():
        head, found, tail = path.rpartition(f"/{value}")
        path = f"{head}/{{{name}}}{tail}" if found else path
    return path
