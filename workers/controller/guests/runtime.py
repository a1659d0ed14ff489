"""The runtime that runs the modules of each tenant in a process of the tenant's own."""

from __future__ import annotations

from collections.abc import Callable

from ....protocol.metrics import Series
from ..host import Host
from ..interface import Controller, Program
from ..limits import Limits
from ..wasm.compiled_modules import Loaded
from .remote import Place, RemoteController
from .table import ProcessTable


class ProcessRuntime:
    """Runs guests in guest processes (``runtime.GuestRuntime``)."""

    def __init__(self, limits: Limits, max_processes: int) -> None:
        self.table = ProcessTable(limits, max_processes)

    def program(self, tenant: str, module: str, load: Callable[[], Loaded]) -> Program:
        """As ``runtime.GuestRuntime`` says."""
        return RemoteProgram(Place(self.table, tenant, module, load))

    def tick(self) -> None:
        """As ``runtime.GuestRuntime`` says."""
        self.table.tick()

    def series(self) -> list[Series]:
        """As ``runtime.GuestRuntime`` says."""
        return self.table.series()

    def close(self) -> None:
        """As ``runtime.GuestRuntime`` says."""
        self.table.close()


class RemoteProgram:
    """A module of a tenant."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def start(self, host: Host) -> Controller:
        """A controller in the tenant's process; raises TokenbusError."""
        self._place.table.deaths.check(self._place.module)
        controller = RemoteController(self._place, host)
        try:
            controller.begin()
        except BaseException:
            controller.close()
            raise
        return controller
