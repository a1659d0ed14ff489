"""Waits for a stop signal, with a timeout."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts the stop signals (Ctrl-C, SIGTERM, SIGHUP) that arrive in its ``with`` block. In this
    block, they neither raise an exception nor end the process.

    The handler only writes to a pipe, so that it may interrupt any code. Only the main thread may
    use this class.
    """

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._count = 0
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in STOP_SIGNALS
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
        """The number of signals so far. Waits up to ``wait_s`` seconds for another signal."""
        if select.select([self._reader], [], [], wait_s)[0]:
            self._count += len(os.read(self._reader, 64))
        return self._count

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            pass  # The pipe is full.
