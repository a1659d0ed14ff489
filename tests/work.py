"""Counts the calls that a function makes. The count is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_calls(work: Callable[[], object], *, builtin: bool = False) -> int:
    """The number of calls of Python functions, and of steps of generators, in ``work()``.

    ``builtin``: also count the calls of functions that are written in C, like ``str.endswith``.
    """
    count = 0
    counted = {"call", "c_call"} if builtin else {"call"}

    def see(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in counted

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
