"""Runs the processes of a system, and restarts them."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenbus.clients import Client, TokenbusError

from ..processes import (
    Process,
    children,
    clean_environment,
    free_port,
    system_folder,
    until,
    zygotes,
)
from . import python_controllers
from .schedule import Blow
from .scripts import TOOLS

START_S = 300.0
"""Maximum time until all workers have registered, in seconds. Only a hang reaches this limit."""
LOOK_S = 0.02
SETTINGS: dict[str, object] = {
    "kv_cache_bytes": 96 * 2**20,
    "log_level": "info",
    # The limits of controllers are not tested, and a busy machine may delay a controller.
    "controller_pre_ms": 1000,
    "controller_mid_ms": 1000,
    "controller_post_ms": 1000,
    "controller_script_ms": 1000,
    "controller_init_ms": 20_000,
    "guest_processes": 8,
}
"""The settings of the system. Settings of liveness have their defaults unless they are given."""


GUESTS = ("guest", "zygote")
"""The kinds of guest processes. A controller worker restarts them, not this module."""


class Slot:
    """A program of supervisord.conf, whose process is restarted when it ends.

    The rules are supervisord's: the restart is immediate if the process has run for ``startsecs``.
    Otherwise the pause in seconds is the number of consecutive early ends. Unlike supervisord, a
    slot does not give up after ``startretries``.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        module: str,
        startsecs: float,
        log: Path,
        environment: dict[str, str],
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.name, self.kind = name, kind
        self._module, self._startsecs = module, startsecs
        self._log, self._environment, self._arguments = log, environment, arguments
        self._early = 0
        self._again_at: float | None = None
        self._continue_at: float | None = None
        self._started = 0.0
        self.pids: dict[int, None] = {}
        """The ids of all processes of this slot so far."""
        self.process = self._start()

    def _start(self) -> Process:
        self._started = time.monotonic()
        environment = self._environment
        process = Process(self._module, self._log, environment, arguments=self._arguments)
        self.pids[process.pid] = None
        return process

    def look(self, now: float) -> None:
        """Continues a process whose stop time has passed; restarts a process that has ended."""
        if self._continue_at is not None and now >= self._continue_at:
            self.go_on()
        if self.process.alive:
            return
        self._continue_at = None
        if self._again_at is None:
            early = now - self._started < self._startsecs
            self._early = self._early + 1 if early else 0
            self._again_at = now + self._early
        if now >= self._again_at:
            self._again_at = None
            self.process = self._start()

    def suffer(self, blow: Blow, now: float) -> bool:
        """Kills or stops the process; returns False if the process does not run."""
        if not self.process.alive:
            return False
        if blow.stop_s is None:
            self.process.send(signal.SIGKILL)
        else:
            self.process.send(signal.SIGSTOP)
            self._continue_at = now + blow.stop_s
        return True

    def go_on(self) -> None:
        """Continues the process."""
        self._continue_at = None
        if self.process.alive:
            self.process.send(signal.SIGCONT)

    @property
    def log(self) -> str:
        """The log of this slot's processes."""
        return self._log.read_text() if self._log.exists() else ""


