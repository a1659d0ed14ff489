"""A system whose clock jumps, whose disk becomes full, or whose file descriptors run out."""

from __future__ import annotations

import contextlib
import mmap
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenbus.clients import Client
from tokenbus.clients.client import Stream

from ..processes import Bus, Gateway, Process
from ..workers.controller.wasm.hostile.guests import FREE, call, guest
from .reader import BOUND_S, Reader

DESCRIPTORS = 64
PROMPT = "def add(a, b):"
TOKENS = 300
COUNTS = guest(
    mid=f"""(drop {call("var_append", 512, 4, 512, 1, -1, FREE)})
      {call("log", FREE, 1)}"""
)
"""A guest that appends a byte to a variable in each round, and logs the lowest byte of the new
version."""


def limit(process: Process, kind: int, soft: int) -> None:
    """Sets a soft limit of a running process."""
    _, hard = resource.prlimit(process.pid, kind)
    resource.prlimit(process.pid, kind, (soft, hard))


@contextlib.contextmanager
def limited(process: Process, kind: int, soft: int) -> Iterator[None]:
    """Sets a soft limit of a process for the ``with`` block."""
    before, _ = resource.prlimit(process.pid, kind)
    limit(process, kind, soft)
    try:
        yield
    finally:
        limit(process, kind, before)


class Clock:
    """The wall clock of processes that were started with ``environment``."""

    def __init__(self, folder: Path) -> None:
        library, offset = folder / "clock.so", folder / "offset"
        source = Path(__file__).with_name("clock.c")
        compiler = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1"]
        subprocess.run([*compiler, "-o", library, source], check=True, capture_output=True)
        offset.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
        with offset.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def jump(self, seconds: int) -> None:
        """Sets the clock ``seconds`` ahead of the real time."""
        self._map[:8] = struct.pack("<q", seconds)


class System:
    """A broker, a GPU worker, a state worker, a controller worker, a gateway and a client. The
    processes have few file descriptors."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self.bus, self.clock = bus, clock
        self._bounded(bus.broker)
        self.gpu = self._bounded(bus.start_worker())
        self.state = self._bounded(bus.start_other("state"))
        self.controller = self._bounded(bus.start_other("controller"))
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller", "state")
        self.gateway: Gateway = bus.start_gateway()
        self._bounded(self.gateway.process)
        self.client = bus.client()
        self.client.upload_controller(COUNTS, "counts")
        [self.reference] = self.stream("counts").wait()
        [self.plain] = self.stream(None).wait()

    @staticmethod
    def _bounded(process: Process) -> Process:
        limit(process, resource.RLIMIT_NOFILE, DESCRIPTORS)
        return process

    def load(self, role: str) -> dict[str, float]:
        """The load that the worker of a role reports."""
        return next(w.load for w in self.client.status().workers if w.role == role)

    def stream(self, controller: str | None, client: Client | None = None, **more: Any) -> Stream:
        given: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "text": False} | more
        if controller is not None:
            given["controller"] = controller
        return (client or self.client).generate(PROMPT, **given)

    @contextlib.contextmanager
    def undisturbed(self, *controllers: str | None) -> Iterator[None]:
        """Checks that streams that run during the block have the same results as undisturbed
        streams."""
        controllers = controllers or ("counts", None, "counts", None)
        readers = [Reader(self.stream(controller)) for controller in controllers]
        for reader in readers:
            assert reader.began.wait(BOUND_S), "a stream did not begin"
        yield
        for reader, controller in zip(readers, controllers, strict=True):
            [sequence] = reader.whole()
            expected = self.plain if controller is None else self.reference
            assert sequence.tokens == expected.tokens
            assert sequence.logs == expected.logs
            assert sequence.finish_reason == expected.finish_reason
