"""Tracks the choices of an answer while they grow: their texts, ends and receipts."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from ....protocol.messages import Token
from ... import GeneratedSequence
from ..conversation.constraints import Constraint, Receipt
from ..errors import ApiError

FINISH_REASONS = {"stop": "stop", "controller": "stop", "length": "length", "error": "error"}
"""OpenAI's names of the bus's finish reasons."""


class GrowingChoice:
    """The text of one sequence so far, from which forks begin and tokens are removed."""

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self.pieces = list(pieces)
        self.logs = ""
        self.storage: list[object] = []

    def take(self, entry: Token) -> tuple[int, str]:
        """Adds an entry; returns the number of characters that it removes, and its text."""
        removed = 0
        if entry.backtrack:
            cut = max(0, len(self.pieces) - entry.backtrack)
            removed = sum(map(len, self.pieces[cut:]))
            del self.pieces[cut:]
        text = "" if entry.text is UNSET else entry.text
        if entry.token is not None or not self.pieces:
            self.pieces.append(text)
        else:
            self.pieces[-1] += text
        self.logs += entry.logs
        self.storage += entry.storage
        return removed, text


class GrowingChoices:
    """The choices of one prompt's stream, by their sequences."""

    def __init__(self) -> None:
        self._by_seq: dict[int, GrowingChoice] = {}

    def take(self, entry: Token) -> tuple[int, str, GrowingChoice]:
        """Adds an entry; returns the number of removed characters, the new text, and its choice.

        The text of a fork begins with that of the sequence from which it was forked.
        """
        choice = self._by_seq.get(entry.seq)
        inherited = ""
        if choice is None:
            parent = self._by_seq.get(entry.parent) if entry.parent is not None else None
            before = parent.pieces[: entry.pos + entry.backtrack] if parent is not None else []
            choice = self._by_seq[entry.seq] = GrowingChoice(before)
            inherited = "".join(before)
        removed, text = choice.take(entry)
        if inherited:
            # The client has not received a part of this choice.
            return 0, inherited[: len(inherited) - removed] + text, choice
        return removed, text, choice


class Indexes:
    """The numbers of choices: ``n`` numbers for each prompt in order, then numbers for forks."""

    def __init__(self, prompts: int, n: int) -> None:
        self._n = n
        self._next = prompts * n
        self._forks: dict[tuple[int, int], int] = {}

    def of(self, place: int, seq: int) -> int:
        """The number of sequence ``seq`` of the prompt at ``place``."""
        if seq < self._n:
            return place * self._n + seq
        number = self._forks.get((place, seq))
        if number is None:
            number = self._forks[place, seq] = self._next
            self._next += 1
        return number


def finish_reason(reason: str | None, called: bool = False) -> str:
    """OpenAI's name of a finish reason. ``called``: the sequence has called a tool."""
    name = FINISH_REASONS.get(reason or "", "stop")
    return "tool_calls" if called and name == "stop" else name


def receipt_of(
    constraint: Constraint | None, sequence: GeneratedSequence | GrowingChoice, end: Token | None
) -> Receipt | None:
    """The receipt of an ended choice; None if the receipt would be empty.

    ``end`` is the last entry; None: ``sequence`` has the fields of the end.
    """
    if end is not None:
        ended, error, code = end.constraint, end.error, end.code
    else:
        assert isinstance(sequence, GeneratedSequence)
        ended, error, code = sequence.constraint, sequence.error, sequence.code
    receipt = Receipt(
        constraint=constraint.label if constraint is not None and ended is not None else None,
        ended=ended,
        logs=sequence.logs,
        storage=list(sequence.storage),
        error=error or "",
        code=code or "",
    )
    return receipt if receipt != Receipt() else None


def check_some_succeeded(sequences: Sequence[GeneratedSequence]) -> None:
    """Raises ApiError 400 if every sequence failed, with the reason of the first one."""
    if sequences and all(s.finish_reason == "error" for s in sequences):
        first = sequences[0]
        raise ApiError(
            400, first.error or "the sequences failed", code=first.code or "controller_failed"
        )
