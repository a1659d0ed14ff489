"""Answers ATTACHes from stored ends. Between two ticks, only a bounded number of bytes is sent.

A stream that has ended can have more than 100 MB of entries, and a client can attach to the stream
on one connection after another. So keys take turns, and the sessions of a key share the turns of
the key. In its turn, a session gets a part of the answer to its oldest unanswered ATTACH. A small
answer fits into one turn, and is sent at once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..protocol.bodies import decode_as, encode_body, encoding_of, error_body
from ..protocol.errors import Code, ConnectionLostError, RequestError, TokenbusError
from ..protocol.messages import Msg
from .journal import Journal
from .kept_ends import End
from .outgoing import Outgoing, Side
from .pieces import Pieces
from .session import Session
from .state import BrokerState

log = logging.getLogger(__name__)

PASS_BYTES = 1024 * 1024
"""Budget in bytes for reading, decoding and sending between two ticks. A part that exceeds the rest
of the budget also uses the budget of later ticks."""
PART_BYTES = 256 * 1024
"""In one turn, whole pieces are decoded until this number of bytes is reached."""
ENTRY_BYTES = 200
"""Number of bytes that are charged to the budget for each entry, in addition to the bytes of the
entry."""
TURN_BYTES = 256
"""Number of bytes that are charged to the budget for each turn, in addition to the bytes of its
part."""


class Answers:
    """The answers to ATTACHes whose streams have ended. ``on_sent(session, end)`` is called when an
    answer is complete."""

    def __init__(self, state: BrokerState, on_sent: Callable[[Session, End], None]) -> None:
        self._out = state.out
        self._on_sent = on_sent
        self._waiting: OrderedDict[str | int, OrderedDict[int, Session]] = OrderedDict()
        """The sessions with incomplete answers by key, or by session without keys. Keys, and
        sessions of a key, are in the order of their turns."""
        self._left = PASS_BYTES
        """Number of bytes that are left of the budget until the next tick; negative after a large
        part."""

    @property
    def behind(self) -> bool:
        """Whether incomplete answers are left for the next tick."""
        return bool(self._waiting)

    def begin(self, session: Session, end: End, received: Sequence[int]) -> None:
        """Begins to answer ATTACHes to a stored end. ``received``: ``Attach.received`` of each
        ATTACH. The entries follow the answer to the last ATTACH, from its ``received`` on, in place
        of an incomplete earlier answer."""
        if session.peer is None or not received:
            return
        if end.is_stream and (end.closing is None or _has_entries(session, end)):
            if not _has_entries(session, end):
                self._refuse(session, end, RequestError(Code.UNKNOWN_STREAM, _not_kept(end)))
                self._on_sent(session, end)
                return
            for number in received:
                answer = Msg(stream_id=end.stream_id, attached=number, moves=end.moves)
                self._out.to_session(session, b"MSG", answer)
        session.ends.lost.pop(end.stream_id, None)
        end.next = received[-1]
        session.ends.answering[end.stream_id] = end
        self._waiting.setdefault(session.key or session.id, OrderedDict())[session.id] = session
        self._advance()

    def tick(self, _: float) -> None:
        """Continues the incomplete answers."""
        self._left = min(PASS_BYTES, self._left + PASS_BYTES)
        self._advance()

    def _advance(self) -> None:
        """Gives turns to the waiting sessions, as long as the budget lasts."""
        while self._left > 0 and self._waiting:
            owner, sessions = self._waiting.popitem(last=False)
            _, session = sessions.popitem(last=False)
            if sessions:
                self._waiting[owner] = sessions
            self._left -= TURN_BYTES + self._turn(session)
            if session.ends.answering:
                sessions = self._waiting.setdefault(owner, OrderedDict())
                sessions[session.id] = session

    def _turn(self, session: Session) -> int:
        """Reads or sends the next part of a session's oldest incomplete answer; returns the number
        of bytes to charge."""
        ends = session.ends
        if session.peer is None or not session.alive:
            ends.answering.clear()
        if not ends.answering:
            ends.reading = None
            return 0
        stream_id, end = ends.answering.popitem(last=False)
        if ends.by_stream.get(stream_id) is not end:
            # The end was dropped meanwhile, because the bound of the session's journal, or of its
            # ends, was reached.
            self._refuse(session, end, ConnectionLostError(Code.CONNECTION_LOST, _not_kept(end)))
            return 0
        try:
            charged, done = self._part(session, end)
        except TokenbusError as error:
            log.error("stream %d of session %d cannot be read: %s", stream_id, session.id, error)
            ends.reading, charged, done = None, 0, True
            if end.closing is None:
                lost = ConnectionLostError(Code.CONNECTION_LOST, _not_kept(end))
                self._refuse(session, end, lost)
        if not done:
            ends.answering[stream_id] = end
            ends.answering.move_to_end(stream_id, last=False)
            return charged
        if end.closing is not None:
            charged += sum(map(len, end.closing))
            self.send_closing(session, end.closing)
        self._on_sent(session, end)
        return charged

    def _part(self, session: Session, end: End) -> tuple[int, bool]:
        """Reads or sends the next part of the entries before an end. Returns the number of bytes to
        charge, and whether all entries were sent. Raises RequestError if an entry is malformed."""
        ends = session.ends
        if end.is_stream and not isinstance(end.sent, Pieces) and ends.reading is None:
            ends.reading = self._reading(session, end)
        if ends.reading is not None:
            charged = next(ends.reading, None)
            if charged is not None:
                return charged, False
            ends.reading = None
        if not isinstance(end.sent, Pieces):
            return 0, True
        entries, decoded = end.sent.part(end.next, PART_BYTES)
        if entries:
            self._out.to_session(session, b"TOKEN", entries)
        end.next += len(entries)
        return decoded + ENTRY_BYTES * len(entries), end.next >= end.sent.count

    @staticmethod
    def _reading(session: Session, end: End) -> Iterator[int] | None:
        """Starts to read the entries before an end. If they are in the journal, the entries before
        all ends of the session are read together. None if no entries are stored."""
        journal = session.journal
        if end.sent is not None:
            return _split(end, end.sent)
        if not journal.has(end.request):
            return None
        unread = (e for e in session.ends.by_stream.values() if e.sent is None)
        return _read(journal, [e for e in unread if journal.has(e.request)])

    def _refuse(self, session: Session, end: End, error: TokenbusError) -> None:
        self._out.count_error(error)
        self._out.to_session(session, b"ERROR", error_body(error, end.stream_id))

    def send_closing(self, session: Session, closing: Sequence[bytes]) -> None:
        """Sends the message that ends a request, in the present encoding of the session."""
        if session.peer is None:
            return
        message_type, body, *attached = closing
        if encoding_of(body) != session.encoding:
            body = encode_body(decode_as(Any, body), session.encoding)
        frames = (message_type, body, *attached)
        self._out.append(Outgoing(Side.FRONT, session.peer, frames, True))


def _has_entries(session: Session, end: End) -> bool:
    """Whether the entries before an end are stored."""
    return end.sent is not None or session.journal.has(end.request)


def _not_kept(end: End) -> str:
    return (
        f"the entries of stream {end.stream_id}, which has ended, are not kept any more; send the "
        "request again"
    )


def _split(end: End, sent: bytes | Pieces) -> Iterator[int]:
    """Splits a body of TOKEN with the entries before an end into pieces. Yields the bytes to charge
    for each part."""
    pieces = Pieces()
    if sent and isinstance(sent, bytes):
        yield from pieces.split(sent)
    end.sent = pieces


def _read(journal: Journal, ends: Sequence[End]) -> Iterator[int]:
    """Reads the entries before several ends from the journal of their session, which is decoded
    once for all these ends. Yields the bytes to charge for each part."""
    wanted = {end.request: end for end in ends}
    found = {request: Pieces() for request in wanted}
    for size, entries in journal.read(wanted):
        for request, entry in entries:
            found[request].add(entry)
        yield size + ENTRY_BYTES * len(entries)
    for request, end in wanted.items():
        if journal.has(request):
            end.sent = found[request]
            size = end.sent.size + sum(map(len, end.closing or ()))
            journal.begin(request, end.stream_id, size)
