"""A call: a request of this client, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..protocol.errors import TokenbusError
from ..protocol.messages import (
    Buffer,
    Delete,
    Generate,
    ModelInfoRequest,
    Msg,
    Score,
    StatusRequest,
    System,
    Tag,
    Tags,
    Token,
    Upload,
)

Request = (
    Generate | Score | ModelInfoRequest | StatusRequest | Buffer | Upload | Tag | Tags | Delete
)


class Ended(NamedTuple):
    """The last event of a call: why it failed, or None."""

    error: TokenbusError | None


Event = Token | Msg | System | Ended


def _nobody(events: list[Event]) -> None:
    """Nobody waits for these."""


@dataclass(slots=True, eq=False)
class Call:
    """One request, over every connection and every try that it takes. Times in seconds."""

    type: bytes
    message: Request
    attachments: tuple[bytes, ...] = ()
    timeout_s: float | None = None
    """End it, with a ``timeout`` error, this long after it began."""
    stall_s: float | None = None
    """Try again where nothing came for this long."""
    retry_s: float = 0.0
    """How long to go on trying after the first failure that another try may cure."""
    take: Callable[[list[Event]], None] = _nobody
    """Takes the call's events; must not keep its stream alive, which cancels when it is dropped."""

    number: int = 0
    """Of this try, unique in its session; the ``stream_id`` of what it sends."""
    began: float = 0.0
    heard: float = 0.0
    sent: bool = False
    attaching: bool = False
    """Between ATTACH and its answer: what arrives now was seen, or comes again."""
    over: bool = False
    failed_at: float | None = None
    tries: int = 0
    resend_at: float | None = None
    received: int = 0
    """TOKEN entries of this try."""
    seen: dict[int, int] = field(default_factory=dict)
    """Entries handed on, by sequence, over all tries."""
    came: dict[int, int] = field(default_factory=dict)
    """Entries of this try, by sequence. A sequence's first ``seen`` ones are known already."""

    def begin_try(self) -> None:
        """Forgets the try that failed; what was handed on stays handed on."""
        self.sent = False
        self.attaching = False
        self.resend_at = None
        self.received = 0
        self.came.clear()

    def is_new(self, entry: Token) -> bool:
        """Counts an entry; whether no earlier try has brought it."""
        self.received += 1
        number = self.came.get(entry.seq, 0) + 1
        self.came[entry.seq] = number
        if number <= self.seen.get(entry.seq, 0):
            return False
        self.seen[entry.seq] = number
        return True
