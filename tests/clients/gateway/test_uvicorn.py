"""The installed uvicorn has the internals that the gateway overrides or uses.

A release of uvicorn may change them. Then check the gateway's code before pyproject.toml allows
the release.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import uvicorn
from tokenbus.clients.gateway.connections.http_protocol import BoundedHttp
from tokenbus.clients.gateway.connections.server import GatewayServer
from tokenbus.clients.gateway.connections.websocket_protocol import BoundedWebSocket
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

PROTOCOL = {
    "connection_lost": ["exc"],
    "connection_made": ["transport"],
    "data_received": ["data"],
    "eof_received": [],
    "handle_websocket_upgrade": [],
    "on_body": ["body"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_message_begin": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "pause_writing": [],
    "resume_writing": [],
    "send_400_response": ["msg"],
}
"""Methods of ``HttpToolsProtocol`` that ``BoundedHttp`` overrides, with their parameters."""

WEBSOCKET = {
    "connection_lost": ["exc"],
    "connection_made": ["transport"],
    "data_received": ["data"],
    "eof_received": [],
    "handle_bytes": ["event"],
    "handle_cont": ["event"],
    "handle_ping": [],
    "handle_pong": ["event"],
    "handle_text": ["event"],
    "keepalive_timeout": [],
    "pause_writing": [],
    "resume_writing": [],
    "run_asgi": [],
    "send_receive_event_to_app": [],
}
"""Methods of ``WebSocketsSansIOProtocol`` that ``BoundedWebSocket`` overrides."""

SERVER = {
    "handle_exit": ["sig", "frame"],
    "serve": ["sockets"],
    "shutdown": ["sockets"],
    "startup": ["sockets"],
}
"""Methods of ``uvicorn.Server`` that ``GatewayServer`` overrides."""

ATTRIBUTES = {
    HttpToolsProtocol: [
        "app",
        "config",
        "connections",
        "cycle",
        "flow",
        "loop",
        "parser",
        "pipeline",
        "transport",
        "url",
    ],
    FlowControl: ["write_paused"],
    RequestResponseCycle: ["response_complete", "response_started"],
    WebSocketsSansIOProtocol: [
        "close_sent",
        "conn",
        "frames",
        "handle_parser_exception",
        "loop",
        "scope",
        "writable",
    ],
    uvicorn.Server: ["config", "force_exit", "lifespan", "server_state", "servers", "should_exit"],
    ServerState: ["connections"],
    uvicorn.Config: ["http_protocol_class", "loaded_app", "proxy_headers", "ssl"],
}
"""Attributes that the gateway reads or sets."""


def overridden(own: type, base: type) -> set[str]:
    return {name for name in vars(own) if name in dir(base) and not name.startswith("__")}


@pytest.mark.parametrize(
    ("own", "base", "methods"),
    [
        (BoundedHttp, HttpToolsProtocol, PROTOCOL),
        (BoundedWebSocket, WebSocketsSansIOProtocol, WEBSOCKET),
        (GatewayServer, uvicorn.Server, SERVER),
    ],
)
def test_the_methods_that_are_overridden_are_there_and_take_the_same(
    own: type, base: type, methods: dict[str, list[str]]
) -> None:
    assert overridden(own, base) == set(methods)
    [node] = ast.parse(inspect.getsource(base)).body
    # The methods are read from the source file, because sse-starlette, which other tests import,
    # replaces a method of the class.
    assert isinstance(node, ast.ClassDef)
    found = {
        one.name: one
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name, parameters in methods.items():
        assert [argument.arg for argument in found[name].args.args][1:] == parameters, name


def test_uvicorn_pauses_reading_through_the_transport_that_it_was_given() -> None:
    assert "FlowControl(transport)" in inspect.getsource(HttpToolsProtocol.connection_made)
    assert "self._transport.pause_reading()" in inspect.getsource(FlowControl)
    assert "self.transport.pause_reading()" in inspect.getsource(WebSocketsSansIOProtocol)


@pytest.mark.parametrize(("owner", "names"), ATTRIBUTES.items())
def test_the_attributes_that_are_used_are_there(owner: type, names: list[str]) -> None:
    source = inspect.getsource(owner)
    missing = [n for n in names if not re.search(rf"\b(self\.{n}\b|def {n}\b|{n}:)", source)]
    assert not missing


def test_the_package_takes_no_release_of_uvicorn_that_was_not_looked_at() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    needed = project["project"]["optional-dependencies"]["gateway"]
    [uvicorn_needed] = [one for one in needed if one.startswith("uvicorn")]
    bound = re.search(r"<(\d+)\.(\d+)$", uvicorn_needed)
    assert bound is not None
    installed = tuple(int(part) for part in uvicorn.__version__.split(".")[:2])
    assert installed < (int(bound[1]), int(bound[2]))
