"""The CPU time of a thread and of the guest processes that work for the thread."""

from __future__ import annotations

import threading
import time


class _Elsewhere(threading.local):
    seconds = 0.0


_elsewhere = _Elsewhere()


def add_guest_cpu(seconds: float) -> None:
    """Counts CPU time that a guest process spent for this thread."""
    _elsewhere.seconds += seconds


def thread_cpu_s() -> float:
    """The CPU time of this thread and of the guest processes that worked for it, in seconds."""
    return time.thread_time() + _elsewhere.seconds
