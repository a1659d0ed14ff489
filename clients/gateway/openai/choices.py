"""The numbers and finish reasons of an answer's choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ....protocol.messages import ConstraintEnd
from ... import GeneratedSequence
from ..conversation.endings import is_cut
from ..errors import ApiError

FINISH_REASONS = {"stop": "stop", "controller": "stop", "length": "length", "error": "error"}
"""OpenAI's names for the bus's finish reasons."""


class Indexes:
    """Numbers the choices of an answer: first the requested choices of each prompt, in the order of
    the prompts, then the forks."""

    def __init__(self, counts: Sequence[int]) -> None:
        """``counts``: the number of choices of each prompt."""
        self._counts = counts
        *self._first, self._next = accumulate(counts, initial=0)
        self._forks: dict[tuple[int, int], int] = {}

    def of(self, place: int, seq: int) -> int:
        """The number of the choice for sequence ``seq`` of the prompt with the index ``place``."""
        if seq < self._counts[place]:
            return self._first[place] + seq
        number = self._forks.get((place, seq))
        if number is None:
            number = self._forks[place, seq] = self._next
            self._next += 1
        return number


def finish_reason(
    reason: str | None,
    called: bool = False,
    older: bool = False,
    ended: ConstraintEnd | None = None,
) -> str:
    """OpenAI's name of a finish reason. ``called``: whether the sequence has called a tool.
    ``older``: whether the request has the older form of tools, ``functions``. ``ended``: how the
    sequence's constraint ended."""
    if not called or reason == "error" or is_cut(reason, called, ended):
        return FINISH_REASONS.get(reason or "", "stop")
    return "function_call" if older else "tool_calls"


def check_some_succeeded(sequences: Sequence[GeneratedSequence]) -> None:
    """Raises ApiError 400 with the error of the first sequence if every sequence failed."""
    if sequences and all(s.finish_reason == "error" for s in sequences):
        first = sequences[0]
        raise ApiError(
            400, first.error or "the sequences failed", code=first.code or "controller_failed"
        )
