"""``python -m tokenbus.clients.cluster``: adapts the number of workers in a Ray cluster to the
load.

supervisord sends SIGTERM when it restarts this process. SIGTERM ends only this process: the workers
continue, and the next process finds them by their names. SIGINT, or SIGTERM after SIGUSR1, ends the
system: this process first drains all workers.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import time
from pathlib import Path

from ...protocol import logs
from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFolder
from ...protocol.messages import Status
from ...protocol.settings import SettingError, Settings, load
from ...transport.waiting import get_within
from .. import Client
from .connection import connect, system_name, variables_of_workers
from .members import Members, WorkerSetup
from .scaling import Bounds, Scaling, controller_workers_needed, gpu_workers_needed

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
ASK_S = 3.0
"""Maximum time until the broker answers, in seconds."""


class Cluster:
    """The workers of a system in a Ray cluster. The number of workers follows the load."""

    def __init__(self, settings: Settings, run: str) -> None:
        """``run`` identifies this run of the system. The workers of other runs are ended."""
        self._settings = settings
        own = KeyFolder(settings.keys_folder).own("worker")
        worker = WorkerSetup(
            variables_of_workers(settings), own.read_text() if own.exists() else None
        )
        system = system_name(settings)
        self._gpu = Members("gpu", system, run, settings, worker)
        self._controllers = Members("controller", system, run, settings, worker)
        times = settings.scale_up_s, settings.scale_down_s
        gpu = _bounds(settings.gpu_workers, settings.max_gpu_workers)
        controllers = _bounds(settings.controller_workers, settings.max_controller_workers)
        self._scaled = (
            (self._gpu, Scaling(gpu, *times)),
            (self._controllers, Scaling(controllers, *times)),
        )
        self._client = Client(settings.front_endpoint, patience_s=ASK_S)

    def run(self, signals: queue.SimpleQueue[int]) -> None:
        """Adapts the number of workers to the load until SIGTERM or SIGINT arrives in ``signals``.
        Then drains the workers, unless the signal is a SIGTERM without an earlier SIGUSR1."""
        now = time.monotonic()
        for members, _ in self._scaled:
            members.find(now)
        for_good, number = False, None
        while number not in (signal.SIGTERM, signal.SIGINT):
            self._look(time.monotonic(), self._status())
            try:
                number = get_within(signals, LOOK_EVERY_S)
            except queue.Empty:
                continue
            for_good = for_good or number != signal.SIGTERM
        if not for_good:
            log.info("ending without the workers, which continue")
            return
        log.info("stopping: draining the workers")
        for members, _ in self._scaled:
            members.retire_all(time.monotonic())
        while not all(members.empty for members, _ in self._scaled):
            for members, _ in self._scaled:
                members.look(time.monotonic())
            time.sleep(0.05)

    def _look(self, now: float, status: Status | None) -> None:
        """Checks all workers and the load once. Adds or retires workers if the load requires it."""
        for members, scaling in self._scaled:
            members.look(now)
            current = len(members.serving)
            target = current
            if status is not None:
                needed = gpu_workers_needed if members is self._gpu else controller_workers_needed
                target = scaling.target(current, needed(status, self._settings), now)
            for _ in range(current, target):
                members.place()
            if target < current:
                members.retire(now)

    def _status(self) -> Status | None:
        try:
            return self._client.status(timeout_s=ASK_S)
        except TokenbusError as error:
            log.warning("the broker does not answer: %s", error.message)
            return None

    def close(self) -> None:
        """Disconnects from the broker."""
        self._client.close()


def _bounds(least: int, most: int) -> Bounds:
    return Bounds(least, max(least, most))


def run_of_parent() -> str:
    """The name of this run of the system: the process id and the start time of supervisord, which
    is the parent of this process."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    return f"{parent}-{started}"


def main() -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        settings = load()
        logs.set_up(settings, "cluster")
        connect(settings)
    except (SettingError, ValueError) as error:
        print(f"tokenbus cluster: {error}", file=sys.stderr)
        return 2
    # Replaces Ray's signal handlers, which would end the process.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: signals.put(n))
    cluster = Cluster(settings, run_of_parent())
    try:
        cluster.run(signals)
    finally:
        cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
