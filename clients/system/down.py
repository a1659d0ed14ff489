"""Stopping a system that another process runs."""

from __future__ import annotations

import time

from ...protocol.settings import Settings
from .conf import STOP_MARGIN_S
from .faults import FAILED, NOT_RUNNING, SystemFault
from .processes import alive, started_by
from .run_dir import RunDir
from .supervisor import Control, end_leftovers


def end_system(settings: Settings) -> int:
    """Stops the system in the run directory of these settings, in the stop order; the exit code.

    Processes whose supervisord was killed are ended too. Raises SystemFault if no system runs, or
    if it does not stop.
    """
    run_dir = RunDir.of(settings)
    control = Control(run_dir)
    pid = control.pid()
    if pid is None:
        left = end_leftovers(run_dir, settings.drain_s + STOP_MARGIN_S)
        if not left:
            raise SystemFault(f"no system runs in {run_dir.path}", NOT_RUNNING)
        print(f"ended {_count(len(left))} whose supervisord was gone, in {run_dir.path}")
        return 0
    names = [p.name for p in control.processes() or [] if p.pid]
    control.shutdown()
    deadline = time.monotonic() + settings.drain_s + 3 * STOP_MARGIN_S
    while alive(pid) or started_by(run_dir):
        if time.monotonic() > deadline:
            raise SystemFault(
                f"supervisord (process {pid}) does not stop; see its log, {run_dir.supervisor_log}",
                FAILED,
            )
        if not alive(pid):
            # Gateways that have left their place: all streams have ended with the broker.
            end_leftovers(run_dir, STOP_MARGIN_S)
        time.sleep(0.05)
    print(f"ended {', '.join(names) or 'an idle supervisord'} in {run_dir.path}")
    return 0


def _count(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
