"""The Wasm engine: its options for compiling modules, and the clock that limits the time of guests.

Guests have no access to files, the network, a clock, randomness or threads. All NaNs have the same
bit pattern, and relaxed vector instructions have the same results on every machine, so that a
replayed guest behaves in the same way.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import wasmtime

from ..limits import Limits

TICK_S = 0.001
"""Interval in seconds at which the CPU time of a running guest is checked. It is the resolution of
the time limits."""
HOST_STACK_BYTES = 4 * 1024 * 1024
"""Bytes of the stack of a thread that runs guests. The guest and the host functions that it calls
use this stack."""


def make_engine(limits: Limits) -> wasmtime.Engine:
    """Makes the engine of a worker, which all guests of the worker share."""
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
    # The interpreter of Python needs Wasm's exceptions. ``examine`` refuses uploaded modules that
    # use them.
    config.wasm_exceptions = True
    config.wasm_stack_switching = False
    # With this option, the address of a memory never changes, so that the host may store the
    # address.
    config.memory_may_move = False
    return wasmtime.Engine(config)


class Ticker:
    """A thread that increments the engine's epoch every ``TICK_S``. The worker increments the epoch
    in its own loop; this class is for programs without such a loop. The *epoch* is Wasmtime's
    counter for interrupting guests. When the epoch increases, running guests check their CPU time.

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
