"""A broker and a worker of each role, as threads of this process."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import msgspec

from ..broker.settings import BrokerSettings
from ..protocol.errors import Code, ServiceError, UnavailableError
from ..protocol.lines import decode_line
from ..protocol.messages import SERVER_MESSAGES, Status
from ..protocol.settings import Settings, load
from .broker import MemoryBroker
from .connection import Connection

START_S = 300.0
"""Maximum time until the system is ready, in seconds. Most of this time is for loading the
model."""
LOOK_EVERY_S = 0.02

_numbers = itertools.count(1)


class _Worker(Protocol):
    def run(self) -> int:
        """Serves until ``stop``."""

    def stop(self, reason: str) -> None:
        """Drains and ends the worker."""


class InProcess:
    """A complete Tokenbus system within this process. ``settings``: by default, the settings that
    ``load`` reads.

    ``controllers``: whether the system has a controller worker and a state worker. By default, this
    is the case if the extra ``controller`` is installed. Uploaded modules and variables are stored
    in the ``run_dir`` of the settings. If ``run_dir`` is not set, they are stored in a folder that
    ``close`` deletes. ``Client(system.address)`` and ``AsyncClient(system.address)`` work as with
    any other address. The class needs the extra ``gpu``.

    ``start`` raises UnavailableError if the system is not ready within five minutes, and
    ServiceError if a worker cannot run.
    """

    def __init__(
        self, settings: Settings | None = None, *, controllers: bool | None = None
    ) -> None:
        given = settings or load()
        name = f"memory://{next(_numbers)}"
        self.address = f"{name}/front"
        self._own_folder = "" if given.run_dir else tempfile.mkdtemp(prefix="tokenbus-")
        self._settings = msgspec.structs.replace(
            given,
            front=self.address,
            back=f"{name}/back",
            run_dir=given.run_dir or self._own_folder,
        )
        self._controllers = _controllers_installed() if controllers is None else controllers
        self._broker = MemoryBroker(
            self.address, self._settings.back, BrokerSettings.of(self._settings)
        )
        self._running: list[tuple[_Worker, threading.Thread]] = []
        self._failed: list[str] = []
        """Error texts, one for each worker that has failed."""

    def start(self) -> None:
        """Starts the threads, and waits until the workers have registered and the model is
        loaded."""
        self._broker.start()
        try:
            for role, make in self._workers():
                self._begin(role, make)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def connect(self) -> Connection:
        """A new connection, which carries lines of LMTP."""
        return Connection(self.address)

    def close(self) -> None:
        """Drains the workers, for up to ``drain_s``, and ends the threads."""
        for worker, _ in self._running:
            worker.stop("the system is closed")
        for _, thread in self._running:
            thread.join()
        self._broker.close()
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _workers(self) -> Iterator[tuple[str, Callable[[Settings], _Worker]]]:
        from ..workers.gpu.worker import GpuWorker

        yield "gpu", GpuWorker
        if self._controllers:
            from ..workers.controller.worker import ControllerWorker
            from ..workers.state.worker import StateWorker

            yield "state", StateWorker
            yield "controller", ControllerWorker

    def _begin(self, role: str, make: Callable[[Settings], _Worker]) -> None:
        worker = make(self._settings)

        def run() -> None:
            try:
                if worker.run():
                    self._failed.append(f"the {role} worker ended; the log says why")
            except Exception as error:
                self._failed.append(f"the {role} worker failed: {error}")
                raise

        thread = threading.Thread(target=run, name=f"{role}-worker", daemon=True)
        thread.start()
        self._running.append((worker, thread))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        with self.connect() as connection:
            while not self._ready(_status(connection)):
                if self._failed:
                    raise ServiceError(Code.INTERNAL, self._failed[0])
                if time.monotonic() > deadline:
                    what = f"the system was not ready within {START_S:g} s"
                    raise UnavailableError(Code.NO_WORKER, what)
                time.sleep(LOOK_EVERY_S)

    def _ready(self, status: Status) -> bool:
        model = self._settings.model
        loaded = any(w.role == "gpu" and (model == "auto" or w.models) for w in status.workers)
        return loaded and len(status.workers) == len(self._running)


def _controllers_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("wasmtime", "llguidance"))


def _status(connection: Connection) -> Status:
    connection.send('STATUS {"stream_id":0}')
    line = connection.receive()
    assert line is not None
    status: Status = decode_line(line, SERVER_MESSAGES).body.status
    return status
