"""Counts the calls that a function makes. The count is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_calls(work: Callable[[], object]) -> int:
    """The number of calls of Python functions, and of steps of generators, in ``work()``."""
    count = 0

    def see(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
