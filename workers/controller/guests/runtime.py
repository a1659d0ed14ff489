"""The ``GuestRuntime`` that runs the guests of each tenant in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....protocol.metrics import Series
from ..host import Host
from ..interface import Controller, Program
from ..wasm.compiled_modules import Loaded
from .remote import Place, RemoteController
from .setup import Setup
from .table import ProcessTable


class ProcessRuntime:
    """Runs guests in guest processes, one for each tenant (``runtime.GuestRuntime``)."""

    def __init__(self, setup: Setup, max_processes: int) -> None:
        """Raises RequestError if a controller of ``setup`` cannot be loaded."""
        self.table = ProcessTable(setup, max_processes)
        self._names = self.table.names() if setup.controllers else []

    @property
    def names(self) -> Iterable[str]:
        """The names of the controllers that the operator serves."""
        return self._names

    def served(self, tenant: str, name: str) -> Program | None:
        """The program of a Python controller, which every process inherits from its parent
        (``zygote.py``); None if ``name`` is unknown."""
        if name not in self._names:
            return None
        return RemoteProgram(Place(self.table, tenant, name, None))

    def program(self, tenant: str, module: str, load: Callable[[], Loaded]) -> Program:
        """The program of a tenant's module, which ``load`` reads."""
        return RemoteProgram(Place(self.table, tenant, module, load))

    def missing_layers(self) -> list[str]:
        """The layers of isolation that the processes lack. Waits until a process has tried to set
        up all layers."""
        return self.table.missing_layers()

    def tick(self) -> None:
        """Checks the time limits of requests, and ends idle processes."""
        self.table.tick()

    def series(self) -> list[Series]:
        """The metrics of the processes."""
        return self.table.series()

    def close(self) -> None:
        """Ends all processes."""
        self.table.close()


class RemoteProgram:
    """The program of a module, or of a Python controller, in the process of a tenant."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def start(self, host: Host) -> Controller:
        """A controller in the tenant's process; raises TokenbusError if its guest cannot be
        created."""
        place = self._place
        place.table.deaths.check(place.tenant, place.blamed(host.arg))
        controller = RemoteController(place, host)
        try:
            controller.begin()
        except BaseException:
            controller.close()
            raise
        return controller
