"""The log of a session: the TOKEN bodies that were routed to its client, and the ends of requests
that the client may not have received. Bodies are stored without decoding them.

The journal of a stream is its request and these bodies. Another worker can continue the stream from
the journal. The broker decodes the bodies only if it needs their entries: for a move, for an
ATTACH, or to judge a suspect (``quarantine.py``).

The ends that are sent on a connection are numbered. The number of an end is its *position*. A
client with the capability ``ack`` acknowledges positions with PING. If an end was not sent on the
present connection, it waits for the client's ATTACH or CANCEL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from ..protocol.bodies import Encoding
from ..protocol.messages import Token
from . import chunks
from .chunks import MSGPACK, Chunk, Place, Routed, chunk_encoding, divided
from .recent import BODIES_AT_ONCE, Recent
from .reconcile import Progress

AGAIN_BYTES = 100
"""Bytes that count for each element of ``Place.again``."""
END_BYTES = 512
"""Bytes that count for each stored end in addition to its final message. An end takes about this
memory."""
MAX_ENDS = 16_384
"""Maximum number of stored ends of a session. Above this number, the oldest end is dropped."""


@dataclass(slots=True, eq=False)
class End:
    """How a request has ended. An ``End`` does not refer to its session, so that no reference cycle
    arises."""

    request: int
    stream_id: int
    moves: int
    closing: Sequence[bytes] | None
    """The frames of the message that ended the request; None if an entry of TOKEN ended it."""
    stored: bool
    """Whether the request is a stream, and the log has all of its entries. If so, the broker
    answers an ATTACH with a MSG, the entries and the end."""
    reached: Progress | None = None
    """How far the stream has come if the end comes from a worker's report for adoption, and no
    client has attached to the stream since; otherwise None."""
    since: float = 0.0
    """The time at which the end was stored or the session was last resumed, in seconds."""
    position: int = 0
    """Position of the end on the present connection. 0 if the end was not sent on this connection;
    the end then waits for an ATTACH."""


@dataclass(slots=True, eq=False)
class Answer:
    """An incomplete answer to an ATTACH."""

    end: End
    skip: int
    """Number of entries that are still to be read from the log but not sent, because the client
    already has them."""

    def sends_next(self, log: StreamLog) -> bool:
        """Counts the next entry that was read. Returns whether this entry is to be sent to the
        client."""
        stream_id = self.end.stream_id
        if log.answering.get(stream_id) is not self or log.ends.get(stream_id) is not self.end:
            return False
        self.skip -= 1
        return self.skip < 0


class StreamLog:
    """The bodies and the stored ends of one session. A body is stored as long as it may contain
    entries of a request in the log.

    Routed messages are first stored in ``recent``, which later adds to ``tail`` the bodies that
    this log needs. ``pack`` moves the bodies from ``tail`` into chunks, which have no overhead per
    body.
    """

    __slots__ = (
        *("_chunks", "_places", "_recent", "first", "numbers", "session", "size", "tail"),
        *("_sent", "answering", "ends", "lost", "position", "reading"),
    )

    def __init__(self, recent: Recent, session: int) -> None:
        self._recent = recent
        self.session = session
        self.tail: list[bytes] = []
        """Bodies that are not packed yet. Empty except while ``recent`` distributes bodies."""
        self.numbers: list[int] = []
        """The number of the message of each body in ``tail``."""
        self._chunks: deque[Chunk] = deque()
        self._places: dict[int, Place] = {}
        """The place of each request that is in this log, the earliest place first."""
        self.first = 0
        """Number of the first message that the requests of this log need."""
        self.size = 0
        """Bytes that the log stores, including the frames of its requests but not the bodies in
        ``recent``."""
        self.ends: dict[int, End] = {}
        """By stream: the stored ends, oldest first."""
        self.lost: dict[int, End] = {}
        """By stream: the ends whose messages were dropped because the queue of the connection was
        full."""
        self.answering: dict[int, Answer] = {}
        """By stream: the incomplete answers to the client's ATTACHes on the present connection. The
        end of such a stream may already be dropped from ``ends``."""
        self.reading: Iterator[int] | None = None
        """Reads the entries of ``answering``. Each ``next`` reads a part (``answers.py``)."""
        self.position = 0
        """The position of the last end that was sent to the client."""
        self._sent: dict[int, End] = {}
        """By position: the ends that were sent on the present connection."""

    @property
    def oldest(self) -> int | None:
        """The id of the request that began first; None if the log has no requests."""
        return next(iter(self._places), None)

    # --- requests -------------------------------------------------------------------------------

    def begin(self, request: int, stream_id: int, size: int, sent: bytes = b"") -> None:
        """Adds a request that is sent to a worker, or whose end is stored. ``size``: bytes of the
        request's frames or of its end. They count towards the log's size as long as the request is
        in the log.

        ``sent``: the entries of a moved request that were routed so far, as a body of TOKEN.
        """
        self.remove(request)
        first = self._recent.next
        if not self._places:
            self.first = first
        self._places[request] = Place(stream_id, size, first, self._recent.begin(self))
        self._grow(size)
        if sent:
            for body in divided(sent):
                self.append(body)

    def append(self, body: bytes) -> None:
        """Adds a body that the broker itself has made and routed."""
        self._recent.keep((self.session,), (body,))

    def repeats(self, request: int, received: int) -> None:
        """Notes that the worker of a request sends entries of the request again, from the number
        ``received`` on. The caller ensures that the request has at least this number of entries. So
        the bytes of the entries bound the number of pairs in ``Place.again``."""
        place = self._places.get(request)
        if place is None:
            return
        again = place.again = place.again or []
        before = len(again)
        # These pairs have no effect, because the entries after them are sent once more.
        while again and again[-1][1] >= received:
            again.pop()
        again.append((self._recent.next, received))
        grown = AGAIN_BYTES * (len(again) - before)
        place.size += grown
        self._grow(grown)

    def has(self, request: int) -> bool:
        """Whether the entries of a request are in this log."""
        return request in self._places

    def close(self, end: End, sent: bytes, now: float) -> None:
        """Stores the end of a request. The request's entries stay until ``drop`` is called. In the
        log's size, the bytes of the end replace those of the request's frames. ``sent``: if the
        stream is not in this log, its entries as a body of TOKEN."""
        before = self.ends.get(end.stream_id)
        if before is None and len(self.ends) >= MAX_ENDS:
            before = next(iter(self.ends.values()))
        if before is not None:
            self.drop(before)
        end.since = now
        self.ends[end.stream_id] = end
        size = END_BYTES + sum(map(len, end.closing or ()))
        place = self._places.get(end.request)
        if place is not None:
            self._grow(size - place.size)
            place.size = size
        elif self._recent.enabled:
            self.begin(end.request, end.stream_id, size, sent)

    def remove(self, request: int) -> None:
        """Removes a request that has ended, or cannot move any more. Drops bodies that no other
        request needs."""
        place = self._places.pop(request, None)
        if place is None:
            return
        self._grow(-place.size)
        if place.first == self.first:
            oldest = next(iter(self._places.values()), None)
            self.first = oldest.first if oldest is not None else self._recent.next
            while self._chunks and self._chunks[0].numbers[-1] < self.first:
                self._grow(-self._chunks.popleft().size)
        self._recent.end(self, place.segment)

    def give_up(self) -> int:
        """Removes the request that began first, and its end; returns the id of the request."""
        number, place = next(iter(self._places.items()))
        end = self.of(number, place.stream_id)
        if end is not None:
            self.drop(end)
        self.remove(number)
        return number

    def _grow(self, by: int) -> None:
        self.size += by
        self._recent.grew(self, by)

    # --- bodies ---------------------------------------------------------------------------------

    def pack(self) -> None:
        """Moves the bodies in ``tail`` into chunks."""
        bodies, numbers = self.tail, self.numbers
        self.tail, self.numbers = [], []
        if min(bodies) >= MSGPACK and sum(map(len, bodies)) < chunks.CHUNK_BYTES:
            self._pack(bodies, numbers, "msgpack")
            return
        first = size = 0
        for end, body in enumerate(bodies, 1):
            size += len(body)
            encoding = chunk_encoding(body)
            is_full = size >= chunks.CHUNK_BYTES or end == len(bodies)
            if is_full or chunk_encoding(bodies[end]) != encoding:
                self._pack(bodies[first:end], numbers[first:end], encoding)
                first, size = end, 0

    def _pack(self, bodies: list[bytes], numbers: list[int], encoding: Encoding) -> None:
        """Adds bodies to the last chunk, or to a new chunk."""
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.encoding != encoding or chunk.size >= chunks.CHUNK_BYTES:
            chunk = Chunk(encoding)
            self._chunks.append(chunk)
        before = chunk.size
        chunk.add(bodies, numbers)
        self._grow(chunk.size - before)

    def entries(self, requests: Iterable[int]) -> dict[int, list[Token]]:
        """The entries that were routed for each of these requests, in order.

        Raises RequestError if a body cannot be decoded.
        """
        found: dict[int, list[Token]] = {request: [] for request in requests}
        for _, entries in self.read(found):
            for request, entry in entries:
                found[request].append(entry)
        return found

    def read(self, requests: Iterable[int]) -> Iterator[tuple[int, list[tuple[int, Token]]]]:
        """Reads the entries of requests in parts, so that the caller can pause between two parts.
        For each part, yields the number of bytes that were read, and the entries, each with its
        request.

        The caller must read only requests that have ended, unless it reads all parts at once: a
        live request may get entries between two parts. Raises RequestError if a body cannot be
        decoded.
        """
        end = self._recent.next
        while self._recent.distributed < end:
            before = self._recent.size
            self._recent.distribute(BODIES_AT_ONCE)
            yield before - self._recent.size, []
        wanted = set(requests)
        routed = {
            place.stream_id: Routed(request, place)
            for request, place in self._places.items()
            if request in wanted
        }
        first = min((each.first for each in routed.values()), default=end)
        for chunk in list(self._chunks):
            if chunk.numbers[-1] >= first:
                yield chunk.size, chunks.read(chunk, routed)

    # --- ends -----------------------------------------------------------------------------------

    def on_sent(self, end: End) -> None:
        """Records that an end is sent on the present connection."""
        self._sent.pop(end.position, None)
        self.position += 1
        end.position = self.position
        self._sent[end.position] = end

    def on_lost(self, end: End) -> None:
        """Records that the message with an end was dropped. Until the end is sent again,
        acknowledgements do not apply to it."""
        self._sent.pop(end.position, None)
        end.position = 0
        self.lost[end.stream_id] = end

    def of(self, request: int, stream_id: int) -> End | None:
        """The stored end of a request, if any."""
        end = self.ends.get(stream_id)
        return end if end is not None and end.request == request else None

    def drop(self, end: End) -> None:
        """Removes an end, and the entries before it."""
        if self.ends.get(end.stream_id) is end:
            del self.ends[end.stream_id]
            self.lost.pop(end.stream_id, None)
        self._sent.pop(end.position, None)
        self.remove(end.request)

    def acknowledged(self, position: int) -> list[End]:
        """The ends up to a position, which the client has acknowledged."""
        sent = takewhile(lambda item: item[0] <= position, self._sent.items())
        return [end for _, end in sent]

    def on_taken_over(self, now: float) -> None:
        """Handles a new connection of the client. The client will attach to each stream whose end
        it has not received."""
        self._sent.clear()
        self.lost.clear()
        for end in self.ends.values():
            end.since, end.position = now, 0

    def expired(self, before: float, most: int) -> list[End]:
        """Up to ``most`` ends whose ``since`` precedes the time ``before``."""
        older = takewhile(lambda end: end.since < before, self.ends.values())
        return list(islice(older, most))
