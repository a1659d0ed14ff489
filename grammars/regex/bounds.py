"""The limits on the resources of a compilation, and the errors of patterns that cannot be
compiled."""

from __future__ import annotations

import time

MAX_PATTERN_CHARACTERS = 200_000
"""Maximum number of characters of a pattern. Also the maximum for all lexemes of a lexer
together."""
MAX_ENTRIES = 2_000_000
"""In a subset construction, each state is a set of positions (``positions.py``). The sets of all
states may together have at most this number of positions, which take about 100 MB."""
_TICKS = 256


class RegexError(ValueError):
    """A pattern that is not valid, uses an unsupported construct, or exceeds a limit.

    ``pattern`` is the whole pattern, or a text of a choice. ``position`` is the index of the first
    faulty character, or None if the error does not have a single place. ``message`` says what is
    wrong and what would be right.
    """

    def __init__(self, message: str, pattern: str, position: int | None = None) -> None:
        where = "" if position is None else f", at {position}"
        super().__init__(f"{message} (pattern {shown(pattern)}{where})")
        self.message = message
        self.pattern = pattern
        self.position = position


class Exhausted(Exception):
    """A compilation exceeded a limit. ``what`` completes a sentence about the pattern, such as
    "needs more than 9 states". The caller finds the faulty part with ``blame`` and raises a
    RegexError."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Budget:
    """The states and seconds that one compilation may use.

    Seconds are CPU time of this thread, so a pattern does not fail because the machine is busy.
    """

    def __init__(self, max_states: int, max_seconds: float) -> None:
        self.max_states = max_states
        self.max_seconds = max_seconds
        self._end = time.thread_time() + max_seconds
        self._ticks = 0

    def tick(self) -> None:
        """Counts one small unit of work. Raises Exhausted when the time is used up."""
        self._ticks += 1
        if self._ticks >= _TICKS:
            self.check()

    def check(self) -> None:
        """Raises Exhausted when the time is used up."""
        self._ticks = 0
        if time.thread_time() > self._end:
            raise Exhausted(f"takes longer than {self.max_seconds:g} s")

    def states(self, count: int) -> None:
        """Raises Exhausted if ``count`` states are more than the limit."""
        if count > self.max_states:
            raise Exhausted(f"needs more than {self.max_states:,} states")

    def positions(self, count: int) -> None:
        """``count``: the number of positions of a pattern whose repetitions are expanded. Raises
        Exhausted if it is above twice the maximum number of states."""
        if count > 2 * self.max_states:
            raise Exhausted(f"expands to {count:,} positions, more than {2 * self.max_states:,}")

    def entries(self, count: int) -> None:
        """Raises Exhausted if the states together contain more than ``MAX_ENTRIES`` positions."""
        if count > MAX_ENTRIES:
            raise Exhausted(f"needs more than {MAX_ENTRIES:,} positions in all states together")


def shown(text: str, longest: int = 80) -> str:
    """A text for error messages. It is quoted, and shortened in the middle if it is long."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}\u2026{text[-longest // 4 :]}"
    return repr(text)
