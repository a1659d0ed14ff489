"""The guest processes of a worker: one for each tenant and vocabulary, up to a bound."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from weakref import ReferenceType, ref

from ....protocol.errors import Code, ControllerError, UnavailableError
from ....protocol.metrics import Series
from ..host import Host, Vocabulary
from ..pool import freeing_slot, waiting
from .launcher import Launcher
from .process import ChannelShares, GuestProcess
from .setup import Setup

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""Seconds without controllers and without requests after which a process is ended."""
KEEP_S = 1.0
"""A process with controllers may be ended, to make room for another process, if its last call was
at least this number of seconds ago."""
TURN_S = 10.0
"""If all processes were used recently, the oldest process that is not in a call may be ended to
make room. It must have run for this number of seconds. So the tenants take turns."""
MAX_WAIT_S = 15.0
"""Maximum seconds for which a call waits until another process can be ended to make room."""
LOOK_S = 0.1
"""Seconds between two attempts of a waiting call to make room."""
MAX_LAUNCHES = 3
"""A zygote is the parent of guest processes. If a zygote ends before it has forked a process,
another zygote is tried. This is the maximum number of zygotes that are tried for one process."""
MAX_DEATHS = 3
"""A sequence ends if several guest processes have died during its calls. If this happens to this
number of a tenant's sequences with the same module within ``DEATHS_S`` seconds, the module is
refused to the tenant."""
DEATHS_S = 60.0

_Key = tuple[str, int]
"""The tenant of a process, and the number of its vocabulary."""


