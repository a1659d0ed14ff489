"""The operations of scripts that make the decision of each step themselves. Such a script defines a
class with the four calls, or uses AICI's ``NextToken``.

A script awaits ``AtPre`` or ``AtMid`` until its controller's pre_process or mid_process is called.
The next operation that the script awaits answers this call. When the tokens of a step have arrived,
the script runs the post_process of its class. It then awaits ``Posted``, which passes the decision
of this post_process to the controller.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..interface import CONTINUE, STOP, SUSPEND, Answer
from .operations import Operation
from .token_set import TokenSet
from .transcript import Question


class AtPre(Operation):
    """Waits for pre_process."""

    def pre_process(self) -> Answer:
        """Finishes, so that the script decides in this call."""
        self._finish()
        return CONTINUE


class AtMid(Operation):
    """Waits for mid_process; the answer is the ``fork_group`` of the call."""

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Finishes, so that the script decides in this call."""
        self._finish(list(fork_group))
        return None


class Suspend(Operation):
    """Suspends the sequence once."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self._suspended = False

    def pre_process(self) -> Answer:
        """Suspends the sequence, and finishes the operation when the sequence is woken."""
        if self._suspended:
            self._finish()
        self._suspended = True
        return SUSPEND

    def resume(self, other: Operation) -> None:
        """Copies from ``other`` whether the sequence is suspended."""
        assert isinstance(other, Suspend)
        self._suspended = other._suspended


class Step(Operation):
    """Samples or appends tokens. The operation's answer is these tokens."""

    posts = True

    def __init__(
        self, question: Question, decision: Answer, mask: TokenSet | None, in_pre: bool
    ) -> None:
        """``in_pre``: whether the decision answers pre_process. If false, it answers
        mid_process."""
        super().__init__(question)
        self._decision = decision
        self._mask = mask
        self._in_pre = in_pre

    def pre_process(self) -> Answer:
        """Returns the decision if it belongs to pre_process."""
        return self._decision if self._in_pre else CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Returns the decision and writes its mask, if the decision belongs to mid_process."""
        if self._in_pre:
            return None
        if self._mask is not None:
            mask[:] = self._mask.mask
        return self._decision

    def post_process(self, tokens: Sequence[int]) -> None:
        """Finishes the operation, with the tokens as its answer."""
        self._finish(list(tokens))


class Posted(Operation):
    """Returns the decision of the script's own post_process to the controller."""

    def __init__(self, question: Question, stops: bool) -> None:
        super().__init__(question)
        self._answer = STOP if stops else CONTINUE

    def after_post(self) -> Answer:
        """Finishes the operation, and returns the script's decision."""
        self._finish()
        return self._answer
