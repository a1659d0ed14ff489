"""Records the broker's span of a traced request."""

from __future__ import annotations

from typing import Any

from ..protocol import tracing
from ..protocol.tracing import Happened
from .request import Request
from .worker import Worker


def record_span(request: Request, worker: Worker | None) -> None:
    """Records the broker's span of a traced request that has ended. ``worker``: the last worker of
    the request."""
    exporter = tracing.active()
    if exporter is None:
        return
    attributes: dict[str, Any] = {
        "tokenbus.worker": worker.name if worker is not None else "",
        "tokenbus.priority": request.priority,
        "tokenbus.client": request.session.client,
    }
    if request.model:
        attributes["gen_ai.request.model"] = request.model
    if request.fields.request_id:
        attributes["tokenbus.request_id"] = request.fields.request_id
    events = []
    if request.dispatched is not None:
        events.append(Happened("sent to its worker", request.dispatched, {}))
    name = f"route {request.type.decode()}"
    exporter.record(
        name, request.trace, request.id, request.arrived, attributes, events, request.error
    )
