"""A *call*: one request of this client, and the state of the request. If a request fails, the
client may send it again. Each time, a new *attempt* of the call begins."""

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
    Embed,
    Generate,
    ModelInfoRequest,
    ModelTokenizerRequest,
    Msg,
    PauseModel,
    ResumeModel,
    Score,
    SendWeights,
    StatusRequest,
    System,
    Tag,
    Tags,
    Token,
    UpdateWeights,
    Upload,
)

if TYPE_CHECKING:
    from .tracing import ClientSpan

Request = (
    Generate
    | Score
    | ModelInfoRequest
    | ModelTokenizerRequest
    | Embed
    | StatusRequest
    | Buffer
    | Upload
    | Tag
    | Tags
    | Delete
    | DrainWorker
    | PauseModel
    | ResumeModel
    | UpdateWeights
    | SendWeights
)


@dataclass(slots=True, eq=False)
class SentInput:
    """An input for the program of a stream. The client keeps the input until the stream ends. If
    the request is sent again, all its inputs are sent again too."""

    number: int
    text: str
    answered: Callable[[TokenbusError | None], None]
    """Called once: with None when the input is stored, or with the error."""
    stored: bool = False
    """Whether the broker has confirmed the input in the present attempt of the call."""
    reported: bool = False
    """Whether ``answered`` was called."""

    def report(self, error: TokenbusError | None) -> None:
        """Calls ``answered``, unless it was called before."""
        if not self.reported:
            self.reported = True
            self.answered(error)


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a call, with the error if the call failed."""

    error: TokenbusError | None


Event = Token | Row | Msg | System | Ended
"""An event of a call. A ``Row`` comes from a TOKEN message in columns, and becomes a Token when it
is read."""


def _discard(events: Sequence[Event]) -> None:
    """Ignores the events of a call that does not have a reader."""


def _sleep_on() -> None:
    """Does nothing, because no reader waits."""


class Unread(deque[Event]):
    """The events of a call that its reader has not read yet."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = False
        """Whether ``wake`` is called when a row is added. The reader sets and clears this flag."""
        self.wake: Callable[[], None] = _sleep_on
        """Wakes the reader. The function must not keep a reference to the stream. A stream without
        references cancels its request."""


