"""A dialogue with tools in which a process of each role dies and the client leaves for a while: the
program receives each input once, and the client sees the messages and tokens of an undisturbed
run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client, Stream
from tokenbus.protocol.scripts import marked_script

from ..clients.dialogues import next_message
from ..processes import Bus, Process, until
from ..worlds.wire import Wire

pytestmark = pytest.mark.process

TURNS = 20
SCRIPT = b"""
async def main(ctx):
    for turn in range(20):
        ctx.send("turn %d" % turn)
        text = await ctx.receive()
        letters = await ctx.call("letters", text=text)
        await ctx.fixed("%s %d " % (text, letters))
        await ctx.gen(max_tokens=3)
    ctx.send("ended")
"""
TOOLS = """
def letters(text: str) -> int:
    return len(text)
"""
GRACE_S = 0.3
AWAY_S = 2.0
"""How long the client has no connection. Without ``keep_s``, the broker ends its streams after
``GRACE_S``."""


class System:
    """A bus with a process of each role, which can be killed and replaced."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self._file, self._log = folder / "dialogue_tools.py", folder / "tool.log"
        self._file.write_text(TOOLS)
        bus.start_all_roles()
        self.tool = self._start_tool()
        with bus.client() as client:
            client.upload_controller(marked_script(SCRIPT, "python"), "dialogue")
            until(lambda: _has_tools(client), 300.0, lambda: self.tool.log)

    def _start_tool(self) -> Process:
        arguments = ["tool", "serve", str(self._file)]
        environment = self.bus.environment
        return Process("tokenbus.clients.cli", self._log, environment, arguments=arguments)

    def replace_controller(self) -> None:
        self.bus.others.pop(1).kill()
        self.bus.start_other("controller")

    def replace_state(self) -> None:
        self.bus.others.pop(0).kill()
        self.bus.start_other("state")

    def replace_broker(self) -> None:
        self.bus.broker.kill()
        self.bus.start_broker()

    def replace_gpu(self) -> None:
        self.bus.workers.pop(0).kill()
        self.bus.start_worker()

    def replace_tool(self) -> None:
        """Returns when the broker knows the new worker. A call that the killed worker receives
        before the broker notices the kill would fail, as no call is passed twice."""
        self.tool.kill()
        with self.bus.client() as client:
            until(lambda: not _has_tools(client), 300.0, lambda: self.tool.log)
            self.tool = self._start_tool()
            until(lambda: _has_tools(client), 300.0, lambda: self.tool.log)


def _has_tools(client: Client) -> bool:
    return any(worker.tools for worker in client.status(timeout_s=60.0).workers)


@pytest.fixture
def system(processes: None, tmp_path: Path) -> Iterator[System]:
    with Bus(heartbeat_s=0.2, ping_s=0.3, expiry_s=10, session_grace_s=GRACE_S) as bus:
        system = System(bus, tmp_path)
        yield system
        system.tool.kill()


def begun(client: Client) -> Stream:
    """Begins the dialogue. If the stream is lost, the client does not send the request again."""
    return client.generate(
        "Hello. ", controller="dialogue", temperature=0.8, seed=3, max_tokens=400, retry_s=0
    )


def test_a_dialogue_goes_on_after_deaths_and_the_absence_of_its_client(system: System) -> None:
    with Wire(system.bus.front) as wire, Client(wire.front, keep_s=600.0) as client:

        def leave() -> None:
            wire.cut()
            time.sleep(AWAY_S)
            wire.mend()

        blows: dict[int, Callable[[], None]] = {
            2: system.replace_controller,
            5: system.replace_state,
            8: system.replace_broker,
            11: system.replace_gpu,
            14: system.replace_tool,
            17: leave,
        }
        streams = []
        for disturbed in (False, True):
            stream = begun(client)
            for turn in range(TURNS):
                assert next_message(stream) == f"turn {turn}"
                if disturbed and turn in blows:
                    blows[turn]()
                stream.send(f"text{turn}")
            [sequence] = stream.wait()
            streams.append((sequence.messages, sequence.tokens, sequence.error))
    assert streams[0] == streams[1]
    messages, _, error = streams[0]
    assert (messages, error) == ([*(f"turn {i}" for i in range(TURNS)), "ended"], None)
