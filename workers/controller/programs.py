"""The programs that a request can name: controllers that the operator serves, built-ins, and
uploaded modules and scripts."""

from __future__ import annotations

from functools import partial

from ...protocol.errors import Code, RequestError
from ...protocol.metrics import Series
from ...protocol.worker_messages import CALL_TOOL
from .backends.constraints import Constraints
from .guests.remote import INTERPRETER
from .guests.runtime import RemoteProgram
from .interface import Program
from .python.script import ScriptProgram as ServedScript
from .runtime import GuestRuntime
from .scripts.controller import ScriptProgram
from .scripts.sources import IN_ARGUMENT
from .tool_program import ToolProgram
from .wasm.store import ModuleStore


def _no_constraint(name: str) -> None:
    return None


class Programs:
    """Looks up programs by name: first controllers of the operator, then built-ins, then a tenant's
    modules and scripts."""

    def __init__(
        self,
        runtime: GuestRuntime,
        store: ModuleStore | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """``runtime`` runs the modules of ``store``. If ``store`` is None, only the controllers of
        the operator are served."""
        self._runtime = runtime
        self._store = store
        self._constraints = constraints

    def get(self, tenant: str, name: str, owner: str) -> Program:
        """The program with this name; raises RequestError if the name is unknown. ``owner``: the
        tenant, or the session if clients do not have keys. Two owners never share a guest."""
        served = self._runtime.served(owner, name)
        if served is not None:
            # Only scripts need ``ScriptProgram``, which handles their requests to generate texts.
            runs_scripts = isinstance(served, RemoteProgram | ServedScript)
            return self._scripted(served) if runs_scripts else served
        if self._store is None:
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"unknown controller {name!r}; this worker serves {', '.join(self._runtime.names)}",
                path="$.controller",
            )
        constraint = self._constraints.get(name) if self._constraints is not None else None
        if constraint is not None:
            return constraint
        if name == CALL_TOOL:
            return ToolProgram()
        language = IN_ARGUMENT.get(name)
        if language is not None:
            load = partial(self._store.interpreter, language)
            return self._scripted(self._runtime.program(owner, INTERPRETER + language, load))
        module = self._store.resolve(tenant, name)
        load = partial(self._store.load, module)
        program = self._runtime.program(owner, module, load)
        return self._scripted(program) if load().script is not None else program

    def _scripted(self, guests: Program) -> Program:
        constraints = self._constraints
        return ScriptProgram(guests, constraints.get if constraints is not None else _no_constraint)

    def missing_layers(self) -> list[str]:
        """Calls ``GuestRuntime.missing_layers``."""
        return self._runtime.missing_layers()

    def series(self) -> list[Series]:
        """The metrics of compiling grammars and of the runtime; safe on another thread."""
        compiling = self._constraints.series() if self._constraints is not None else []
        return [*compiling, *self._runtime.series()]

    def tick(self) -> None:
        """Calls ``GuestRuntime.tick``."""
        self._runtime.tick()

    def close(self) -> None:
        """Called when the worker stops: closes the runtime and the constraints. The constraints
        then write snapshots of compiled grammars to disk."""
        self._runtime.close()
        if self._constraints is not None:
            self._constraints.close()
