"""Replaces every process of a running system, one after another, while the system serves."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...protocol.keys import KeyFault
from ...protocol.settings import Settings
from .conf import STOP_MARGIN_S
from .faults import FAILED, NOT_RUNNING, WRONG_SETTING, SystemFault
from .processes import arguments, supervisor_of
from .run_dir import RunDir
from .started import started_settings
from .supervisor import Control, ProcessState
from .watch import Watcher

READY_S = 600.0
"""Maximum time from the end of a replaced worker until its successor is ready, in seconds. The
successor may load a model."""
OTHERS_READY_S = 120.0
"""Maximum time from the end of a replaced broker or gateway until its successor is ready, in
seconds."""
ANSWER_S = 10.0
"""Maximum time until the broker answers, in seconds. Without an answer, no process is replaced."""
LOOK_EVERY_S = 0.1
GROUPS = ("broker", "state-worker", "controller-worker", "gpu-worker", "tool-worker", "gateway")
"""The groups of processes in the order of their replacement. Processes of other groups follow."""
LINGERS = "--lingers"
"""A gateway with this command-line flag handles SIGUSR2: it finishes its streams while its
successor serves."""


def roll(settings: Settings) -> int:
    """Replaces the processes of the system in the run directory of these settings; returns the exit
    code.

    Another worker of the same kind continues the streams of a replaced worker. If there is only one
    worker of its kind, its successor continues them. The broker's successor adopts the streams that
    workers report. A gateway finishes its streams while its successor accepts new requests.

    The new processes have the settings with which the system was started. Raises SystemFault if no
    system runs, if its broker does not answer, or if a process does not end or start again in time.
    """
    control = Control(RunDir.of(settings))
    processes = control.processes()
    if processes is None:
        raise _unreachable(control.run_dir)
    running = [process.pid for process in processes if process.pid]
    settings = next(filter(None, map(started_settings, running)), settings)
    try:
        watcher = Watcher(control, settings)
    except KeyFault as fault:
        raise SystemFault(str(fault), WRONG_SETTING) from None
    try:
        _check_broker(watcher, processes, settings)
        for process in in_order(processes):
            if process.pid:
                began = time.monotonic()
                _replace(control, watcher, process, settings)
                print(f"replaced {process.name} in {time.monotonic() - began:.1f} s", flush=True)
    finally:
        watcher.close()
    return 0


def in_order(processes: Iterable[ProcessState]) -> list[ProcessState]:
    """The processes in the order of their replacement (``GROUPS``)."""
    rank = {group: number for number, group in enumerate(GROUPS)}
    return sorted(processes, key=lambda process: rank.get(process.group, len(GROUPS)))


def _unreachable(run_dir: RunDir) -> SystemFault:
    """The error for a run directory in which no supervisord answers."""
    pid = supervisor_of(run_dir)
    if pid is None:
        return SystemFault(f"no system runs in {run_dir.path}", NOT_RUNNING)
    return SystemFault(
        f"supervisord (process {pid}) does not answer at its socket {run_dir.supervisor_socket}; "
        f"stop the system with: {run_dir.down_command}; then start it again"
    )


def _check_broker(watcher: Watcher, processes: list[ProcessState], settings: Settings) -> None:
    """Raises SystemFault if the system has brokers but none of them answers."""
    if settings.join or not any(process.group == "broker" for process in processes):
        return
    deadline = time.monotonic() + ANSWER_S
    while not watcher.answers():
        if time.monotonic() > deadline:
            raise SystemFault(
                f"the broker at {settings.front_endpoint} does not answer, so no process was "
                f"replaced; see the logs in {watcher.run_dir.logs}"
            )
        time.sleep(LOOK_EVERY_S)


def _replace(control: Control, watcher: Watcher, process: ProcessState, settings: Settings) -> None:
    """Replaces one process, and waits until its successor is ready."""
    control.signal(process, "USR2" if _lingers(process.pid) else "TERM")
    gone_by = time.monotonic() + settings.drain_s + 2 * STOP_MARGIN_S
    loads = process.group not in ("broker", "gateway")
    ready_by = gone_by + (READY_S if loads else OTHERS_READY_S)
    while True:
        shown = next((s for s in watcher.look().shown if s.process.name == process.name), None)
        replaced = shown is not None and shown.process.pid not in (0, process.pid)
        if shown is not None and replaced and shown.serves:
            return
        if shown is None or shown.process.failed or time.monotonic() > ready_by:
            raise SystemFault(
                f"{process.name} was ended, and its successor is not ready; see the logs in "
                f"{control.run_dir.logs}",
                FAILED,
            )
        if not replaced and time.monotonic() > gone_by:
            raise SystemFault(f"{process.name} (process {process.pid}) does not end", FAILED)
        time.sleep(LOOK_EVERY_S)


def _lingers(pid: int) -> bool:
    """Whether a process is a gateway that handles SIGUSR2. A gateway of an older release does not:
    the signal would kill it."""
    return LINGERS.encode() in arguments(pid)