@dataclass(slots=True, eq=False)
class Call:
    """One request, with all its attempts, on any connection. Each attempt has another
    ``stream_id``. Times are in seconds."""

    type: bytes
    message: Request
    attachments: tuple[bytes, ...] = ()
    timeout_s: float | None = None
    """Maximum duration of the call, which then ends with a ``timeout`` error."""
    stall_s: float | None = None
    """If no message for the call arrives during this time, the client sends the request again."""
    retry_s: float = 0.0
    """After the first retryable failure, the request may be sent again until this time has
    passed."""
    waits_for_room: bool = True
    """Whether ``queue_full`` and ``client_limit`` count as retryable."""
    span: ClientSpan | None = None
    """The span of the call, if the program uses tracing."""
    take: Callable[[Sequence[Event]], None] = _discard
    """Receives the events, except rows. The function must not keep a reference to the stream, as
    for ``Unread.wake``."""
    unread: Unread = field(default_factory=Unread)
    """The events that the reader has not read."""

    base: int | None = None
    """The first ``stream_id`` of the call if the session is named, else None. A session is *named*
    if the program gave its token to the client. An earlier client with this token may have begun
    the stream. The lowest 8 bits of a ``stream_id`` count the attempts."""
    repeated: bool = False
    """Whether an earlier client began the stream. A worker may then still report the stream to a
    restarted broker. The creator of the call sets this flag."""
    number: int = 0
    """The ``stream_id`` of this attempt, unique in its session."""
    began: float = 0.0
    received_at: float = 0.0
    sent: bool = False
    attaching: bool = False
    """Whether an ATTACH is unanswered. Until the ATTACH is answered, entries are discarded, because
    the broker sends them again."""
    ended: bool = False
    failed_at: float | None = None
    tries: int = 0
    resend_at: float | None = None
    received: int = 0
    """Number of entries that arrived in this attempt."""
    repeats: int = 0
    """Number of entries that the broker will now send a second time, in the same order. The answer
    to ATTACH determines this number."""
    moves: int = 0
    """Last known number of times that the stream of this attempt has moved to another worker."""
    inputs: list[SentInput] = field(default_factory=list)
    """All inputs of the stream, in order."""
    input_at: float | None = None
    """The time at which the client sends the first unconfirmed input again. None if this input was
    not sent yet."""
    seen_messages: dict[int, int] = field(default_factory=dict)
    """Number of the program's messages that were delivered in any attempt, by sequence."""
    counted_messages: dict[int, int] = field(default_factory=dict)
    """Number of the program's messages that arrived in this attempt, by sequence."""
    seen: dict[int, int] = field(default_factory=dict)
    """Number of entries that were delivered in any attempt, by sequence."""
    counted: dict[int, int] = field(default_factory=dict)
    """Number of entries that arrived in this attempt, by sequence. An entry is a duplicate if this
    number is not above ``seen``."""
    ends: set[int] = field(default_factory=set)
    """Sequences whose end was delivered, in any attempt."""
    ends_again: set[int] = field(default_factory=set)
    """Sequences that have ended in this attempt."""

    @property
    def may_be_live(self) -> bool:
        """Whether the client waits, after a restart of the broker, until a worker reports the
        stream. If this is false, the client sends the request again at once. It is true if an entry
        of the stream was received, or if ``retry_s`` is 0."""
        streams = isinstance(self.message, Generate | Score)
        return streams and (self.received > 0 or self.retry_s == 0)

    @property
    def resends_unknown(self) -> bool:
        """Whether the client sends the request again if the broker reports its stream as unknown,
        even if ``retry_s`` is 0. Such a stream was lost: the broker was restarted before it read
        the request, or the broker and the workers of the request were lost."""
        if self.base is not None and not self.tries:
            return True
        return isinstance(self.message, Generate | Score) and self.received == 0

    def begin_try(self) -> None:
        """Resets the state of the failed attempt. The counts of delivered entries are kept."""
        self.sent = False
        self.attaching = False
        self.resend_at = None
        self.moves = 0
        self.begin_copy()
        self.input_at = None
        for sent in self.inputs:
            sent.stored = False

    def begin_copy(self) -> None:
        """Prepares for receiving all entries of the stream again. The entries of different
        sequences may come in another order. The counts of delivered entries are kept, so that
        nothing is delivered twice."""
        self.received = self.repeats = 0
        self.counted.clear()
        self.counted_messages.clear()
        self.ends_again.clear()

    def is_new(self, entry: Token) -> bool:
        """Counts an entry, and returns whether the entry is delivered. An entry that an earlier
        attempt has delivered is not delivered again. A report (``Token.is_report``) is delivered
        only if it has a new message, or says that the program waits.
        """
        if entry.finish_reason is not None:
            self.ends_again.add(entry.seq)
        self.received += 1
        if entry.messages:
            self._drop_seen_messages(entry)
        if entry.is_report:
            return bool(entry.messages or entry.waiting)
        number = self.counted.get(entry.seq, 0) + 1
        self.counted[entry.seq] = number
        if number <= self.seen.get(entry.seq, 0):
            return False
        self.seen[entry.seq] = number
        if entry.finish_reason is not None:
            entry.live -= self._ended_before()
            self.ends.add(entry.seq)
        return True

    def _drop_seen_messages(self, entry: Token) -> None:
        """Counts the messages of an entry, and removes those that were delivered before."""
        counted = self.counted_messages.get(entry.seq, 0)
        had = self.seen_messages.get(entry.seq, 0)
        after = self.counted_messages[entry.seq] = counted + len(entry.messages)
        del entry.messages[: max(0, had - counted)]
        self.seen_messages[entry.seq] = max(had, after)

    def _ended_before(self) -> int:
        """The number of sequences that are still live in this attempt, although an earlier attempt
        has delivered their ends. In two attempts, sequences may end in a different order."""
        n = self.message.n if isinstance(self.message, Generate) else 1
        again = self.ends - self.ends_again
        return sum(seq < n or seq in self.counted for seq in again)

    def all_new(self, seq: int) -> bool:
        """Whether all further entries of a sequence are new, because this attempt has already
        repeated all entries that earlier attempts delivered."""
        return self.counted.get(seq, 0) >= self.seen.get(seq, 0)

    def count(self, seq: int, entries: int) -> None:
        """Counts ``entries`` new entries of a sequence."""
        self.received += entries
        self.seen[seq] = self.counted[seq] = self.counted.get(seq, 0) + entries
