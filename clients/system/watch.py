"""Observes a running system: its processes, its workers and its load."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import create_connection, gethostname

from ...protocol.endpoints import host_and_port, separate
from ...protocol.errors import TokenbusError
from ...protocol.keys import own_key
from ...protocol.messages import Status, WorkerStatus
from ...protocol.settings import Settings
from .. import Client
from ..cli.exits import counted
from .supervisor import Control, ProcessState

ASK_S = 1.0
"""Maximum time until a broker or a gateway answers, in seconds."""
LOADING = re.compile(r"\((\d+)%\)$")
"""Matches the loaded part of a model, in percent, at the end of a worker's log line."""

MAX_SHOWN = 4
"""Maximum number of tools that the line of a tool worker names."""


@dataclass(frozen=True)
class Shown:
    """The state of a process at one moment."""

    process: ProcessState
    serves: bool
    """Whether the process is ready."""
    doing: str
    """A short description of the process's state."""
    progress: float | None = None
    """The loaded part of a model, 0 to 1, while the model is loading; otherwise None."""
    load: str = ""


@dataclass(frozen=True)
class Picture:
    """All processes, sorted by group and name, and the load of the system."""

    shown: list[Shown]
    load: str

    @property
    def ready(self) -> bool:
        """Whether every process is ready."""
        return bool(self.shown) and all(s.serves for s in self.shown)

    @property
    def failed(self) -> str | None:
        """The name of a process that supervisord has given up (FATAL), or None. Optional processes
        do not count."""
        failed = (s.process for s in self.shown if s.process.failed)
        return next((process.name for process in failed if not is_optional(process.name)), None)


