"""Answers questions of scripts about the tokens that may follow a text under a built-in constraint.
AICI's classes ``RegexConstraint``, ``CfgConstraint``, ``SubStrConstraint`` and ``ChooseConstraint``
ask such a question in each step.

A question contains the constraint and the whole text. The answer depends on nothing else, so a
replay and a fork get the same answers. The worker keeps the constraints of recent questions. If the
text of the next question continues the text of an earlier question, the constraint parses only the
new tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from ....protocol.errors import Code, ControllerError
from ..guest_clock import question
from ..host import Host, NextTokens
from ..interface import Action, Constraint, ConstraintProgram

KINDS = frozenset({"regex", "choice", "yacc", "substring", "combination"})
"""The constraints that scripts can ask about."""
MAX_KEPT = 8
"""Maximum number of constraints that are kept for a sequence between its questions."""
MAX_QUESTIONS = 256
"""Maximum number of questions between two calls of a script's controller."""
MAX_MASKS_S = 2.0
"""Maximum CPU time in seconds that is spent on constraints and masks between two calls of a
script's controller."""
MAX_TEXT_TOKENS = 1 << 20
"""Maximum tokens of a text. The constraint has this number as its ``max_tokens``, so that it does
not complete a shorter text early."""

FindConstraint = Callable[[str], ConstraintProgram | None]


class ConstraintQuestions:
    """Answers the questions of one sequence."""

    def __init__(self, constraints: FindConstraint, host: Host) -> None:
        """``constraints`` finds a built-in constraint by its name."""
        self._constraints = constraints
        self._host = host
        self._kept: OrderedDict[tuple[str, str], _Text] = OrderedDict()
        self._questions = 0
        self._spent_s = 0.0

    def next_tokens(self, kind: str, argument: str, text: Sequence[int]) -> NextTokens:
        """The tokens that may follow ``text``. Raises TokenbusError if the argument is not valid,
        if the constraint does not allow the text, or if there are too many questions."""
        self._questions += 1
        if self._questions > MAX_QUESTIONS or self._spent_s > MAX_MASKS_S:
            raise ControllerError(
                Code.CONTROLLER_TIMEOUT,
                f"the script asked a constraint more than {MAX_QUESTIONS} times in one call, or "
                f"for more than {MAX_MASKS_S:g} s of CPU time",
            )
        if len(text) > MAX_TEXT_TOKENS - 2:
            raise _failed(
                f"the text of a constraint has {len(text)} tokens; at most {MAX_TEXT_TOKENS - 2} "
                "are allowed"
            )
        began_s = time.thread_time()
        try:
            with question():
                return self._text(kind, argument, text).next_tokens(text)
        finally:
            self._spent_s += time.thread_time() - began_s

    def renew(self) -> None:
        """Resets the number and the CPU time of questions, at each call of the script's
        controller."""
        self._questions, self._spent_s = 0, 0.0

    def close(self) -> None:
        """Frees the constraints."""
        for text in self._kept.values():
            text.close()
        self._kept.clear()

    def _text(self, kind: str, argument: str, text: Sequence[int]) -> _Text:
        """Returns a kept constraint whose parsed text is a prefix of ``text``. If no kept
        constraint fits, returns a new constraint."""
        found = self._kept.pop((kind, argument), None)
        if found is None or not found.is_prefix_of(text):
            if found is not None:
                found.close()
            found = self._started(kind, argument)
        self._kept[kind, argument] = found
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)[1].close()
        return found

    def _started(self, kind: str, argument: str) -> _Text:
        program = self._constraints(kind) if kind in KINDS else None
        if program is None:
            raise _failed(f"this worker has no constraint {kind!r}")
        host = replace(self._host, arg=argument.encode(), max_tokens=MAX_TEXT_TOKENS)
        return _Text(program.start(host), host)


class _Text:
    """A constraint, and the text that it has parsed."""

    def __init__(self, constraint: Constraint, host: Host) -> None:
        self._constraint = constraint
        self._host = host
        self._tokens: list[int] = []
        constraint.init_prompt(())

    def is_prefix_of(self, text: Sequence[int]) -> bool:
        return list(text[: len(self._tokens)]) == self._tokens

    def next_tokens(self, text: Sequence[int]) -> NextTokens:
        more = list(text[len(self._tokens) :])
        if more:
            self._constraint.post_process(more, 0)
            self._tokens += more
        size, eos = self._host.vocabulary.size, self._host.vocabulary.eos
        mask = bytearray(4 * -(-size // 32))
        # The mask is valid even if the answer is a splice of forced tokens.
        answer = self._constraint.mid_process((self._host.seq,), memoryview(mask))
        ends = answer.action is Action.STOP
        may_end = ends or self._constraint.text_end() == "complete"
        if ends:
            mask = bytearray(len(mask))
        if may_end and eos >= 0:
            mask[eos >> 3] |= 1 << (eos & 7)
        return NextTokens(bytes(mask), may_end, ends)

    def close(self) -> None:
        self._constraint.close()


def _failed(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
