"""What compiling a pattern may take, and the error of a pattern that cannot be compiled."""

from __future__ import annotations

import time

LONGEST_PATTERN = 200_000
"""Characters of a pattern, or of all lexemes of a lexer together."""
MOST_ENTRIES = 2_000_000
"""Positions held by all states of a subset construction together, some 100 MB."""
_TICKS = 256


class RegexError(ValueError):
    """A pattern that is wrong, that asks for what no automaton can do, or that grows too large.

    ``pattern`` is the whole pattern, ``position`` the character at which the trouble starts (None
    where it is no single place), ``message`` what is wrong and what would be right.
    """

    def __init__(self, message: str, pattern: str, position: int | None = None) -> None:
        where = "" if position is None else f", at {position}"
        super().__init__(f"{message} (pattern {shown(pattern)}{where})")
        self.message = message
        self.pattern = pattern
        self.position = position


class Exhausted(Exception):
    """A bound was met; what names the bound. Blame finds out where, and makes it a RegexError."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Budget:
    """States and seconds that one compilation may take.

    Seconds are of this thread's CPU, so that a busy machine refuses no pattern.
    """

    def __init__(self, max_states: int, max_seconds: float) -> None:
        self.max_states = max_states
        self.max_seconds = max_seconds
        self._end = time.thread_time() + max_seconds
        self._ticks = 0

    def tick(self) -> None:
        """Called once for each small piece of work; raises Exhausted when the time is over."""
        self._ticks += 1
        if self._ticks >= _TICKS:
            self.check()

    def check(self) -> None:
        """Raises Exhausted when the time is over."""
        self._ticks = 0
        if time.thread_time() > self._end:
            raise Exhausted(f"takes longer than {self.max_seconds:g} s")

    def states(self, count: int) -> None:
        """Raises Exhausted when an automaton of so many states is too large."""
        if count > self.max_states:
            raise Exhausted(f"makes more than {self.max_states:,} states")

    def positions(self, count: int) -> None:
        """Raises Exhausted when a pattern spells out to so many characters that it is too large."""
        if count > 2 * self.max_states:
            raise Exhausted(f"expands to {count:,} positions, more than {2 * self.max_states:,}")

    def entries(self, count: int) -> None:
        """Raises Exhausted when so many places of the pattern are held at once."""
        if count > MOST_ENTRIES:
            raise Exhausted(f"needs more than {MOST_ENTRIES:,} positions in all states together")


def shown(text: str, longest: int = 80) -> str:
    """A text as an error shows it: quoted, and cut in its middle where it is long."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}\u2026{text[-longest // 4 :]}"
    return repr(text)
