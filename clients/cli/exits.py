"""The exit codes of the commands. Also prints errors as one line on stderr, and formats numbers
with their nouns."""

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
"""An internal error occurred, a process of the system failed, or a check has a negative result,
such as a text that the grammar refuses."""
WRONG_USAGE = 2
"""A flag, a variable or a file is not valid."""
UNAVAILABLE = 3
"""The broker or a worker is missing, or a queue is full; the same command may succeed later."""
REFUSED = 4
"""The request is not valid. Or it failed for a reason that has no other exit code, such as an error
of its controller."""
TIMED_OUT = 5
INTERRUPTED = 130
"""The command was interrupted by Ctrl-C."""


def one_line(text: str) -> str:
    """Joins the lines of a text with ``|``; leaves out empty lines."""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())


def counted(count: int, noun: str) -> str:
    """A number and its noun: ``1 stream``, ``2 streams``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def report(error: TokenbusError) -> int:
    """Prints ``error`` on one line on stderr; returns its exit code."""
    print(f"tokenbus: {one_line(str(error))}", file=sys.stderr)
    if isinstance(error, UnavailableError):
        return UNAVAILABLE
    if isinstance(error, RequestTimeoutError):
        return TIMED_OUT
    return FAILED if error.code == Code.INTERNAL else REFUSED
