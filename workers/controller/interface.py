"""The interface of a controller in any language: four calls for each sequence, and a clone.

Source: AICI's ``AiciVm`` (init_prompt, pre_process, mid_process, post_process). A round of one
sequence calls post_process with the new tokens, then pre_process and mid_process. ``rounds.py``
makes these calls. This module defines the meaning of the calls. Calls for one sequence are made one
after another. Calls for several sequences may run at the same time, on a pool of threads. A *draft*
is a list of tokens that the GPU worker expects next.

A call that fails raises TokenbusError. Then only the sequence of this call ends, and its client
receives the error's message.
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
    """The decision of a controller in a call. The native ABI has the same numbers
    (``wasm/native.py``)."""

    STOP = 0
    CONTINUE = 1
    """In pre_process: continue with mid_process. In post_process: continue with pre_process. In
    mid_process: sample."""
    SUSPEND = 2
    """In pre_process: leave the sequence out of the batch until it is woken, for example because
    another sequence of the request writes a variable, samples a token or ends."""
    FORK = 3
    """In pre_process: append ``tokens`` if there are any, and then become ``count`` sequences,
    including this sequence."""
    SPLICE = 4
    """In mid_process: drop ``backtrack`` tokens, append ``tokens``, and do not sample. In
    pre_process: append ``tokens``, without calling mid_process first."""
    GENERATE = 5
    """In mid_process of a script's guest: let the model generate a text, as ``Answer.generate``
    describes. The next post_process gets all tokens of this text. ``scripts.controller`` handles
    this action."""
    SCORE = 6
    """In mid_process: compute the log-probability of each of ``texts`` as a continuation of the
    sequence, and do not sample. The next post_process gets no tokens, and ``Host.scores`` has the
    result."""
    BEGIN = 7
    """In mid_process: drop all tokens, including those of the prompt, and begin again with the
    prompt ``tokens``. The next post_process gets these tokens, and the number of all dropped
    tokens."""
    SAVE = 8
    """In mid_process: save ``tokens`` as the context ``name`` (``contexts``), and pin the blocks of
    the sequence for ``pin_s`` seconds. The next post_process gets no tokens."""
    OPEN = 9
    """In mid_process: like BEGIN, with the tokens of the context ``name``. If a SAVE or OPEN is
    refused, the next post_process gets no tokens, and ``Host.refusal`` has the reason."""
    LOOK = 10
    """In mid_process: answer ``query`` about the distribution of the next token, and do not sample.
    The next post_process gets no tokens, and ``Host.distributions`` has the answer."""
    AGAIN = 11
    """In mid_process: call pre_process, without sampling or changing the tokens. A script returns
    this action if it suspends or forks directly after a fork or a generated text, because SUSPEND
    and FORK are possible only in pre_process. Other controllers do not return it."""


class Answer(NamedTuple):
    """The result of pre_process, mid_process or post_process."""

    action: Action
    count: int = 1  # type: ignore[assignment]
    """With FORK: the number of sequences after the fork, including this one."""
    backtrack: int = 0
    """With SPLICE: the number of tokens to drop from the end of the sequence. The next token is not
    counted, because it has not been sampled yet."""
    tokens: Sequence[int] = ()
    masked: bool = False
    """Whether mid_process wrote a mask. If false, every token is allowed."""
    bias: Bias | None = None
    """From mid_process: the numbers that are added to the logits before these are divided by the
    temperature."""
    query: Query | None = None
    """With LOOK, or with CONTINUE from mid_process: the question about the distribution of the next
    token."""
    override: Override | None = None
    """From mid_process: sampling parameters for the next token."""
    complete: bool = False
    """With STOP: whether the text is complete, as if the model had ended it. If false, the program
    has stopped the sequence early."""
    generate: bytes = b""
    """With GENERATE: the JSON of ``scripts.generation.Generate``."""
    texts: Sequence[Sequence[int]] = ()
    """With SCORE: the tokens of each text (``scoring``)."""
    name: str = ""
    """With SAVE and OPEN: the name of the context."""
    pin_s: float = 0.0
    run: int = 1
    """With CONTINUE from mid_process: the maximum number of tokens that are sampled before the next
    post_process. If ``run`` is above 1, every token is allowed, and the mask has another meaning:
    post_process is called as soon as a token of the mask has been sampled. The worker may also call
    post_process earlier."""
    logprobs: bool = False
    """With CONTINUE from mid_process: whether ``Host.logprobs`` has the log-probabilities of the
    next tokens."""


STOP = Answer(Action.STOP)
COMPLETE = Answer(Action.STOP, complete=True)
CONTINUE = Answer(Action.CONTINUE)
SUSPEND = Answer(Action.SUSPEND)
AGAIN = Answer(Action.AGAIN)


class Controller(Protocol):
    """The controller of one sequence."""

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Called once, before all other calls. Time limit: ``Limits.init_s``."""

    def pre_process(self) -> Answer:
        """May stop, continue, suspend, fork, or append tokens. Time limit: ``Limits.pre_s``."""

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """May stop, sample, look, splice, score or begin anew. Time limit: ``Limits.mid_s``.

        ``fork_group``: the numbers of the sequences that pre_process of this round forked into,
        including this one. Without a fork, it has only the number of this sequence. ``mask``: a
        buffer of ``[4 * ceil(vocab / 32)]`` bytes for the mask. Bit i of its little-endian u32
        words is set if token i is allowed. Before the call, ``mask`` has the bytes of an earlier
        round.
        """

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Called after ``backtrack`` tokens were dropped and ``tokens`` were appended; may stop.

        If ``tokens`` were sampled, ``Host.distributions`` has the answers to the queries about
        them. Time limit: ``Limits.post_s``.
        """

    def fork(self, host: Host) -> Controller:
        """A copy with the same state, for the new sequence of ``host``. Called while no other call
        of this controller runs."""

    def close(self) -> None:
        """Frees the controller's resources; called once."""


