"""The record of a script's inputs, in order, so that a fork can replay the script."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

from ....protocol.errors import Code, ControllerError


class Question(NamedTuple):
    """A call that a script makes on its context, with the call's arguments."""

    call: str
    arguments: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.call}({given if len(given) <= 200 else given[:199] + '…'})"


class Entry(NamedTuple):
    """A question and its answer or error. Also the changes of the sequence's tokens since the
    previous answer."""

    question: Question
    answer: object
    error: ControllerError | None
    kept: int
    """Number of tokens at the beginning of the sequence that have not changed since the previous
    answer."""
    tokens: tuple[int, ...]
    """The tokens that follow the ``kept`` tokens."""


class Transcript:
    """The tokens of a script's sequence, and its questions and answers.

    A copy for a forked sequence starts at the beginning. It replays the recorded answers up to the
    question ``until``: the last question of the original script, which has no answer yet. Later
    questions get new answers.
    """

    def __init__(self) -> None:
        self.prompt_length = 0
        self.tokens: list[int] = []
        self._first_prompt: list[int] = []
        self.failure: ControllerError | None = None
        """The error of a replayed script that did not repeat a recorded question. None if there is
        no such error."""
        self._entries: list[Entry] = []
        self._kept = 0
        self._next = 0
        self._until: Question | None = None

    @property
    def replaying(self) -> bool:
        """Whether the script is repeating the questions that the script of its parent sequence has
        asked."""
        return self._until is not None

    def begin(self, prompt: Sequence[int]) -> None:
        """Starts the sequence with the tokens of the prompt."""
        self.tokens, self._first_prompt = list(prompt), list(prompt)
        self.prompt_length = self._kept = len(self.tokens)

    def change(self, tokens: Sequence[int], backtrack: int) -> None:
        """Records that tokens were dropped and appended."""
        if backtrack:
            del self.tokens[len(self.tokens) - backtrack :]
            self._kept = min(self._kept, len(self.tokens))
        self.tokens += tokens

    def add(self, question: Question, answer: object, error: ControllerError | None = None) -> None:
        """Records the answer to a question that is not replayed."""
        kept = self._kept
        self._entries.append(Entry(question, answer, error, kept, tuple(self.tokens[kept:])))
        self._kept = len(self.tokens)

    def copy(self, until: Question) -> Transcript:
        """A transcript for a forked sequence, whose script is replayed until it asks ``until``."""
        copied = Transcript()
        copied.begin(self._first_prompt)
        copied._entries = list(self._entries)
        copied._until = until
        return copied

    def replay(self, question: Question) -> Entry | None:
        """The recorded answer to a question; None if the question is ``until``, whose answer the
        original sequence still awaits.

        Raises ControllerError if the recorded question is different.
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
        """Copies the tokens of the original sequence, which may have changed since its last
        answer."""
        self.tokens = list(original.tokens)
        self._kept = original._kept

    def unlike(self, what: str) -> ControllerError:
        """The error of a replayed script that asked ``what`` instead of repeating its recorded
        question."""
        expected = self._until
        if self._next < len(self._entries):
            expected = self._entries[self._next].question
        self.failure = ControllerError(
            Code.CONTROLLER_FAILED,
            f"the script is not deterministic: replayed for a fork, its question {self._next + 1} "
            f"was {what}, but the first time it was {expected}; its questions may depend only on "
            "the answers it got",
        )
        return self.failure

    def _check(self, question: Question, expected: Question | None) -> None:
        if question != expected:
            raise self.unlike(str(question))
