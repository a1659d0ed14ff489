"""Tools in a whole system: the command line, a script that calls tools, and a tool worker that
dies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenbus.protocol.scripts import marked_script
from websockets.sync.client import connect

from ...clients.test_cli import tokenbus
from ...processes import Bus, Gateway, Process, until

TOOLS = """
import os

from tokenbus.workers.tool import tool

@tool
def add(a: int, b: int = 1) -> int:
    return a + b

@tool
async def die() -> None:
    os._exit(3)
"""
SCRIPT = b"""
async function main(ctx) {
  await ctx.fixed(`${await ctx.call("add", { a: 40, b: 2 })}`);
  await ctx.gen({ regex: "[0-9]{2}" });
  for (const [name, given] of [["add", { a: "x" }], ["nope", {}], ["die", {}]])
    try {
      await ctx.call(name, given);
    } catch (error) {
      ctx.log(error.message);
    }
}
"""


@pytest.fixture
def tool(steered: Bus, tmp_path: Path) -> Iterator[Process]:
    """A tool worker of the fixture ``steered``, started by ``tokenbus tool serve``."""
    file = tmp_path / "system_tools.py"
    file.write_text(TOOLS)
    arguments = ["tool", "serve", str(file)]
    process = Process(
        "tokenbus.clients.cli", tmp_path / "tool.log", steered.environment, arguments=arguments
    )
    try:
        with steered.client() as client:
            until(
                lambda: any(w.tools for w in client.status(timeout_s=60.0).workers),
                300.0,
                lambda: process.log,
            )
        yield process
    finally:
        process.kill()


def test_a_script_calls_tools_and_catches_their_errors(steered: Bus, tool: Process) -> None:
    shown = tokenbus(steered, "status").stdout
    assert re.search(r"^tool-\S+ +tool +ready +add, die ", shown, re.MULTILINE)
    with steered.client() as client:
        module = client.upload_controller(marked_script(SCRIPT, "javascript")).module
        stream = client.generate("Q: ", controller=module, max_tokens=40, temperature=0.0)
        [sequence] = stream.wait()
    assert sequence.error is None
    assert sequence.text[:2] == "42"
    assert sequence.logs.splitlines() == [
        "the arguments of the tool 'add' are not valid: Expected `int`, got `str` - at `$.a`",
        "no worker serves the tool 'nope'; the served tools: add, die",
        "the worker of the tool 'die' was lost during the call; the tool may have done its work, "
        "and is not called again",
    ]
    assert tool.wait() == 3


CALL = {
    "controller": "gh:microsoft/aici/jsctrl",
    "controller_arg": 'async function main(ctx) { await ctx.call("add", { a: 1 }); }',
}


def test_the_users_of_a_gateway_may_not_call_tools_by_default(
    gateway: Gateway, tool: Process
) -> None:
    answer = httpx.post(f"{gateway.url}/v1/run", json={**CALL, "prompt": ""}, timeout=120.0)
    assert "may not call the tool 'add'" in answer.text


def test_a_websocket_without_hello_may_not_call_tools_by_default(
    gateway: Gateway, tool: Process
) -> None:
    with connect(gateway.ws_url) as socket:
        request = {**CALL, "stream_id": 1, "prompt": [263], "max_tokens": 4}
        socket.send(f"GENERATE {json.dumps(request)}")
        answer = socket.recv(120.0)
        while '"finish_reason":"' not in str(answer):
            answer = socket.recv(120.0)
    assert "may not call the tool 'add'" in str(answer)