class System:
    """Brokers, GPU workers, controller workers, a state worker, a tool worker and two gateways,
    supervised.

    This class replaces supervisord, because a new GPU worker needs seconds of CPU time to import
    torch. Here, a worker is forked from a process that has imported torch (``tests/forks.py``).
    """

    def __init__(
        self,
        gpu_workers: int = 3,
        controller_workers: int = 2,
        gpu_module: str = "tokenbus.workers.gpu",
        brokers: int = 1,
        **settings: object,
    ) -> None:
        self.folder = system_folder()
        self.fronts = [f"tcp://127.0.0.1:{free_port()}" for _ in range(brokers)]
        self.front = ",".join(self.fronts)
        given = {**SETTINGS, **settings, "brokers": brokers}
        self._environment = clean_environment(front=self.front, run_dir=self.folder, **given)
        shutil.copy(python_controllers.__file__, self.folder)
        served = tuple(f"python_controllers:{name}" for name in python_controllers.SERVED)
        self.http = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        """The addresses of the gateways. The first gateway is killed or stopped. The second has
        streams, and is only stopped."""
        self.slots: list[Slot] = []
        for i in range(brokers):
            name = f"broker-{i}" if brokers > 1 else "broker"
            self._add(name, "broker", "tokenbus.broker", arguments=(str(i),))
        self._add("state-0", "state", "tokenbus.workers.state")
        for i in range(controller_workers):
            self._add(f"controller-{i}", "controller", "tokenbus.workers.controller")
            self._add(f"python-{i}", "python", "tokenbus.workers.controller", arguments=served)
        for i in range(gpu_workers):
            self._add(f"gpu-{i}", "gpu", gpu_module, startsecs=30.0)
        tools = self.folder / "chaos_tools.py"
        tools.write_text(TOOLS)
        self._add("tool-0", "tool", "tokenbus.clients.cli", arguments=("tool", "serve", str(tools)))
        for kind, http in zip(("gateway", "door"), self.http, strict=True):
            self._add(kind, kind, "tokenbus.clients.gateway", http=http)
        self._lock = threading.Lock()
        self._stopped: dict[int, float] = {}
        """The stopped guest processes, and when each continues."""
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._supervise, daemon=True)
        self._watch.start()

    def _add(
        self,
        name: str,
        kind: str,
        module: str,
        startsecs: float = 3.0,
        arguments: tuple[str, ...] = (),
        **settings: str,
    ) -> None:
        own = {f"TOKENBUS_{key.upper()}": value for key, value in settings.items()}
        log = self.folder / f"{name}.log"
        environment = self._environment | own
        self.slots.append(Slot(name, kind, module, startsecs, log, environment, arguments))

    def of(self, kind: str) -> list[Slot]:
        """The slots of a kind."""
        return [slot for slot in self.slots if slot.kind == kind]

    def name_of(self, worker: str) -> str:
        """The slot of a worker. The worker's name at the broker ends with its process id."""
        pid = int(worker.rpartition("-")[2])
        return next((slot.name for slot in self.slots if pid in slot.pids), worker)

    def suffer(self, blow: Blow) -> str | None:
        """Executes a blow; returns the name of the slot, or None if the process does not run."""
        with self._lock:
            if blow.kind in GUESTS:
                return self._suffer_guest(blow)
            slots = self.of(blow.kind)
            slot = slots[blow.which % len(slots)]
            return slot.name if slot.suffer(blow, time.monotonic()) else None

    def _suffer_guest(self, blow: Blow) -> str | None:
        """Executes a blow to a guest process, or to a zygote, which is the parent of a worker's
        guest processes."""
        pids = [slot.process.pid for slot in (*self.of("controller"), *self.of("python"))]
        pids = [zygote for pid in pids for zygote in zygotes(pid)]
        if blow.kind == "guest":
            pids = [child for pid in pids for child in children(pid)]
        if not pids:
            return None
        pid = sorted(pids)[blow.which % len(pids)]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if blow.stop_s is None else signal.SIGSTOP)
            if blow.stop_s is not None:
                self._stopped[pid] = time.monotonic() + blow.stop_s
            return f"{blow.kind}-{pid}"
        return None

    def _go_on_guests(self, now: float) -> None:
        """Continues the guest processes whose stop time has passed."""
        for pid, at in list(self._stopped.items()):
            if now >= at:
                del self._stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def front_of(self, blow: Blow) -> str:
        """The address of the broker that a blow hits; empty if it hits another kind of process."""
        return self.fronts[blow.which % len(self.fronts)] if blow.kind == "broker" else ""

    def go_on(self) -> None:
        """Continues all stopped processes."""
        with self._lock:
            for slot in self.slots:
                slot.go_on()
            self._go_on_guests(math.inf)

    def _supervise(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                for slot in self.slots:
                    slot.look(time.monotonic())
                self._go_on_guests(time.monotonic())

    def wait_until_complete(self) -> None:
        """Waits until all workers are registered and have loaded their model."""
        roles = ("state", "controller", "python", "gpu", "tool")
        wanted = len([slot for slot in self.slots if slot.kind in roles])
        with Client(self.front, patience_s=START_S) as client:

            def complete() -> bool:
                try:
                    workers = client.status(timeout_s=60.0).workers
                except TokenbusError:
                    return False
                pids = {slot.process.pid for slot in self.slots}
                there = [w for w in workers if int(w.name.rpartition("-")[2]) in pids]
                loaded = all(w.models for w in there if w.role == "gpu")
                return len(there) >= wanted and loaded

            until(complete, START_S, "a complete system")

    def close(self) -> None:
        """Ends all processes. Their logs exist until ``remove``."""
        self._ended.set()
        self._watch.join()
        for slot in reversed(self.slots):
            slot.process.kill()

    def remove(self) -> None:
        """Removes the folder of the system."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running(**settings: object) -> Iterator[System]:
    """Runs a complete system. Its logs are not removed if the block fails."""
    system = System(**settings)  # type: ignore[arg-type]
    try:
        system.wait_until_complete()
        yield system
    except BaseException:
        print(f"logs: {system.folder}")
        system.close()
        raise
    system.close()
    system.remove()
