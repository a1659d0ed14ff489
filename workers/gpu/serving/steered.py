"""The GPU worker's state of a request with a controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....protocol.messages import ConstraintEnd
from ....protocol.worker_messages import StepResult
from ..engine.engine import Engine
from ..engine.sequence import TokenOutput
from .mask_file import MaskFile
from .resumption import Given


@dataclass(slots=True, eq=False)
class Steered:
    """A request with a controller."""

    engine: Engine
    eos: frozenset[int]
    """The tokens that end its sequences, where their controller does not make more of them."""
    link: int = 0
    """The link to the broker that its client is at, over which its controller worker is reached."""
    attempt: int = 0
    """That of its START: what was sent before in answer to an earlier one may still arrive."""
    worker: int = 0
    """The controller worker that runs its controller; 0 until that has answered."""
    same_machine: bool = False
    """Whether that is on this machine, so that the request uses its mask file."""
    file: MaskFile | None = None
    """That file, where the system gave one."""
    ends: dict[int, TokenOutput] = field(default_factory=dict)
    """By sequence: ends that are sent once the controller's last round is over."""
    stopped: set[int] = field(default_factory=set)
    """Sequences whose controller has stopped or failed, so that it is not notified of their end."""
    inspect: bool = False
    round_us: dict[int, int] = field(default_factory=dict)
    """With ``inspect``, by sequence: the time of its rounds since its last sampled token."""
    takes_drafts: bool = False
    """Whether its controller gives masks along drafts."""
    constrained: bool = False
    """Whether its controller is a built-in constraint."""
    text_ends: dict[int, ConstraintEnd] = field(default_factory=dict)
    """By sequence: how its text ends, under a built-in constraint, for its last output."""
    notes: dict[int, tuple[str, list[Any]]] = field(default_factory=dict)
    """By sequence: logs and writes that go with its next token."""
    wakes: dict[int, int] = field(default_factory=dict)
    """By sequence: how often it was woken since its last sampled token."""
    given: dict[int, Given] = field(default_factory=dict)
    """By sequence of a request whose controller was restarted: the entries that its client already
    has."""

    def note(self, one: StepResult) -> None:
        """Keeps what a round logged and wrote, for the sequence's next token."""
        logs, storage = one.logs, one.storage
        given = self.given.get(one.seq)
        if given is not None:
            logs, storage = given.take(logs, storage)
        if one.wakes:
            self.wakes[one.seq] = one.wakes
        if logs or storage or one.wakes:
            before = self.notes.get(one.seq, ("", []))
            self.notes[one.seq] = (before[0] + logs, [*before[1], *storage])

    def repeats(self, output: TokenOutput) -> bool:
        """Whether the client has an output already, as a controller that was started again has
        appended or dropped once more. All that follows a sampled token or an end is new."""
        given = self.given.get(output.seq)
        if given is None or output.parent is not None:
            return False
        if output.logprob is not None or output.finish_reason is not None:
            del self.given[output.seq]
            return False
        repeated = given.entries > 0
        given.entries -= repeated
        return repeated

    def noted(self, output: TokenOutput) -> TokenOutput:
        """An output with what was kept for it."""
        if self.inspect and output.inspected is not None:
            round_us = self.round_us.pop(output.seq, 0)
            output = output._replace(inspected=output.inspected._replace(round_us=round_us))
        if self.text_ends and output.finish_reason is not None:
            end = self.text_ends.pop(output.seq, None)
            if end is not None and output.error is None:
                output = output._replace(constraint="cut" if output.shortened else end)
        notes = self.notes.pop(output.seq, None) if output.parent is None else None
        if notes is None:
            return output
        output = output._replace(logs=output.logs + notes[0], storage=[*output.storage, *notes[1]])
        if output.logprob is None:
            return output
        return output._replace(wakes=self.wakes.pop(output.seq, 0))
