"""The interface of a controller in any language: four calls for each sequence, and a clone.

Source: AICI's ``AiciVm`` (init_prompt, pre_process, mid_process, post_process). A round of one
sequence is post_process with the tokens that were appended, pre_process, and mid_process;
``rounds`` makes these calls, this page says what they mean. All calls of one sequence come one
after another, those of several sequences at once, from a pool of threads.

A call that fails raises ControllerError: it ends its own sequence, with that text, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from ...protocol.messages import ConstraintEnd
from ...protocol.sampling import Override, Query
from .biases import Bias
from .host import Host


class Action(IntEnum):
    """The decision of a controller in a call; the numbers are those of the native ABI."""

    STOP = 0
    CONTINUE = 1
    """pre_process: on to mid_process; post_process: on to pre_process; mid_process: sample."""
    SUSPEND = 2
    """pre_process: do not schedule the sequence until a variable of the request changes or a fork
    of it ends."""
    FORK = 3
    """pre_process: become ``count`` sequences, this one included."""
    SPLICE = 4
    """mid_process: drop ``backtrack`` tokens, append ``tokens``, and do not sample. pre_process:
    append ``tokens``, without a mid_process in between."""


class Answer(NamedTuple):
    """The result of pre_process, mid_process or post_process."""

    action: Action
    count: int = 1  # type: ignore[assignment]
    """Forks in all."""
    backtrack: int = 0
    """Tokens to drop, of those that the sequence has: the one about to be sampled is not one."""
    tokens: Sequence[int] = ()
    masked: bool = False
    """mid_process: whether it wrote a mask; where it did not, every token is allowed."""
    bias: Bias | None = None
    """mid_process: what is added to the logits before the temperature."""
    query: Query | None = None
    """mid_process: the question about the distribution of the next token."""
    override: Override | None = None
    """mid_process: sampling parameters for the next token."""
    complete: bool = False
    """With STOP: the text is complete, as if the model had ended it; else the program stopped."""


STOP = Answer(Action.STOP)
COMPLETE = Answer(Action.STOP, complete=True)
CONTINUE = Answer(Action.CONTINUE)
SUSPEND = Answer(Action.SUSPEND)


class Controller(Protocol):
    """The controller of one sequence."""

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Once, before all else. Limit: ``Limits.init_s``."""

    def pre_process(self) -> Answer:
        """May stop, go on, suspend, fork, or append tokens. Limit: ``Limits.pre_s``."""

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """May stop, sample or splice. Limit: ``Limits.mid_s``.

        ``fork_group``: the sequences that the fork of this round made, this one included; only this
        one where none was made. ``mask``: bytes ``[4 * ceil(vocab / 32)]`` to write what may be
        sampled into, bit i of the little-endian u32 words set where token i is allowed; what they
        hold before is left from earlier rounds.
        """

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Tokens were appended, after ``backtrack`` were dropped; may stop.

        ``Host.distributions`` has the answer to the query about tokens that were sampled. Limit:
        ``Limits.post_s``.
        """

    def fork(self, host: Host) -> Controller:
        """A copy with the same state, for the sequence of ``host``. Called between calls only."""

    def close(self) -> None:
        """Frees what it holds; called once."""


@runtime_checkable
class Constraint(Controller, Protocol):
    """A controller that has its sequence write one text of a language: a built-in constraint."""

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """How the text would have ended if no token followed; with ``stop``, if it ended before the
        first occurrence of these bytes. Called between rounds; costs a call of the backend, and
        with ``stop`` another parse of the text."""

    def fork(self, host: Host) -> Constraint:
        """As that of every controller."""


@runtime_checkable
class TakesDrafts(Controller, Protocol):
    """A controller for whose sequence the GPU worker may verify several tokens in one step."""

    def masks_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Writes into ``masks[i]`` the mask after the tokens ``draft[: i + 1]``, as mid_process
        would if these were sampled; how many it wrote. It stops where mid_process would not just
        sample, and before a token that cannot follow. Its own state stays as it is.

        Called after a mid_process that wrote a mask. Any beginning of the draft may be sampled, and
        one token more: then one post_process gets all of them, in place of a round for each.
        """


class Batch(Protocol):
    """Runs the usual rounds of several sequences in one call."""

    def rounds(self, turns: Sequence[tuple[int, int]], masks: Sequence[memoryview]) -> list[bool]:
        """For each turn, the number of a sequence in the batch and the token that was sampled for
        it: whether its round is over. Then the token has been taken, and the mask of the next one
        is written; otherwise nothing has changed, and the round is to be run by itself."""


@runtime_checkable
class Batched(Controller, Protocol):
    """A controller whose usual round, one token and then a mask, runs in a batch with others."""

    def batch(self, token: int) -> tuple[Batch, int] | None:
        """The object that can run the round after this token, and the number of its sequence
        there; None where the round may be another one. Called between rounds."""

    def batched(self, token: int) -> None:
        """The round after this token has been run in a batch."""


class Program(Protocol):
    """A factory of controllers: a module for one vocabulary, a built-in, a Python class."""

    def start(self, host: Host) -> Controller:
        """A controller for a new request; raises ControllerError where it cannot be had."""


class ConstraintProgram(Program, Protocol):
    """The factory of the controllers of a built-in constraint."""

    def start(self, host: Host) -> Constraint:
        """As that of every program."""
