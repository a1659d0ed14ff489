"""Runs guests in processes for tests: a runtime with a running watchdog, and modules."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import wasmtime
from tokenbus.protocol.guest_user import GuestUser
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.guest_memory import GuestMemory
from tokenbus.workers.controller.guests.runtime import ProcessRuntime
from tokenbus.workers.controller.guests.setup import Setup
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action, Controller, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.compiled_modules import Loaded
from tokenbus.workers.variables import VariableStorage

from ....processes import until
from ..played import WORDS, engine, vocabulary
from ..wasm.guests import compile_guest

LIMITS = Limits(init_s=0.4, pre_s=0.1, mid_s=0.1, post_s=0.1)
"""Limits above the usual ones, because these tests do not check times."""
VOCABULARY = vocabulary(WORDS)
CALM = """
#include "tokenbus.h"
#pragma clang diagnostic ignored "-Wunused-parameter"
static uint32_t *mask;
static uint32_t rounds;
void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    mask = tb_mask_new();
}
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    tb_mask_clear_all(mask);
    tb_mask_set(mask, 1 + rounds++);
    return tb_sample(mask);
}
"""
"""A guest that allows one token in each round, each time a different one."""


class Runtime:
    """A runtime with at most ``most`` guest processes, which serve ``controllers``."""

    def __init__(
        self, most: int, controllers: tuple[str, ...] = (), user: GuestUser | None = None
    ) -> None:
        self.runtime = ProcessRuntime(Setup(LIMITS, list(controllers), user), most)
        self.table = self.runtime.table

    def served(self, name: str, tenant: str = "tenant") -> Program:
        """The program of a Python controller for a tenant."""
        found = self.runtime.served(tenant, name)
        assert found is not None
        return found

    def program(
        self, source: str | Path, tenant: str = "tenant", module: str = "module"
    ) -> Program:
        """The program of a C guest, which is a module of the tenant."""
        compiled = wasmtime.Module(engine, compile_guest(source, "-Wno-unused-parameter"))
        return self.runtime.program(tenant, module, lambda: Loaded("native", compiled))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to all guest processes. A process that has ended may still be listed."""
        for pid in self.table.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def running(
    most: int = 8, controllers: tuple[str, ...] = (), user: GuestUser | None = None
) -> Iterator[Runtime]:
    """A runtime whose watchdog ticks every millisecond, as in a worker."""
    made = Runtime(most, controllers, user)
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


class Sequence:
    """A sequence that has made its first decision. The test makes the further calls. ``perform``
    answers operations on variables."""

    def __init__(
        self,
        made: Program,
        perform: Callable[[Variable], VariableAnswer] | None = None,
        memory: GuestMemory | None = None,
    ) -> None:
        self.variables = SequenceVariables(1, 0, perform or VariableStorage().apply, lambda: None)
        share = None if memory is None else memory.of("tenant")
        host = Host(1, 0, b"", VOCABULARY, self.variables, Log(1024), LIMITS, 99, memory=share)
        self.controller: Controller = made.start(host)
        self.mask = memoryview(bytearray(4 * -(-VOCABULARY.size // 32)))
        self.controller.init_prompt([1, 2])
        self.decide()

    def decide(self) -> None:
        assert self.controller.pre_process().action is Action.CONTINUE
        assert self.controller.mid_process((0,), self.mask).action is Action.CONTINUE

    def round(self, token: int = 5) -> None:
        assert self.controller.post_process([token], 0).action is Action.CONTINUE
        self.decide()

    def allowed(self) -> list[int]:
        bits = int.from_bytes(self.mask, "little")
        return [token for token in range(VOCABULARY.size) if bits >> token & 1]


def stop(sequence: Sequence) -> int:
    """Stops the process of a sequence; returns its id."""
    pid: int = sequence.controller._process.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/status")
    until(lambda: "State:\tT" in status.read_text(), 60, "the process is stopped")
    return pid
