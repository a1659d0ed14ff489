"""The tools of a real MCP server, which runs as a process."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.tool.functions import Served
from tokenbus.workers.tool.mcp_server import McpServer
from tokenbus.workers.tool.worker import running_loop

pytestmark = pytest.mark.process

LONG_S = 300.0
SERVER = '''
import os
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b

@server.tool()
def point(x: int) -> dict[str, int]:
    return {"x": x, "y": 0}

@server.tool()
def fail() -> str:
    raise ValueError("no luck")

@server.tool()
def die() -> str:
    os._exit(3)

server.run("stdio")
'''


class Started:
    """A server, its tools, and the reason why it has ended."""

    def __init__(self, file: Path) -> None:
        self.loop = running_loop()
        self.ended: list[str] = []
        command = shlex.join([sys.executable, str(file)])
        server = McpServer(command, 5.0, self.ended.append)
        self.tools: dict[str, Served] = server.start(self.loop)

    def call(self, name: str, arguments: bytes = b"{}") -> Any:
        made = self.tools[name].call(arguments, lambda function: pytest.fail("runs on a thread"))
        return asyncio.run_coroutine_threadsafe(made, self.loop).result(LONG_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    started = Started(file)
    yield started
    started.loop.call_soon_threadsafe(started.loop.stop)


def test_a_server_lists_its_tools(server: Started) -> None:
    assert sorted(server.tools) == ["add", "die", "fail", "point"]
    info = server.tools["add"].info
    assert (info.description, info.timeout_s) == ("Adds.", 5.0)
    assert info.parameters["required"] == ["a"]


def test_results_are_values(server: Started) -> None:
    assert server.call("add", b'{"a":40,"b":2}') == 42
    assert server.call("point", b'{"x":3}') == {"x": 3, "y": 0}


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("fail", b"{}", "the tool 'fail' failed: "),
        ("add", b'{"a":"x"}', "the tool 'add' failed: "),
        ("add", b"[", "the arguments of the tool 'add' are not valid"),
    ],
)
def test_errors_are_raised(server: Started, name: str, arguments: bytes, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        server.call(name, arguments)


def test_the_end_of_the_server_is_reported(server: Started) -> None:
    with pytest.raises(RequestError, match="the tool 'die' failed"):
        server.call("die")
    assert server.ended == ["the MCP server has ended"]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("", "the command of the MCP server is empty"),
        ('"', "is not a valid command"),
        ("/nowhere/at-all", "did not start"),
        ("false", "the MCP server 'false' did not start: Connection closed"),
    ],
)
def test_a_server_that_cannot_start_is_refused(command: str, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        McpServer(command, 5.0, lambda why: None).start(running_loop())
