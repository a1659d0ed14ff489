"""Stops a system that another process runs."""

from __future__ import annotations

import signal
import time

from ...protocol.settings import Settings
from .conf import CLUSTER, STOP_MARGIN_S
from .faults import FAILED, NOT_RUNNING, SystemFault
from .processes import alive, arguments, send, started_by, supervisor_of
from .run_dir import RunDir
from .started import started_settings
from .supervisor import Control, end_leftovers

BROKER = "tokenbus.broker"
"""The module of the broker."""


def end_system(settings: Settings) -> int:
    """Stops the system in the run directory of these settings, in supervisord's stop order; returns
    the exit code.

    If supervisord does not answer at its socket, this function ends it with signals. If supervisord
    has already ended, this function ends the remaining processes with signals. Raises SystemFault
    if no system runs, or if the system does not stop within its own ``drain_s`` plus a margin.
    """
    run_dir = RunDir.of(settings)
    control = Control(run_dir)
    answering = control.pid()
    pid = answering if answering is not None else supervisor_of(run_dir)
    started = started_by(run_dir)
    settings = next(filter(None, map(started_settings, started)), settings)
    if pid is None:
        left = end_leftovers(run_dir, settings.drain_s + STOP_MARGIN_S)
        if not left:
            raise SystemFault(f"no system runs in {run_dir.path}", NOT_RUNNING)
        print(f"ended {_count(len(left))} in {run_dir.path}; supervisord had already ended")
        return 0
    names = [_count(len(started))]
    if answering is not None:
        names = [p.name for p in control.processes() or [] if p.pid] or names
        control.shutdown()
    else:
        _shut_down(pid, started)
    deadline = time.monotonic() + settings.drain_s + 3 * STOP_MARGIN_S
    while alive(pid) or started_by(run_dir):
        if time.monotonic() > deadline:
            raise SystemFault(
                f"supervisord (process {pid}) does not stop; see its log {run_dir.supervisor_log}",
                FAILED,
            )
        if not alive(pid):
            # A gateway that was replaced may still finish its streams. supervisord does not stop
            # such a gateway. It can be ended now, because the broker has ended.
            end_leftovers(run_dir, STOP_MARGIN_S)
        time.sleep(0.05)
    print(f"ended {', '.join(names)} in {run_dir.path}")
    return 0


def _shut_down(supervisor: int, started: list[int]) -> None:
    """Stops a system whose supervisord does not accept commands, with signals. The effect is the
    same as that of ``Control.shutdown``."""
    modules = {BROKER.encode(), CLUSTER.encode()}
    send([pid for pid in started if modules & set(arguments(pid))], signal.SIGUSR1)
    send([supervisor], signal.SIGTERM)


def _count(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
