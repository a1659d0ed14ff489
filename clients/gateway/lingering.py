"""A gateway that can leave its place to the next one before its last stream has ended.

supervisord starts a process again when it has exited. So what it starts here does nothing but wait
for another process, which serves. On SIGUSR2 the latter stops listening, finishes what it has,
however long that takes within its bound, and goes on as a process of its own: the first one exits,
and its successor listens on the same port. On SIGTERM both end, within ``drain_s``.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals for the process that serves."""
_PR_SET_PDEATHSIG = 1
_LEFT = b"l"


class Leaving:
    """How the process that serves makes the one before it exit."""

    def __init__(self, pipe: int) -> None:
        """``pipe``: of which the other process reads the end."""
        self._pipe = pipe
        self._end_with_parent(signal.SIGKILL)

    def leave(self) -> None:
        """The other process exits now, and this one does not depend on it any more."""
        self._end_with_parent(0)
        # No signal to the group of the next one is for this process.
        os.setsid()
        os.write(self._pipe, _LEFT)
        os.close(self._pipe)

    @staticmethod
    def _end_with_parent(number: int) -> None:
        """Which signal this process gets where its parent dies; 0: none. Linux only."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        except (OSError, AttributeError):
            pass


def run(serve: Callable[[Leaving], int]) -> int:
    """Runs ``serve`` in a process of its own, where it returns what that returns; and waits until
    that process has ended or has left: its exit code, or 0. To be called before any thread was
    made."""
    reader, writer = os.pipe()
    parent = os.getpid()
    serving = os.fork()
    if not serving:
        os.close(reader)
        leaving = Leaving(writer)
        # The parent may have died before that.
        return serve(leaving) if os.getppid() == parent else 1
    os.close(writer)

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(serving, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    if os.read(reader, 1) == _LEFT:
        return 0
    _, status = os.waitpid(serving, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
