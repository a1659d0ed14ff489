"""Measures the CPU time of a thread, including the guest processes that work for the thread. Also
computes the part of this time that counts towards the limit of a call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

QUESTION_S = 0.0001
"""A *question* is a request of a guest to the worker during a call, such as an access to a
variable. Each question counts as this number of seconds of CPU time, towards the limit of the call.
The real CPU time of a question is not counted, because it can triple on a busy machine. A correct
call with several questions could then fail. ``process.MAX_QUESTIONS`` also bounds the number of
questions."""


class _ThisThread(threading.local):
    elsewhere_s = 0.0
    """CPU time that guest processes spent for this thread."""
    uncounted_s = 0.0
    """CPU time of this thread that does not count towards the limits of calls."""


_this_thread = _ThisThread()


def add_guest_cpu(seconds: float) -> None:
    """Counts CPU time that a guest process spent for this thread."""
    _this_thread.elsewhere_s += seconds


def thread_cpu_s() -> float:
    """The CPU time of this thread and of the guest processes that worked for it, in seconds."""
    return time.thread_time() + _this_thread.elsewhere_s


def call_cpu_s() -> float:
    """The CPU time of this thread that counts towards the limits of calls, in seconds."""
    return time.thread_time() - _this_thread.uncounted_s


@contextlib.contextmanager
def question() -> Iterator[None]:
    """Wraps a question to the worker. Instead of the question's CPU time, ``QUESTION_S`` counts
    towards the limit of the call that this thread runs."""
    began_s = time.thread_time()
    try:
        yield
    finally:
        _this_thread.uncounted_s += time.thread_time() - began_s - QUESTION_S
