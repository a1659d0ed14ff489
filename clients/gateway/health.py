"""``/live``, ``/ready`` and ``/health``: for load balancers and Kubernetes.

``/live`` is 200 while the process lives. ``/ready`` and ``/health`` are 503 while the gateway
drains, while the broker does not answer, and while no worker serves a model.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...protocol.errors import TokenbusError
from .context import Gateway, gateway_of
from .json import json_response
from .openapi import Operation

ASK_S = 2.0
"""How long the broker may take to answer, in seconds."""


def routes() -> list[BaseRoute]:
    """The three paths."""
    return [
        Route("/live", live, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/health", ready, methods=["GET"]),
    ]


def operations() -> list[Operation]:
    """These paths, as the OpenAPI document describes them."""
    return [
        Operation("get", path, summary, "health")
        for path, summary in (
            ("/live", "200 while the process lives"),
            ("/ready", "200 if requests are served"),
            ("/health", "As /ready"),
        )
    ]


async def live(request: Request) -> Response:
    """200: the process answers."""
    return json_response({"status": "live"})


async def ready(request: Request) -> Response:
    """200 if requests are served; 503, with the reason, if not."""
    gateway = gateway_of(request)
    gateway.probed = True
    reason = await why_not_ready(gateway)
    if gateway.draining:
        gateway.drain_seen.set()
    if reason is not None:
        return json_response({"status": "unavailable", "reason": reason}, 503)
    return json_response({"status": "ready"})


async def why_not_ready(gateway: Gateway) -> str | None:
    """Why requests are not served now; None if they are."""
    if gateway.draining:
        return "the gateway is draining"
    try:
        status = await gateway.client.status(timeout_s=ASK_S)
    except TokenbusError as error:
        return f"the broker does not answer: {error.message}"
    serving = [w for w in status.workers if w.role == "gpu" and w.state == "ready"]
    if not serving:
        return "no GPU worker is ready"
    return None
