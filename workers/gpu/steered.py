"""What the GPU worker keeps of a request with a controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...protocol.worker_messages import StepResult
from .engine import Engine
from .sequence import TokenOutput


@dataclass(slots=True, eq=False)
class Steered:
    """A request with a controller."""

    engine: Engine
    eos: frozenset[int]
    """The tokens that end its sequences, where their controller does not make more of them."""
    worker: int = 0
    """The controller worker that runs its controller; 0 until that has answered."""
    same_machine: bool = False
    """Whether that is on this machine, so that the request uses its mask file."""
    ends: dict[int, TokenOutput] = field(default_factory=dict)
    """By sequence: ends that are sent once the controller's last round is over."""
    stopped: set[int] = field(default_factory=set)
    """Sequences whose controller has stopped or failed, so that it is not notified of their end."""
    notes: dict[int, tuple[str, list[Any]]] = field(default_factory=dict)
    """By sequence: logs and writes that go with its next token."""

    def note(self, one: StepResult) -> None:
        """Keeps what a round logged and wrote, for the sequence's next token."""
        if one.logs or one.storage:
            logs, storage = self.notes.get(one.seq, ("", []))
            self.notes[one.seq] = (logs + one.logs, [*storage, *one.storage])

    def noted(self, output: TokenOutput) -> TokenOutput:
        """An output with what was kept for it."""
        notes = self.notes.pop(output.seq, None) if output.parent is None else None
        if notes is None:
            return output
        return output._replace(logs=output.logs + notes[0], storage=[*output.storage, *notes[1]])
