"""The priorities of processes that run or compile clients' code.

In a long call, such a process gets the policy ``SCHED_IDLE``: it runs while the cores have nothing
else to do. A low nice value alone is not enough: a thread that wakes up is not placed on a core
that runs a thread with a low nice value. Two threads of the system then share one core while a
guest has the other.

A kernel with autogroup groups processes by session, and divides the cores among sessions by the
nice values of the sessions. ``SCHED_IDLE`` only applies within a session. So these processes stay
in the worker's session, with the other processes of the system. There are two exceptions, in which
these processes become separate sessions. If the worker leads a session, the session probably has no
other process of the system. And only a process with the right to raise priorities can end
``SCHED_IDLE``, while the nice value of a session needs no right.

Within a session, each running call of a process has a thread of its own. If a process uses much CPU
time, its nice value grows with the number of its calls. All its calls together then weigh about as
much as one.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CLIENT_NICENESS = 5
"""The nice value of the processes that run or compile clients' code. If the cores are busy, such a
process gets a third of the CPU time that a process of the system gets, for example the broker."""
HEAVY_SHARE = 0.75
"""A process uses much CPU time if it uses more than this share of a core's time."""
HEAVY_CHECKS = 20
"""Number of calls of ``watch``, one each 0.05 s, for which a process counts as using much CPU time
after it has used less."""
MAX_NICENESS = 19
"""The highest nice value, which is that of a process with more than 20 running calls."""
NICENESS_RATIO = 1.25
"""The factor by which the kernel divides a thread's weight for each further nice value."""
LOW_NICENESS = 15
"""The nice value of a guest process's session during a long call. If the cores are busy, the
session gets a thirtieth of the CPU time that a session of the system gets."""
LONG_S = 0.05
"""Seconds after which a call counts as long."""
STARVED_S = 1.0
"""Seconds after which a long call that gets little CPU time has the usual priority again. With a
low priority on a machine without free cores, the call could exceed the time limits of its
request."""
STARVED_SHARE = 0.2
"""A long call gets little CPU time if its process uses less than this share of a core's time."""
MIN_SHARE = 0.1
"""A call counts as long only if its process uses at least this share of a core's time. A call that
mostly waits does not count as long."""


def _may_raise() -> bool:
    """Whether this process may raise the priorities of processes. Tries it with its own
    priority."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, own - 1)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, own)
    return True


_MAY_RAISE = _may_raise()
_OF_LEADER = os.getsid(0) == os.getppid()
"""Whether the process that started this one leads the session."""


def lower_priority() -> None:
    """Gives this process the nice value ``CLIENT_NICENESS`` and a separate process group, or a
    separate session."""
    with contextlib.suppress(PermissionError):  # The process leads a group or a session already.
        if _MAY_RAISE and not _OF_LEADER:
            os.setpgid(0, 0)
        else:
            os.setsid()
    os.nice(CLIENT_NICENESS)


class Priority:
    """The priority of a process that has called ``lower_priority``. It is lowered during long
    calls. So a guest that computes until its limit takes little CPU time from other processes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._low: bool | None = None
        """Whether the priority is lowered; None until it is first set."""
        self._heavy = 0
        """Number of further calls of ``watch`` for which the process counts as using much CPU
        time."""

    def watch(self, share: float, call_s: float | None, calls: int = 1) -> None:
        """Sets the priority. ``share``: the share of a core's time that the process has used since
        the last call of this method. ``call_s``: seconds for which the oldest call in the process
        has run, not counting its waits for answers; None if no call runs. ``calls``: number of
        running calls."""
        if self._low is None:
            self._set(False)
        if share > HEAVY_SHARE:
            self._heavy = HEAVY_CHECKS
            self._divide(max(1, calls))
        elif self._heavy:
            self._heavy -= 1
            if not self._heavy:
                self._divide(1)
        if call_s is None or (call_s > STARVED_S and share < STARVED_SHARE):
            self._set(False)
        elif call_s > LONG_S and share > MIN_SHARE:
            self._set(True)

    def _divide(self, calls: int) -> None:
        """Divides the weight of one call among ``calls`` threads, in a session with processes of
        the system."""
        more = math.ceil(math.log(calls, NICENESS_RATIO))
        niceness = min(CLIENT_NICENESS + more, MAX_NICENESS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if _MAY_RAISE and os.getsid(self._pid) != self._pid:
                # This sets the nice values of all threads of the process.
                os.setpriority(os.PRIO_PGRP, self._pid, niceness)

    def _set(self, low: bool) -> None:
        if low == self._low:
            return
        try:
            if _MAY_RAISE:
                self._set_policy(os.SCHED_IDLE if low else os.SCHED_OTHER)
            if os.getsid(self._pid) == self._pid:
                _set_autogroup(self._pid, LOW_NICENESS if low else CLIENT_NICENESS)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # The process has ended, or is another user's, which needs CAP_SYS_NICE.
        except BlockingIOError:
            # The kernel refuses a value soon after another. The next call of ``watch`` tries again.
            return
        self._low = low

    def _set_policy(self, policy: int) -> None:
        """Sets the policy of all threads, except the one that calls this method."""
        for name in os.listdir(f"/proc/{self._pid}/task"):
            if (thread := int(name)) != threading.get_native_id():
                with contextlib.suppress(ProcessLookupError):  # The thread has ended.
                    os.sched_setscheduler(thread, policy, os.sched_param(0))


@contextlib.contextmanager
def long_call() -> Iterator[None]:
    """Lowers the priority of this process, as ``Priority`` does, while the block runs."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch_this_process, args=(ended,))
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch_this_process(ended: threading.Event) -> None:
    priority = Priority(os.getpid())
    began_s = before_s = time.monotonic()
    before_cpu_s = time.process_time()
    while not ended.wait(LONG_S):
        now_s, cpu_s = time.monotonic(), time.process_time()
        priority.watch((cpu_s - before_cpu_s) / (now_s - before_s), now_s - began_s)
        before_s, before_cpu_s = now_s, cpu_s
    priority.watch(0.0, None)


def _set_autogroup(pid: int, niceness: int) -> None:
    """Sets the nice value of a session, if the kernel groups processes by session. Raises
    BlockingIOError if the kernel has refused the value, because another process has just set a
    value."""
    if Path("/proc/self/autogroup").exists():
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