class Deaths:
    """Counts the sequences that ended because guest processes had died during their calls. Each
    pair of tenant and module has its own count, because several tenants may have uploaded the same
    module. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[tuple[str, str], deque[float]] = {}

    def add(self, tenant: str, module: str) -> None:
        """Counts a sequence that has ended with its guest process."""
        with self._lock:
            self._forget()
            times = self._times.setdefault((tenant, module), deque(maxlen=MAX_DEATHS))
            times.append(self._clock())

    def check(self, tenant: str, module: str) -> None:
        """Raises ControllerError if a module of a tenant is refused at present."""
        with self._lock:
            self._forget()
            times = self._times.get((tenant, module), deque())
            if len(times) < MAX_DEATHS:
                return
            left_s = times[0] + DEATHS_S - self._clock()
        raise ControllerError(
            Code.QUARANTINED,
            f"calls of this module ended their process {MAX_DEATHS} times within {DEATHS_S:g} s, "
            f"so the module is refused for {left_s:.0f} s; look at the errors of its last requests",
            retry_after_s=left_s,
        )

    def _forget(self) -> None:
        """Removes counts that are older than ``DEATHS_S``. Called under the lock."""
        oldest = self._clock() - DEATHS_S
        for key, times in list(self._times.items()):
            while times and times[0] < oldest:
                times.popleft()
            if not times:
                del self._times[key]


class _NoRoomError(UnavailableError):
    """All guest processes are in use or were used recently."""


class _Known(NamedTuple):
    """A vocabulary that the launcher has sent to the zygote."""

    number: int
    vocabulary: ReferenceType[Vocabulary]


class ProcessTable:
    """The guest processes of a worker. Thread-safe.

    At most ``max_processes`` processes run. To make room for another process, the table ends a
    process that is not in a call. It prefers processes without controllers, and then the least
    recently used process. If all these processes have controllers and were used less than
    ``KEEP_S`` ago, the table may end only the oldest process, and only if this process has run for
    ``TURN_S``. The controllers of the ended process are replayed in a new process at their next
    calls.
    """

    def __init__(self, setup: Setup, max_processes: int) -> None:
        self._setup = setup
        self._max = max_processes
        self.deaths = Deaths()
        self._channels = ChannelShares.of_descriptors()
        self._lock = threading.Lock()
        self._spawning = threading.Lock()
        """The lock that is held while a process is started."""
        self._processes: dict[_Key, GuestProcess] = {}
        self._known: dict[int, _Known] = {}
        """The vocabularies that the zygote has, by the id of the Python object."""
        self._numbers = 0
        self._launcher = self._launch()

    def names(self) -> list[str]:
        """The names of the Python controllers that every process has. Waits until they are loaded.
        Raises RequestError if a controller cannot be loaded."""
        return self._launcher.names()

    def missing_layers(self) -> list[str]:
        """The layers of isolation that the processes do not have, with the reasons."""
        return self._launcher.missing_layers()

    def take(self, tenant: str, host: Host) -> GuestProcess:
        """The process of a tenant, which is started if necessary. If all processes are in use, the
        call waits up to ``MAX_WAIT_S``. Raises UnavailableError if the process cannot start."""
        until_s = time.monotonic() + MAX_WAIT_S
        while True:
            try:
                return self._take_now(tenant, host)
            except _NoRoomError:
                if time.monotonic() > until_s:
                    raise
            with waiting():
                time.sleep(LOOK_S)

    def tick(self) -> None:
        """Kills processes whose requests use too much time, or that use CPU time without a request.
        Ends idle processes."""
        now_s = time.monotonic()
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            if process.busy:
                process.watch(now_s)
            elif not process.controllers and now_s - process.last_used_s > IDLE_S:
                self._retire(process, "it was idle")
            if not self._setup.trusted:
                process.watch_usage(now_s)

    def series(self) -> list[Series]:
        """The metrics of the processes."""
        return [Series("num_guest_processes", {}, len(self._processes))]

    def pids(self) -> list[int]:
        """The ids of the running processes."""
        with self._lock:
            return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """Ends all processes."""
        self._launcher.close()

    # --- inside ---------------------------------------------------------------------------------

    def _take_now(self, tenant: str, host: Host) -> GuestProcess:
        """The process of a tenant, which is started if necessary. Raises UnavailableError if the
        process cannot be started now."""
        # The order of ``freeing_slot`` and ``_spawning`` matters: the lock is released before the
        # slot is taken again. In the other order, this thread could wait for a slot while threads
        # that wait for the lock have all slots.
        with freeing_slot(), self._spawning:
            for _ in range(MAX_LAUNCHES):
                launcher = self._living()
                try:
                    return self._take(launcher, tenant, host)
                except UnavailableError:
                    if launcher.alive:
                        raise
            raise UnavailableError(
                Code.WORKER_LOST,
                f"the parent of guest processes has ended {MAX_LAUNCHES} times before it started a "
                "process; try again, or read the log of the worker",
                retry_after_s=KEEP_S,
            )

    def _take(self, launcher: Launcher, tenant: str, host: Host) -> GuestProcess:
        """The process of a tenant. Called while ``_spawning`` is held."""
        key = (tenant, self._number(launcher, host.vocabulary))
        with self._lock:
            process = self._processes.get(key)
        if process is not None and not process.dead:
            return process
        self._make_room()
        process = GuestProcess(launcher.spawn(key[1]), host.memory, tenant, self._channels)
        with self._lock:
            self._processes[key] = process
        return process

    def _launch(self) -> Launcher:
        return Launcher(self._setup, self._on_death, self._on_loss)

    def _living(self) -> Launcher:
        if not self._launcher.alive:
            self._known.clear()
            self._launcher = self._launch()
        return self._launcher

    def _number(self, launcher: Launcher, vocabulary: Vocabulary) -> int:
        known = self._known.get(id(vocabulary))
        if known is not None and known.vocabulary() is vocabulary:
            return known.number
        for key, other in list(self._known.items()):
            if other.vocabulary() is None:
                launcher.forget_vocabulary(other.number)
                del self._known[key]
        self._numbers += 1
        launcher.add_vocabulary(self._numbers, vocabulary)
        self._known[id(vocabulary)] = _Known(self._numbers, ref(vocabulary))
        return self._numbers

    def _make_room(self) -> None:
        """Ends a process if ``max_processes`` are running. Raises _NoRoomError if all of them are
        in use or were used recently."""
        with self._lock:
            if len(self._processes) < self._max:
                return
            # Processes without controllers are the first candidates.
            unused = [each for each in self._processes.values() if not each.busy]
            unused.sort(key=lambda each: (bool(each.controllers), each.last_used_s))
        victim = unused[0] if unused else None
        now_s = time.monotonic()
        if victim is not None and victim.controllers and now_s - victim.last_used_s < KEEP_S:
            oldest = min(unused, key=lambda each: each.started_s)
            victim = oldest if now_s - oldest.started_s >= TURN_S else None
        if victim is None:
            raise _NoRoomError(
                Code.QUEUE_FULL,
                f"this worker runs {self._max} guest processes, and no more may run; "
                "try again, or start more controller workers",
                retry_after_s=KEEP_S,
            )
        self._retire(victim, "another tenant needed its place")

    def _retire(self, process: GuestProcess, why: str) -> None:
        self._remove(process)
        log.info("guest process %d is ended: %s", process.pid, why)
        process.kill(why)

    def _remove(self, process: GuestProcess) -> None:
        with self._lock:
            for key, other in list(self._processes.items()):
                if other is process:
                    del self._processes[key]

    def _on_death(self, pid: int, code: int) -> None:
        with self._lock:
            found = [each for each in self._processes.values() if each.pid == pid]
        for process in found:
            self._remove(process)
            process.died(code)
            log.info("guest process %d has ended: %s", pid, process.dead)

    def _on_loss(self) -> None:
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            self._remove(process)
            process.kill("the parent of its process has ended")
