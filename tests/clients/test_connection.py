"""An error that ends a client's connection for good also ends the waits of its callers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..processes import Bus

pytestmark = pytest.mark.process

TERMINATED = """
import sys, threading, zmq
from tokenbus.clients import Client, TokenbusError

client = Client(sys.argv[1])
stream = client.generate("def add(a, b):", max_tokens=900, ignore_eos=True, n=32)
entries = iter(stream)
next(entries)
threading.Thread(target=zmq.Context.instance().term, daemon=True).start()
try:
    for _ in entries:
        pass
except TokenbusError as error:
    print(type(error).__name__, error)
try:
    client.status()
except RuntimeError as error:
    print(type(error).__name__, error)
"""

ASYNCHRONOUS = """
import asyncio, sys, threading, zmq
from tokenbus.clients import AsyncClient, TokenbusError

async def main():
    client = AsyncClient(sys.argv[1])
    stream = client.generate("def add(a, b):", max_tokens=900, ignore_eos=True, n=32)
    entries = aiter(stream)
    await anext(entries)
    threading.Thread(target=zmq.Context.instance().term, daemon=True).start()
    try:
        async for _ in entries:
            pass
    except TokenbusError as error:
        print(type(error).__name__, error)

asyncio.run(main())
"""

FORKED = """
import os, sys
from tokenbus.clients import Client

client = Client(sys.argv[1])
client.status()
child = os.fork()
if child == 0:
    try:
        client.status()
    except RuntimeError as error:
        print(type(error).__name__, error, flush=True)
    client.close()
    os._exit(0)
os.waitpid(child, 0)
print(len(client.status().workers))
"""


def output(code: str, bus: Bus) -> list[str]:
    """The output lines of a program. Some programs end the ZeroMQ context, which all sockets of a
    process share, so each program runs in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", code, bus.front],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_terminated_context_ends_a_stream_that_is_read(bus: Bus) -> None:
    reading, later = output(TERMINATED, bus)
    assert reading.startswith("ConnectionLostError")
    assert "context was terminated" in reading
    assert later.startswith("RuntimeError")
    assert "context was terminated" in later


def test_a_terminated_context_ends_an_asynchronous_stream_too(bus: Bus) -> None:
    [line] = output(ASYNCHRONOUS, bus)
    assert line.startswith("ConnectionLostError")
    assert "context was terminated" in line


def test_a_forked_process_cannot_use_its_parent_s_client(bus: Bus) -> None:
    child, parent = output(FORKED, bus)
    assert child.startswith("RuntimeError")
    assert "new client in the child" in child
    assert parent == "1"
