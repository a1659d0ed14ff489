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
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CLIENT_NICENESS = 5
"""The nice value of the processes that run or compile clients' code. If the cores are busy, such a
process gets a third of the CPU time that a process of the system gets, for example the broker."""
LOW_NICENESS = 15
"""The nice value of a guest process's session during a long call. If the cores are busy, the
session gets a thirtieth of the CPU time that a session of the system gets."""
LONG_S = 0.05
"""Seconds after which a call counts as long."""
STARVED_S = 5.0
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
            _set_autogroup(os.getpid(), CLIENT_NICENESS)
    os.nice(CLIENT_NICENESS)


class Priority:
    """The priority of a process that has called ``lower_priority``. It is lowered during long
    calls. So a guest that computes until its limit takes little CPU time from other processes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._low = False

    def watch(self, share: float, call_s: float | None) -> None:
        """Sets the priority. ``share``: the share of a core's time that the process has used since
        the last call of this method. ``call_s``: seconds for which the oldest call in the process
        has run, not counting its waits for answers; None if no call runs."""
        if call_s is None or (call_s > STARVED_S and share < STARVED_SHARE):
            self._set(False)
        elif call_s > LONG_S and share > MIN_SHARE:
            self._set(True)

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