@runtime_checkable
class Constraint(Controller, Protocol):
    """A built-in constraint: a controller that limits the text of its sequence to a language."""

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """How the text ends (``ConstraintEnd``) if no further tokens follow. If ``stop`` is given,
        the text ends before the first occurrence of these bytes.

        Called between rounds. With ``stop``, the constraint parses the text again, which may be
        slow.
        """

    def fork(self, host: Host) -> Constraint:
        """See ``Controller.fork``."""


@runtime_checkable
class TakesDrafts(Controller, Protocol):
    """A controller that allows the GPU worker to verify several tokens of its sequence in one
    step."""

    def masks_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Writes into ``masks[i]`` the mask that mid_process would write after the tokens
        ``draft[: i + 1]``; returns the number of written masks.

        Writing stops before a decision that does more than sample, and before a token that the
        constraint forbids. The controller's own state does not change.

        Called after a mid_process that wrote a mask. The GPU worker may then sample any prefix of
        the draft, and one more token. A single post_process receives all these tokens.
        """


@runtime_checkable
class RunsAhead(Controller, Protocol):
    """A controller that can be copied. The copy computes the decisions after the tokens of a draft,
    before these tokens are sampled (``along.py``). The controller is copied only if
    ``takes_drafts`` is true."""

    @property
    def takes_drafts(self) -> bool:
        """Whether a copy may compute decisions along drafts. Read after init_prompt."""


class Batch(Protocol):
    """Runs the usual rounds (one token, then a mask) of several sequences in one call. If
    ``Batched.batch`` returns equal batches for two sequences, their rounds may run in the same
    call."""

    def rounds(self, turns: Sequence[tuple[int, int]], masks: Sequence[memoryview]) -> list[bool]:
        """Runs one round for each turn. A turn has the number of a sequence in the batch, and the
        sampled token. Returns for each turn whether its round has ended.

        If a round has ended, its token was accepted and the next mask is written. If a round has
        not ended, the caller must make the calls of this round. The sequence is then unchanged, or
        its controller has stored the answers to these calls.
        """


@runtime_checkable
class Batched(Controller, Protocol):
    """A controller whose usual round (one token, then a mask) can run in a batch with rounds of
    other controllers."""

    def batch(self, token: int) -> tuple[Batch, int] | None:
        """The batch that can run the round after ``token``, and the number of the sequence in the
        batch. None if the round may need more than a token and a mask. Called between rounds."""

    def batched(self, token: int) -> None:
        """Called when the round after this token has been run in a batch."""


@runtime_checkable
class DecidesAhead(Controller, Protocol):
    """A controller whose guest process runs post_process, pre_process and mid_process after a
    single message, because each message costs time."""

    @property
    def has_decided(self) -> bool:
        """Whether the answer of the next call has already arrived. The call then does not send a
        message to the guest."""

    def ends(self) -> None:
        """Called before the last post_process. The guest then does not run pre_process and
        mid_process after this post_process."""


class Program(Protocol):
    """A factory of controllers, such as a compiled module, a built-in constraint or a Python
    class."""

    def start(self, host: Host) -> Controller:
        """A new controller for a request; raises TokenbusError if the controller cannot be
        created."""


class ConstraintProgram(Program, Protocol):
    """The factory of the controllers of a built-in constraint."""

    def start(self, host: Host) -> Constraint:
        """See ``Program.start``."""
