"""The GPU worker's state of a request with a controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ....protocol.messages import ConstraintEnd
from ....protocol.worker_messages import StepResult
from ..engine.engine import Engine
from ..engine.sequence import TokenOutput
from ..sampling.distributions import LOWEST
from .mask_file import MaskFile
from .resumption import Given


class Notes(NamedTuple):
    """The outputs of a controller other than tokens."""

    logs: str = ""
    storage: Sequence[Any] = ()
    """Writes to variables."""
    messages: Sequence[str] = ()
    """Texts for the client."""
    waiting: int = 0
    """The number of the client's input that the controller waits for (``Token.waiting``)."""


@dataclass(slots=True, eq=False)
class Run:
    """The tokens that a sequence samples until the next STEP. A sequence has a run if one decision
    covers several tokens (``StepResult.run``), or if the controller has requested the
    log-probability of its next token."""

    left: int
    """Maximum number of further tokens."""
    endings: np.ndarray | None
    """The tokens that end the run: u32 words with one bit for each token of the vocabulary. None if
    the run ends only after ``left`` tokens."""
    asks: bool = False
    """Whether the STEP that reports the tokens also has their ``logprobs``."""
    tokens: list[int] = field(default_factory=list)
    """The tokens that have been sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probabilities of ``tokens``; empty unless ``asks`` is true."""

    def take(self, token: int, logprob: float) -> bool:
        """Adds a token; returns whether it ends the run."""
        self.tokens.append(token)
        if self.asks:
            self.logprobs.append(max(logprob, LOWEST))
        self.left -= 1
        if self.left < 1:
            return True
        return self.endings is not None and bool(self.endings[token >> 5] >> (token & 31) & 1)


@dataclass(slots=True, eq=False)
class Steered:
    """The state of a request with a controller."""

    engine: Engine
    eos: frozenset[int]
    """The end-of-sequence tokens. They end a sequence if the controller does not prevent it."""
    link: int = 0
    """The link to the client's broker, which forwards messages to the controller worker."""
    attempt: int = 0
    """``Start.attempt`` of the last START. Messages that answer an earlier attempt may still
    arrive."""
    worker: int = 0
    """The id of the controller worker that runs the controller; 0 until its first decision."""
    same_machine: bool = False
    """Whether the controller worker is on this machine, so that the request can use a mask file."""
    file: MaskFile | None = None
    """The mask file; None if the controller worker is on another machine, or if the system could
    not make a file."""
    ends: dict[int, TokenOutput] = field(default_factory=dict)
    """By sequence: the last output. It is stored here until the controller's last round is
    complete, and is then sent."""
    stopped: set[int] = field(default_factory=set)
    """Sequences whose controller has stopped or failed. Their end is not reported to the
    controller."""
    inspect: bool = False
    round_us: dict[int, int] = field(default_factory=dict)
    """With ``inspect``, by sequence: duration of the controller's rounds since the last sampled
    token, in microseconds."""
    takes_drafts: bool = False
    """Whether the controller computes a mask after each token of a draft."""
    constrained: bool = False
    """Whether the controller is a built-in constraint."""
    text_ends: dict[int, ConstraintEnd] = field(default_factory=dict)
    """With a built-in constraint, by sequence: how the text ends. The last output reports this."""
    notes: dict[int, Notes] = field(default_factory=dict)
    """By sequence: the notes that are sent with the sequence's next token."""
    wakes: dict[int, int] = field(default_factory=dict)
    """By sequence: how often the controller worker has woken the sequence since its last sampled
    token."""
    given: dict[int, Given] = field(default_factory=dict)
    """After the controller was restarted, by sequence: the outputs that the controller repeats and
    the client already has."""

    def note(self, one: StepResult) -> None:
        """Stores the notes of a round for the sequence's next output."""
        logs, storage, messages = one.logs, one.storage, one.messages
        given = self.given.get(one.seq)
        if given is not None:
            logs, storage = given.take(logs, storage)
            messages = given.take_messages(messages)
        if one.wakes:
            self.wakes[one.seq] = one.wakes
        if logs or storage or messages or one.wakes or one.awaits:
            before = self.notes.get(one.seq, Notes())
            self.notes[one.seq] = Notes(
                before.logs + logs,
                [*before.storage, *storage],
                [*before.messages, *messages],
                one.awaits,
            )

    def has_report(self, seq: int) -> bool:
        """Whether a sequence has texts for the client, or waits for an input of the client."""
        notes = self.notes.get(seq)
        return notes is not None and bool(notes.messages or notes.waiting)

    def repeats(self, output: TokenOutput) -> bool:
        """Whether the client already has an output, because a restarted controller repeats it. Only
        outputs that append or drop tokens can be repeated. After the next sampled token, and at the
        end of the sequence, all outputs are new."""
        given = self.given.get(output.seq)
        if given is None or output.parent is not None or output.is_report:
            return False
        if output.is_input or output.finish_reason is not None:
            del self.given[output.seq]
            return False
        repeated = given.entries > 0
        given.entries -= repeated
        return repeated

    def noted(self, output: TokenOutput) -> TokenOutput:
        """Adds to an output the stored notes of the output's sequence, and returns the output."""
        if self.inspect and output.logprob is not None:
            output.round_us = self.round_us.pop(output.seq, 0)
        if self.text_ends and output.finish_reason is not None:
            end = self.text_ends.pop(output.seq, None)
            if end is not None and output.error is None:
                output.constraint = "cut" if output.shortened else end
        notes = self.notes.pop(output.seq, None) if output.parent is None else None
        if notes is not None:
            output.logs += notes.logs
            output.storage += notes.storage
            output.messages += notes.messages
            if output.is_report:
                output.waiting = notes.waiting
            elif notes.waiting and output.logprob is None and output.finish_reason is None:
                # The controller has appended tokens and then waits for an input. The number of this
                # input is sent with the report after the last appended token.
                self.notes[output.seq] = Notes(waiting=notes.waiting)
            if output.is_input:
                output.wakes = self.wakes.pop(output.seq, 0)
        return output
