"""The Wasm engine: how modules are compiled, and the clock that stops guests.

Guests have no access to files, the network, a clock, randomness or threads. NaNs have one bit
pattern, and vector instructions one result, so that a replayed guest behaves in the same way.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import wasmtime

from ..limits import Limits

TICK_S = 0.001
"""Interval at which the CPU time of a running guest is checked, in seconds: the resolution of its
time limits."""
HOST_STACK_BYTES = 4 * 1024 * 1024
"""Stack of a thread that runs guests: the guest's stack, and the stack of the host functions that
it calls."""


def make_engine(limits: Limits) -> wasmtime.Engine:
    """The engine of a worker: one for all its guests."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    config.consume_fuel = limits.fuel_per_ms > 0
    config.max_wasm_stack = limits.stack_bytes
    config.parallel_compilation = True
    config.cranelift_nan_canonicalization = True
    config.wasm_relaxed_simd_deterministic = True
    config.wasm_threads = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    config.wasm_gc = False
    config.wasm_function_references = False
    # The interpreter of Python needs exceptions. ``examine`` refuses uploads that use them.
    config.wasm_exceptions = True
    config.wasm_stack_switching = False
    # The address of a memory does not change, so that the host may store it.
    config.memory_may_move = False
    return wasmtime.Engine(config)


class Ticker:
    """A thread that increments the epoch, for programs that do not have a loop for this.

    with Ticker(engine):
        ...
    """

    def __init__(self, engine: wasmtime.Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            self._engine.increment_epoch()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
