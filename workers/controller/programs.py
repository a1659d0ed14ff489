"""The programs that a request can name: programs that are given at start, built-ins, and stored
modules."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import wasmtime

from ...protocol.errors import Code, RequestError
from ...protocol.metrics import Series
from .backends.compiling.bounds import Bounds
from .backends.constraints import Constraints
from .interface import Program
from .limits import Limits
from .wasm.aici import AiciProgram
from .wasm.native import NativeProgram
from .wasm.store import ModuleStore

MAX_KEPT = 256
"""Maximum modules that stay loaded."""


class Programs:
    """Looks up programs by name: first given programs, then built-ins, then a tenant's modules."""

    def __init__(
        self,
        engine: wasmtime.Engine,
        store: ModuleStore | None,
        given: Mapping[str, Program],
        kept: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        """If ``store`` is None, only the ``given`` programs are served. ``kept`` is the folder in
        which constraints store tables and masks between runs. ``limits``: the limits of
        compilations."""
        limits = limits or Limits()
        bounds = Bounds(limits.compile_s, limits.compile_bytes)
        self._engine = engine
        self._store = store
        self._given = dict(given)
        self._lock = threading.Lock()
        self._loaded: dict[str, Program] = {}
        self._constraints = Constraints(engine, kept, bounds) if store is not None else None

    def get(self, tenant: str, name: str) -> Program:
        """The program with this name; raises RequestError if the name is unknown."""
        given = self._given.get(name)
        if given is not None:
            return given
        if self._store is None:
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"unknown controller {name!r}; this worker serves {', '.join(self._given)}",
                path="$.controller",
            )
        constraint = self._constraints.get(name) if self._constraints is not None else None
        if constraint is not None:
            return constraint
        module = self._store.resolve(tenant, name)
        program = self._loaded.get(module)
        if program is None:
            loaded = self._store.load(module)
            make = AiciProgram if loaded.abi == "aici" else NativeProgram
            program = make(self._engine, loaded.module, loaded.why_no_fork)
            with self._lock:
                self._loaded[module] = program
                while len(self._loaded) > MAX_KEPT:
                    del self._loaded[next(iter(self._loaded))]
        return program

    def series(self) -> list[Series]:
        """The metrics of compiling grammars; safe on another thread."""
        return self._constraints.series() if self._constraints is not None else []

    def close(self) -> None:
        """Makes the constraints write their snapshots, when the worker stops."""
        if self._constraints is not None:
            self._constraints.close()
