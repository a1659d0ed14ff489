"""Lets the successor of a gateway start before the gateway's last stream has ended.

supervisord starts the successor when the process that supervisord started has exited. This process,
the *parent*, therefore does not serve requests. It starts a child process that serves them, and
waits for the child. On SIGUSR2 the child stops listening and the parent exits. The successor then
listens on the same port, while the child finishes its streams within ``linger_s``. On SIGTERM both
processes end within ``drain_s``.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals that the parent passes on to the serving process."""
_PR_SET_PDEATHSIG = 1
_LEFT = b"l"


class Leaving:
    """Lets the serving process make its parent exit."""

    def __init__(self, pipe: int) -> None:
        """``pipe``: the write end of a pipe that the parent reads."""
        self._pipe = pipe
        self._end_with_parent(signal.SIGKILL)

    def leave(self) -> None:
        """Makes the parent exit, and this process continue without its parent. Until this call, the
        end of the parent kills this process."""
        self._end_with_parent(0)
        # Signals to the process group of the successor must not reach this process.
        os.setsid()
        os.write(self._pipe, _LEFT)
        os.close(self._pipe)

    @staticmethod
    def _end_with_parent(number: int) -> None:
        """Sets the signal that this process receives when its parent ends. With ``number`` 0, this
        process receives no signal. Has an effect only on Linux."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        except (OSError, AttributeError):
            pass


def run(serve: Callable[[Leaving], int]) -> int:
    """Runs ``serve`` in a child process. In the child, this function returns the result of
    ``serve``. In the parent, it returns 0 when the child calls ``Leaving.leave``. If the child ends
    first, it returns the child's exit code, or 128 plus the number of the signal that ended the
    child. Must be called before the first thread starts."""
    reader, writer = os.pipe()
    parent = os.getpid()
    serving = os.fork()
    if not serving:
        os.close(reader)
        leaving = Leaving(writer)
        # The parent may have ended before ``Leaving`` requested a signal at the parent's end.
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
