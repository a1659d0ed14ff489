"""``/live``, ``/ready``, ``/health`` and ``/health_generate``, for load balancers and Kubernetes.

``/live`` returns 200 as long as the process runs. The other paths return 503 if the gateway drains,
if the broker does not answer, or if no GPU worker is ready.
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
"""Maximum time to wait for the broker's answer, in seconds."""


def routes() -> list[BaseRoute]:
    """The routes of the health checks."""
    return [
        Route("/live", live, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/health", ready, methods=["GET"]),
        Route("/health_generate", ready, methods=["GET"]),
    ]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    return [
        Operation("get", path, summary, "health")
        for path, summary in (
            ("/live", "200 while the process runs"),
            ("/ready", "200 if requests are served"),
            ("/health", "As /ready"),
            ("/health_generate", "As /ready; SGLang's path"),
        )
    ]


async def live(request: Request) -> Response:
    """Answers 200."""
    return json_response({"status": "live"})


async def ready(request: Request) -> Response:
    """Answers 200 if requests are served, and 503 with the reason if they are not."""
    gateway = gateway_of(request)
    gateway.probed = True
    reason = await why_not_ready(gateway)
    if gateway.draining:
        gateway.drain_seen.set()
    if reason is not None:
        return json_response({"status": "unavailable", "reason": reason}, 503)
    return json_response({"status": "ready"})


async def why_not_ready(gateway: Gateway) -> str | None:
    """The reason why requests are not served; None if they are served."""
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
