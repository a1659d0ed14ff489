"""Replacing every process of a running system, one behind the other, while it serves."""

from __future__ import annotations

import time
from pathlib import Path

from ...protocol.settings import Settings
from .conf import STOP_MARGIN_S
from .faults import FAILED, NOT_RUNNING, SystemFault
from .run_dir import RunDir
from .supervisor import Control, ProcessState
from .watch import Watcher

READY_S = 600.0
"""How long a process that was replaced may take until it is ready: a model may be loaded."""
LOOK_EVERY_S = 0.1
LINGERS = "--lingers"
"""The flag of such a gateway."""


def roll(settings: Settings) -> int:
    """Replaces the processes of the system in the run directory of these settings; the exit code.

    A worker hands its streams over to another of its kind; where it is the only one, its
    successor continues them. The broker's successor adopts what the workers report. A gateway
    leaves its place, and finishes its streams beside its successor. Raises SystemFault if no system
    runs, or a process does not come back.
    """
    control = Control(RunDir.of(settings))
    processes = control.processes()
    if processes is None:
        raise SystemFault(f"no system runs in {control.run_dir.path}", NOT_RUNNING)
    watcher = Watcher(control, settings)
    try:
        for process in processes:
            if process.pid:
                began = time.monotonic()
                _replace(control, watcher, process, settings)
                print(f"replaced {process.name} in {time.monotonic() - began:.1f} s", flush=True)
    finally:
        watcher.close()
    return 0


def _replace(control: Control, watcher: Watcher, process: ProcessState, settings: Settings) -> None:
    """Replaces one process, and waits until its successor is ready."""
    control.signal(process, "USR2" if _lingers(process.pid) else "TERM")
    gone_by = time.monotonic() + settings.drain_s + 2 * STOP_MARGIN_S
    ready_by = gone_by + READY_S
    while True:
        shown = next((s for s in watcher.look().shown if s.process.name == process.name), None)
        replaced = shown is not None and shown.process.pid not in (0, process.pid)
        if shown is not None and replaced and shown.serves:
            return
        if shown is None or shown.process.failed or time.monotonic() > ready_by:
            raise SystemFault(
                f"{process.name} was ended and is not ready again; see the logs in "
                f"{control.run_dir.logs}",
                FAILED,
            )
        if not replaced and time.monotonic() > gone_by:
            raise SystemFault(f"{process.name} (process {process.pid}) does not end", FAILED)
        time.sleep(LOOK_EVERY_S)


def _lingers(pid: int) -> bool:
    """Whether a process leaves its place on SIGUSR2; one of an older release would be killed."""
    try:
        return LINGERS.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
