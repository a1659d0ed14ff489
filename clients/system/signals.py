"""Waiting for a moment or for the user's wish to end, whichever comes first."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

WISHES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is entered; none of them raises anything.

    The handler writes to a pipe and does no more, so that it may interrupt any code. Only the main
    thread can enter it.
    """

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._count = 0
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in WISHES
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def count(self, wait_s: float = 0.0) -> int:
        """How many came until now; waits up to ``wait_s`` seconds for another one."""
        if select.select([self._reader], [], [], wait_s)[0]:
            self._count += len(os.read(self._reader, 64))
        return self._count

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            pass  # the pipe is full of them already
