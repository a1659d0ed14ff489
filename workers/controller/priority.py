"""The priorities of processes that run or compile clients' code.

The kernel divides busy cores among processes by their nice values. A kernel with autogroup groups
processes by session, and divides the cores among sessions by the nice values of the sessions. So
each of these processes becomes a separate session, and both values are set.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

CLIENT_NICENESS = 5
"""The nice value of the processes that run or compile clients' code. If the cores are busy, such a
process gets a third of the CPU time that a process of the system gets, for example the broker."""
LOW_NICENESS = 15
"""The nice value of a guest process during a long call. If the cores are busy, such a process gets
a thirtieth of the CPU time that a process of the system gets."""
LONG_S = 0.05
"""Seconds after which a call counts as long."""
STARVED_S = 5.0
"""Seconds after which a long call gets the usual priority back. With a low priority on a machine
without free cores, the call could exceed the time limits of its request."""
MIN_SHARE = 0.1
"""A call counts as long only if its process uses at least this share of a core's time. A call that
mostly waits does not count as long."""
_CAP_SYS_NICE = 1 << 23


def lower_priority() -> None:
    """Makes this process a separate session with the nice value ``CLIENT_NICENESS``."""
    with contextlib.suppress(PermissionError):  # The process leads a session already.
        os.setsid()
    os.nice(CLIENT_NICENESS)
    _set_autogroup(os.getpid(), CLIENT_NICENESS)


class Priority:
    """The priority of a guest process. It is lowered during long calls. So a guest that computes
    until its limit takes little CPU time from other processes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._niceness: int | None = CLIENT_NICENESS

    def watch(self, share: float, call_s: float | None) -> None:
        """Sets the priority. ``share``: the share of a core's time that the process has used since
        the last call of this method. ``call_s``: seconds for which the oldest call in the process
        has run, not counting its waits for answers; None if no call runs."""
        if call_s is None or call_s > STARVED_S:
            self._set(CLIENT_NICENESS)
        elif call_s > LONG_S and share > MIN_SHARE:
            self._set(LOW_NICENESS)

    def _set(self, niceness: int) -> None:
        if niceness == self._niceness:
            return
        # A process without the right to raise priorities cannot lower the nice value of a process.
        # But it can lower the nice value of a session.
        if _MAY_RAISE:
            with contextlib.suppress(ProcessLookupError):
                # This sets the nice values of all threads of the process.
                os.setpriority(os.PRIO_PGRP, self._pid, niceness)
        # A value that the kernel has refused is set again at the next call of ``watch``.
        self._niceness = niceness if _set_autogroup(self._pid, niceness) else None


def _set_autogroup(pid: int, niceness: int) -> bool:
    """Sets the nice value of a session, if the process exists and the kernel groups processes by
    session. Returns False if the kernel has refused the value, for example because another process
    has just set a value."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return True


def _may_raise() -> bool:
    """Whether this process may raise the priorities of processes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & _CAP_SYS_NICE)


_MAY_RAISE = _may_raise()
