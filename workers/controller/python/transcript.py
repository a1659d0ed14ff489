"""All that a script was told, in order, so that a fork of it can be told the same again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

from ....protocol.errors import Code, ControllerError


class Question(NamedTuple):
    """What a script asked: a call of its context, and the arguments that were given."""

    call: str
    arguments: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.call}({given if len(given) <= 200 else given[:199] + '…'})"


class Entry(NamedTuple):
    """A question, its answer or error, and what became of the tokens until it was answered."""

    question: Question
    answer: object
    error: ControllerError | None
    kept: int
    """How many of the tokens before it stayed."""
    tokens: tuple[int, ...]
    """The tokens after those."""


class Transcript:
    """The tokens of a script's sequence, and its questions and answers.

    A copy starts from the beginning: it replays the answers until the question that the original
    waits at, ``until``; from there on it is live.
    """

    def __init__(self) -> None:
        self.prompt_length = 0
        self.tokens: list[int] = []
        self.failure: ControllerError | None = None
        """Set once the script has asked something else than the first time."""
        self._entries: list[Entry] = []
        self._kept = 0
        self._next = 0
        self._until: Question | None = None

    @property
    def replaying(self) -> bool:
        """Whether what the script does now was done before, by the sequence it is a fork of."""
        return self._until is not None

    def begin(self, prompt: Sequence[int]) -> None:
        """The sequence starts with these tokens."""
        self.tokens = list(prompt)
        self.prompt_length = self._kept = len(self.tokens)

    def change(self, tokens: Sequence[int], backtrack: int) -> None:
        """Tokens were dropped and appended."""
        if backtrack:
            del self.tokens[len(self.tokens) - backtrack :]
            self._kept = min(self._kept, len(self.tokens))
        self.tokens += tokens

    def add(self, question: Question, answer: object, error: ControllerError | None = None) -> None:
        """A live question was answered."""
        kept = self._kept
        self._entries.append(Entry(question, answer, error, kept, tuple(self.tokens[kept:])))
        self._kept = len(self.tokens)

    def copy(self, until: Question) -> Transcript:
        """One for a fork, whose script waits ``until`` the copy's script asks this."""
        copied = Transcript()
        copied.begin(self.tokens[: self.prompt_length])
        copied._entries = list(self._entries)
        copied._until = until
        return copied

    def replay(self, question: Question) -> Entry | None:
        """The recorded answer; None where the question is the one to wait at.

        Raises ControllerError where another one was asked the first time.
        """
        if self._next == len(self._entries):
            self._check(question, self._until)
            self._until = None
            return None
        entry = self._entries[self._next]
        self._check(question, entry.question)
        self._next += 1
        del self.tokens[entry.kept :]
        self.tokens += entry.tokens
        self._kept = len(self.tokens)
        if entry.error is not None:
            raise copy.copy(entry.error)
        return entry

    def catch_up(self, original: Transcript) -> None:
        """The tokens that came while the original waits at its question."""
        self.tokens = list(original.tokens)
        self._kept = original._kept

    def unlike(self, what: str) -> ControllerError:
        """The error for a script that did ``what`` instead of asking what it asked before."""
        expected = self._until
        if self._next < len(self._entries):
            expected = self._entries[self._next].question
        self.failure = ControllerError(
            Code.CONTROLLER_FAILED,
            f"the script is not deterministic: run again for a fork, its question {self._next + 1} "
            f"was {what} where it had been {expected}; what it asks may depend only on the "
            "answers it got",
        )
        return self.failure

    def _check(self, question: Question, expected: Question | None) -> None:
        if question != expected:
            raise self.unlike(str(question))
