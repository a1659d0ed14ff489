"""A call: a request of this client, and its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..protocol.columns import Row
from ..protocol.errors import TokenbusError
from ..protocol.messages import (
    Buffer,
    Delete,
    DrainWorker,
    Generate,
    ModelInfoRequest,
    ModelTokenizerRequest,
    Msg,
    Score,
    StatusRequest,
    System,
    Tag,
    Tags,
    Token,
    Upload,
)

if TYPE_CHECKING:
    from .tracing import ClientSpan

Request = (
    Generate
    | Score
    | ModelInfoRequest
    | ModelTokenizerRequest
    | StatusRequest
    | Buffer
    | Upload
    | Tag
    | Tags
    | Delete
    | DrainWorker
)


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a call: why it failed, or None."""

    error: TokenbusError | None


Event = Token | Row | Msg | System | Ended
"""The events of a call. A ``Row`` is a Token from columns, and becomes a Token when it is read."""


def _discard(events: Sequence[Event]) -> None:
    """Ignores events."""


def _sleep_on() -> None:
    """Does nothing: no reader waits."""


class Unread(deque[Event]):
    """The events of a call that its reader has not read yet."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = False
        """Whether ``wake`` has to be called when a row was added."""
        self.wake: Callable[[], None] = _sleep_on
        """It must not refer to the stream, which cancels its request when it is dropped."""


@dataclass(slots=True, eq=False)
class Call:
    """One request, over all of its connections and attempts. Times in seconds."""

    type: bytes
    message: Request
    attachments: tuple[bytes, ...] = ()
    timeout_s: float | None = None
    """End the call, with a ``timeout`` error, this long after it began."""
    stall_s: float | None = None
    """Send the request again if nothing has arrived for this long."""
    retry_s: float = 0.0
    """How long to send the request again after its first retryable failure."""
    waits_for_room: bool = True
    """Whether ``queue_full`` and ``client_limit`` count as retryable."""
    span: ClientSpan | None = None
    """The span of the call, if the program uses tracing."""
    take: Callable[[Sequence[Event]], None] = _discard
    """Receives the events, except for rows. It must not refer to the stream either."""
    unread: Unread = field(default_factory=Unread)
    """The entries and rows that the reader has not read."""

    base: int | None = None
    """The first ``stream_id`` of a call of a named session, whose streams another client may have
    begun. The last 8 bits count the attempts."""
    repeated: bool = False
    """Whether the stream was begun before, so that a worker may still report it to a restarted
    broker. The creator of the call sets it."""
    number: int = 0
    """The ``stream_id`` of this attempt, unique in its session."""
    began: float = 0.0
    received_at: float = 0.0
    sent: bool = False
    attaching: bool = False
    """Between ATTACH and its answer: entries that arrive are discarded, as they are sent again."""
    ended: bool = False
    failed_at: float | None = None
    tries: int = 0
    resend_at: float | None = None
    received: int = 0
    """Number of TOKEN entries of this attempt."""
    repeats: int = 0
    """How many of the next entries were received before, according to the answer to ATTACH."""
    moves: int = 0
    """How often the stream of this attempt has moved, as far as is known."""
    seen: dict[int, int] = field(default_factory=dict)
    """Number of entries delivered, by sequence, over all attempts."""
    came: dict[int, int] = field(default_factory=dict)
    """Number of entries of this attempt, by sequence; the first ``seen`` of each are duplicates."""

    @property
    def may_be_live(self) -> bool:
        """Whether to wait for a worker that may still have the stream, after a broker was
        restarted. A request without any received entry is sent again instead, if it may be."""
        streams = isinstance(self.message, Generate | Score)
        return streams and (self.received > 0 or self.retry_s == 0)

    def begin_try(self) -> None:
        """Resets the state of the failed attempt; delivered entries stay delivered."""
        self.sent = False
        self.attaching = False
        self.resend_at = None
        self.received = self.moves = self.repeats = 0
        self.came.clear()

    def is_new(self, entry: Token) -> bool:
        """Counts an entry; returns whether no earlier attempt has delivered it."""
        self.received += 1
        number = self.came.get(entry.seq, 0) + 1
        self.came[entry.seq] = number
        if number <= self.seen.get(entry.seq, 0):
            return False
        self.seen[entry.seq] = number
        return True

    def all_new(self, seq: int) -> bool:
        """Whether all further entries of a sequence are new: this attempt has passed the entries
        that earlier ones delivered."""
        return self.came.get(seq, 0) >= self.seen.get(seq, 0)

    def count(self, seq: int, entries: int) -> None:
        """Counts entries of a sequence that are all new."""
        self.received += entries
        self.seen[seq] = self.came[seq] = self.came.get(seq, 0) + entries
