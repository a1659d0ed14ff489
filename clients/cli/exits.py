"""Exit codes of the command line, and errors as the one line that people see."""

from __future__ import annotations

import sys

from ...protocol.errors import (
    Code,
    RequestTimeoutError,
    TokenbusError,
    UnavailableError,
)

OK = 0
FAILED = 1
"""A defect, or a process of the system failed."""
WRONG_USAGE = 2
"""A flag, a variable or a file is wrong; argparse's code too."""
UNAVAILABLE = 3
"""No broker, no worker, or no room; the same command may succeed later."""
REFUSED = 4
"""The request is wrong."""
TIMED_OUT = 5
INTERRUPTED = 130
"""Ctrl-C."""


def one_line(text: str) -> str:
    """A text of several lines, as those of a parser that points at a place, as one."""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())


def report(error: TokenbusError, front: str) -> int:
    """Prints one line about ``error`` on stderr; the exit code that belongs to it."""
    hint = ""
    if error.code == Code.CONNECTION_LOST:
        hint = (
            "; start a system with: tokenbus up"
            if front == "tcp://127.0.0.1:5555"
            else "; is that the --front of a running system?"
        )
    print(f"tokenbus: {one_line(str(error))}{hint}", file=sys.stderr)
    if isinstance(error, UnavailableError):
        return UNAVAILABLE
    if isinstance(error, RequestTimeoutError):
        return TIMED_OUT
    return FAILED if error.code == Code.INTERNAL else REFUSED
