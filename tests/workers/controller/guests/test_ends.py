"""The end of a guest process, while threads of the worker use its channels."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest
from tokenbus.workers.controller.guest_memory import GuestMemory, TenantMemory
from tokenbus.workers.controller.guests.channel import SHARED_BYTES, ChannelClosed
from tokenbus.workers.controller.guests.launcher import Spawned
from tokenbus.workers.controller.guests.process import GuestProcess

pytestmark = pytest.mark.process

CHANNELS = 150
"""Number of channels that no request uses. Closing them takes longer than waking a thread."""


@contextlib.contextmanager
def started(memory: TenantMemory) -> Iterator[GuestProcess]:
    """A process that reads no message."""
    here, there = socket.socketpair()
    with here, there, subprocess.Popen(["sleep", "600"]) as child:
        yield GuestProcess(Spawned(child.pid, os.pidfd_open(child.pid), here), memory)
        child.kill()


@pytest.mark.parametrize("attempt", range(5))
def test_a_process_is_killed_whose_requests_end_meanwhile(attempt: int) -> None:
    memory = GuestMemory(4 * CHANNELS * SHARED_BYTES)
    with started(memory.of("ann")) as process:
        reading = threading.Event()

        def read() -> None:
            with process.channel() as channel, contextlib.suppress(ChannelClosed):
                reading.set()
                channel.receive()

        thread = threading.Thread(target=read)
        thread.start()
        assert reading.wait(60)
        with contextlib.ExitStack() as free:
            for _ in range(CHANNELS):
                free.enter_context(process.channel())
        process.kill("a test ends it")
        thread.join(60)
        assert not thread.is_alive()
        assert process._channels == process._free == []
