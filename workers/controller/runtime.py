"""The runtimes of guests. A runtime determines in which process guests run, and how they are
stopped.

The worker's rounds need four things from a runtime: programs whose controllers follow
``interface.Controller``, a tick that enforces time limits, metrics, and ``close``. Tokens and masks
do not depend on the runtime.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import wasmtime

from ...protocol.metrics import Series
from .interface import Program
from .scripts.modules import script_module
from .wasm.aici import AiciProgram
from .wasm.compiled_modules import Loaded
from .wasm.native import NativeProgram

MAX_KEPT = 256
"""Maximum modules whose programs are cached."""


def program_of(engine: wasmtime.Engine, loaded: Loaded) -> Program:
    """Returns the program of a module or a script, whose guests run in this process."""
    if loaded.abi not in ("native", "aici"):
        return script_module(engine, loaded.abi, loaded.module, loaded.script)
    make = AiciProgram if loaded.abi == "aici" else NativeProgram
    return make(engine, loaded.module, loaded.why_no_fork)


class GuestRuntime(Protocol):
    """Runs the guests of uploaded modules, or the controllers that the operator serves.
    Thread-safe. ``owner`` is the tenant of a request, or the session if clients do not have
    keys."""

    @property
    def names(self) -> Iterable[str]:
        """The names of the controllers that the operator serves."""

    def served(self, owner: str, name: str) -> Program | None:
        """The program that the operator serves under this name, for guests of ``owner``; None if
        the name is not in ``names``."""

    def missing_layers(self) -> list[str]:
        """The layers of isolation that guests do not have, with the reasons. May wait until a guest
        process has reported its layers. Empty for the controllers that the operator serves, because
        these are trusted."""

    def program(self, owner: str, module: str, load: Callable[[], Loaded]) -> Program:
        """The program of a module, for guests of ``owner``. ``module`` is the module's id; ``load``
        reads the module's compiled form."""

    def tick(self) -> None:
        """Enforces time limits. Called about every millisecond while rounds or starts run, and
        about every 0.25 s or more often at other times."""

    def series(self) -> list[Series]:
        """The metrics of the runtime."""

    def close(self) -> None:
        """Ends the runtime. Called after the last round."""


class ThreadRuntime:
    """Runs guests on the threads that run the rounds, in the worker's own process."""

    def __init__(self, engine: wasmtime.Engine, given: Mapping[str, Program] | None = None) -> None:
        """``given``: the controllers that the operator serves, by name."""
        self._engine = engine
        self._given = dict(given or {})
        self._lock = threading.Lock()
        self._programs: dict[str, Program] = {}

    @property
    def names(self) -> Iterable[str]:
        """The names of the controllers that the operator serves."""
        return self._given

    def served(self, owner: str, name: str) -> Program | None:
        """The program with this name, which all owners share."""
        return self._given.get(name)

    def missing_layers(self) -> list[str]:
        """Names the only missing layer, which is separate processes. Empty if the operator serves
        the controllers."""
        return [] if self._given else ["processes of their own (guest_processes is 0)"]

    def program(self, owner: str, module: str, load: Callable[[], Loaded]) -> Program:
        """The program of a module, which all owners share."""
        program = self._programs.get(module)
        if program is None:
            program = program_of(self._engine, load())
            with self._lock:
                self._programs[module] = program
                while len(self._programs) > MAX_KEPT:
                    del self._programs[next(iter(self._programs))]
        return program

    def tick(self) -> None:
        """Does nothing. The worker increments the epoch of its Wasm engine, which enforces the
        limits."""

    def series(self) -> list[Series]:
        """The number of guest processes, which is 0."""
        return [Series("num_guest_processes", {}, 0)]

    def close(self) -> None:
        """Does nothing: guests end with their sequences."""