class Watcher:
    """Makes pictures of a system (``Picture``). ``close`` must be called at the end."""

    def __init__(self, control: Control, settings: Settings) -> None:
        self._control = control
        self.run_dir = control.run_dir
        self._front = settings.front_endpoint
        self._key = None if settings.join else own_key(settings, "client")
        self._http = settings.http
        self._min_workers = {"gpu": settings.gpu_workers, "controller": settings.controller_workers}
        self._on_demand = settings.model == "auto"
        self._joins = bool(settings.join)
        self._client: Client | None = None
        self._each: dict[str, Client] = {}
        """The client of each broker, by the broker's number."""
        self._has_answered = False
        """Whether a broker has answered since this object was created. ``look`` sets this flag."""
        self._registered: set[int] = set()
        """The process ids of all workers that the broker's status has ever listed."""
        self.ending = False
        """Whether the system is stopping. The owner of this object sets this flag. ``Picture.load``
        is then ``ending``, even if the broker does not answer."""

    def look(self) -> Picture:
        """The current picture of the system.

        The call takes about a second for each broker that does not answer, and up to
        ``supervisor.ANSWER_S`` if supervisord does not answer.
        """
        processes = self._control.processes() or []
        up = any(p.pid for p in processes if p.group == "broker")
        status = self._status() if up else None
        self._has_answered = self._has_answered or status is not None
        load = self._load(processes, status)
        return Picture([self._shown(p, status) for p in processes], load)

    def _load(self, processes: Sequence[ProcessState], status: Status | None) -> str:
        """The load of the system, or its phase, such as ``starting``."""
        # ``processes`` is empty if supervisord does not answer, because another process has stopped
        # it.
        if self.ending or not processes:
            return "ending"
        if self._joins:
            return "joined"
        return load_line(status) if self._has_answered else "starting"

    def answers(self) -> bool:
        """Whether a broker answers. The call takes at most about a second."""
        return self._status() is not None

    def client(self) -> Client:
        """The client of the broker, created at the first call."""
        if self._client is None:
            self._client = Client(self._front, key=self._key)
        return self._client

    def close(self) -> None:
        """Closes the connections to the brokers."""
        for client in (self._client, *self._each.values()):
            if client is not None:
                client.close()

    def _listens(self) -> bool:
        """Whether a gateway accepts connections."""
        try:
            with create_connection(host_and_port(self._http), timeout=ASK_S):
                return True
        except OSError:
            return False

    def _of_cluster(self, process: ProcessState, workers: list[WorkerStatus]) -> Shown:
        """The state of the process that manages workers in a Ray cluster. The process counts as
        ready if the minimum number of workers of each role is ready."""
        ready = {
            role: sum(w.role == role and _serves(w, self._on_demand) for w in workers)
            for role in self._min_workers
        }
        serves = all(ready[role] >= minimum for role, minimum in self._min_workers.items())
        doing = f"{ready['gpu']} GPU workers, {ready['controller']} controller workers"
        return Shown(process, serves, doing)

    def _answers(self, process: ProcessState, status: Status) -> bool:
        """Whether the broker in ``process`` answers, and has as many workers as ``status``, or
        more. ``status``: the answer of one broker of the system. If the system has only one broker,
        ``status`` is its own answer, so the result is True."""
        number = process.name.removeprefix("broker").removeprefix("-")
        if not number:
            return True
        client = self._each.get(number)
        if client is None:
            front = separate(self._front)[int(number)]
            client = self._each[number] = Client(front, key=self._key)
        with suppress(TokenbusError):
            return len(client.status(timeout_s=ASK_S).workers) >= len(status.workers)
        return False

    def _status(self) -> Status | None:
        with suppress(TokenbusError):
            return self.client().status(timeout_s=ASK_S)
        return None

    def _shown(self, process: ProcessState, status: Status | None) -> Shown:
        if process.state == "BACKOFF":
            return Shown(process, False, "exited early; it will be restarted")
        if process.state not in ("STARTING", "RUNNING"):
            return Shown(process, False, process.state.lower())
        if self._joins:
            # A machine that joins a broker has only a worker's key. The broker's socket for clients
            # does not accept this key, so this process cannot request the state of the workers.
            return Shown(process, process.state == "RUNNING", process.state.lower())
        if process.group == "broker":
            serves = status is not None and self._answers(process, status)
            return Shown(process, serves, "up" if serves else "starting")
        if process.name.startswith("gateway"):
            serves = process.state == "RUNNING" or self._listens()
            return Shown(process, serves, "up" if serves else "starting")
        workers = status.workers if status is not None else []
        if process.name.startswith("cluster"):
            return self._of_cluster(process, workers)
        here = gethostname()
        worker = next((w for w in workers if w.pid == process.pid and w.host == here), None)
        if worker is None:
            if process.state == "RUNNING" and _stands_by(process, workers, here):
                return Shown(process, True, "stands by")
            left = process.pid in self._registered
            return Shown(process, False, "not registered any more" if left else "starting")
        self._registered.add(worker.pid)
        if worker.state != "ready":
            return Shown(process, False, worker.state)
        if worker.role == "tool":
            return Shown(process, True, f"serves {shortened(worker.tools)}")
        if worker.role != "gpu":
            load = counted(worker.requests, "request") if worker.role == "controller" else ""
            return Shown(process, True, "up", load=load)
        if worker.models or self._on_demand:
            what = ", ".join(worker.models) or "models on demand"
            load = f"{worker.requests} of {worker.capacity} requests"
            return Shown(process, True, f"serves {what}", load=load)
        part = LOADING.search(self.run_dir.last_line(process.name))
        progress = int(part[1]) / 100 if part else 0.0
        return Shown(process, False, "loading the model", progress)


def is_optional(name: str) -> bool:
    """Whether a process is a tool worker. The system continues without tool workers."""
    return name.startswith("tool-worker-")


def shortened(names: Sequence[str]) -> str:
    """The first ``MAX_SHOWN`` names of a list, and the number of the remaining names."""
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _stands_by(process: ProcessState, workers: Sequence[WorkerStatus], host: str) -> bool:
    """Whether a process is a state worker that stands by: another state worker is active on this
    host."""
    has_them = any(w.role == "state" and w.host == host for w in workers)
    return process.group == "state-worker" and has_them


def _serves(worker: WorkerStatus, on_demand: bool) -> bool:
    """Whether the worker is ready. A GPU worker must also have loaded a model, or load models on
    demand."""
    loaded = worker.role != "gpu" or bool(worker.models) or on_demand
    return worker.state == "ready" and loaded


def load_line(status: Status | None) -> str:
    """The load of the whole system, as one line of text."""
    if status is None:
        return "the broker does not answer"
    tokens_per_s = sum(w.load.get("tokens_per_s", 0.0) for w in status.workers)
    waiting = f", {status.queued} queued" if status.queued else ""
    return f"{counted(status.streams, 'stream')}{waiting}, {tokens_per_s:,.0f} tokens/s"
