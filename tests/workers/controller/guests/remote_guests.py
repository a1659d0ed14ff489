"""Runs guests in processes for tests: a runtime with a running watchdog, and modules."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import wasmtime
from tokenbus.workers.controller.guests.runtime import ProcessRuntime
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm.compiled_modules import Loaded

from ..played import engine
from ..wasm.guests import compile_guest

LIMITS = Limits(init_s=0.4, pre_s=0.1, mid_s=0.1, post_s=0.1)
"""Limits above the usual ones, because these tests do not check times."""


class Runtime:
    """A runtime with at most ``most`` processes."""

    def __init__(self, most: int) -> None:
        self.runtime = ProcessRuntime(LIMITS, most)
        self.table = self.runtime.table

    def program(
        self, source: str | Path, tenant: str = "tenant", module: str = "module"
    ) -> Program:
        """The program of a C guest, which is a module of the tenant."""
        compiled = wasmtime.Module(engine, compile_guest(source, "-Wno-unused-parameter"))
        return self.runtime.program(tenant, module, lambda: Loaded("native", compiled))

    def kill(self) -> None:
        """Kills all processes."""
        for pid in self.table.pids():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def running(most: int = 8) -> Iterator[Runtime]:
    """A runtime that gets ticks as from a worker."""
    made = Runtime(most)
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            made.runtime.tick()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()
        made.runtime.close()
