"""The log lines of requests."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.responses import Response
from tokenbus.clients.gateway.traffic import MAX_SHOWN_PATH, Counts, Traffic
from tokenbus.clients.gateway.users.open_programs import OpenPrograms
from tokenbus.clients.gateway.users.user_shares import UserShares


def test_a_long_path_is_logged_shortened(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenbus.clients.gateway.traffic"):
        anyio.run(_request, "/" + "x" * 60_000)
        anyio.run(_request, "/v1/models")
    long, short = (record.getMessage() for record in caplog.records)
    assert long.startswith("GET /" + "x" * (MAX_SHOWN_PATH - 1) + "… 200, ")
    assert short.startswith("GET /v1/models 200, ")


async def _request(path: str) -> None:
    """A request with a path, which is answered by an empty response."""
    gateway = SimpleNamespace(
        traffic=Counts(), shares=UserShares(1), programs=OpenPrograms(), draining=False
    )
    app: Any = SimpleNamespace(state=SimpleNamespace(gateway=gateway))
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "app": app}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        pass

    await Traffic(Response())(scope, receive, send)
