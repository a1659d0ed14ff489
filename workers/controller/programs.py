"""The programs that a request can name: what this worker was started with, and stored modules."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import wasmtime

from ...protocol.errors import Code, RequestError
from .backends.constraints import Constraints
from .interface import Program
from .wasm.aici import AiciProgram
from .wasm.native import NativeProgram
from .wasm.store import ModuleStore

MAX_KEPT = 256
"""Modules that are kept ready to start."""


class Programs:
    """Programs by name: those given, then built-ins, then a tenant's modules and tags."""

    def __init__(
        self,
        engine: wasmtime.Engine,
        store: ModuleStore | None,
        given: Mapping[str, Program],
        kept: Path | None = None,
    ) -> None:
        """``store`` is None where only the ``given`` ones are served; ``kept`` is the folder of
        what constraints keep between runs."""
        self._engine = engine
        self._store = store
        self._given = dict(given)
        self._lock = threading.Lock()
        self._made: dict[str, Program] = {}
        self._constraints = Constraints(engine, kept) if store is not None else None

    def get(self, tenant: str, name: str) -> Program:
        """A program by its name; raises RequestError for an unknown one."""
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
        program = self._made.get(module)
        if program is None:
            loaded = self._store.load(module)
            make = AiciProgram if loaded.abi == "aici" else NativeProgram
            program = make(self._engine, loaded.module, loaded.why_no_fork)
            with self._lock:
                self._made[module] = program
                while len(self._made) > MAX_KEPT:
                    del self._made[next(iter(self._made))]
        return program

    def close(self) -> None:
        """Writes what constraints keep: the worker ends."""
        if self._constraints is not None:
            self._constraints.close()
