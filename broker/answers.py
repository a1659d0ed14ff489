"""Answers ATTACHes to streams that have ended, from the stored ends. Between two ticks, only a
bounded number of bytes is sent.

A stream that has ended can have more than 100 MB of entries, and a client can attach to the stream
on one connection after another. So the keys of clients take turns, and the sessions of a key share
the turns of the key. In each turn, a part of one session's answers is sent. One reading of a
session's log serves all ATTACHes that wait when the reading begins. Small answers are sent at once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..protocol.bodies import decode_as, encode_body, encoding_of, error_body
from ..protocol.errors import Code, ConnectionLostError, RequestError, TokenbusError
from ..protocol.messages import Msg
from .outgoing import Outgoing, Side
from .session import Session
from .state import BrokerState
from .stream_log import Answer, End

log = logging.getLogger(__name__)

PASS_BYTES = 1024 * 1024
"""Maximum bytes that are read, decoded and sent between two ticks. The last part may exceed this
bound. Fewer bytes are then sent after the next ticks."""
ENTRY_BYTES = 200
"""Number of bytes that count for each entry, in addition to the bytes of the entry."""
TURN_BYTES = 256
"""Number of bytes that count for each turn, in addition to the bytes that the turn sends."""


class Answers:
    """The answers to ATTACHes whose streams have ended. ``on_sent(session, end)`` is called when an
    answer is complete."""

    def __init__(self, state: BrokerState, on_sent: Callable[[Session, End], None]) -> None:
        self._out = state.out
        self._on_sent = on_sent
        self._waiting: OrderedDict[str | int, OrderedDict[int, Session]] = OrderedDict()
        """By key: the sessions with incomplete answers. A session without a key has its own entry.
        Keys, and the sessions of each key, are in the order of their turns."""
        self._left = PASS_BYTES
        """Number of bytes that may still be sent before the next tick. Negative if the last part
        exceeded the bound."""

    @property
    def behind(self) -> bool:
        """Whether incomplete answers are left for the next tick."""
        return bool(self._waiting)

    def begin(self, session: Session, end: End, received: Sequence[int]) -> None:
        """Begins to answer ATTACHes to a stream whose end is stored. ``received``:
        ``Attach.received`` of each ATTACH. Only the answer to the last ATTACH has entries. It
        begins after the first ``received[-1]`` entries of the stream. If an earlier answer is
        incomplete, the new answer replaces it."""
        if session.peer is None or not received:
            return
        if end.stored:
            for number in received:
                answer = Msg(stream_id=end.stream_id, attached=number, moves=end.moves)
                self._out.to_session(session, b"MSG", answer)
        elif end.closing is None:
            self._refuse(session, end, RequestError(Code.UNKNOWN_STREAM, _not_kept(end)))
            self._on_sent(session, end)
            return
        session.log.lost.pop(end.stream_id, None)
        session.log.answering[end.stream_id] = Answer(end, received[-1])
        self._waiting.setdefault(session.key or session.id, OrderedDict())[session.id] = session

    def tick(self, _: float) -> None:
        """Continues the incomplete answers."""
        self._left = min(PASS_BYTES, self._left + PASS_BYTES)
        self.advance()

    def advance(self) -> None:
        """Gives turns to the waiting sessions as long as ``_left`` is above 0. Call this method at
        the end of an event, so that ATTACHes that arrive together are answered together."""
        while self._left > 0 and self._waiting:
            owner, sessions = self._waiting.popitem(last=False)
            _, session = sessions.popitem(last=False)
            if sessions:
                self._waiting[owner] = sessions
            self._left -= TURN_BYTES + self._turn(session)
            if session.log.answering:
                sessions = self._waiting.setdefault(owner, OrderedDict())
                sessions[session.id] = session

    def _turn(self, session: Session) -> int:
        """Reads or sends the next part of a session's incomplete answers; returns the number of
        bytes to count. ATTACHes that arrive while answers are read wait for the next reading."""
        session_log = session.log
        if session.peer is None or not session.alive:
            session_log.answering.clear()
        if session_log.reading is None and session_log.answering:
            session_log.reading = self._read(session, list(session_log.answering.values()))
        charged = next(session_log.reading, None) if session_log.reading is not None else None
        if charged is None or not session_log.answering:
            session_log.reading = None
        return charged or 0

    def _read(self, session: Session, answers: Sequence[Answer]) -> Iterator[int]:
        """Reads the log of a session once for several answers, and sends these answers. Yields the
        number of bytes to count for each part."""
        session_log, malformed = session.log, False
        by_request = {answer.end.request: answer for answer in answers if answer.end.stored}
        try:
            for size, entries in session_log.read(by_request):
                sent = [e for number, e in entries if by_request[number].sends_next(session_log)]
                if sent:
                    self._out.to_session(session, b"TOKEN", sent)
                yield size + ENTRY_BYTES * len(entries)
        except RequestError as error:
            log.error("ended streams of session %d cannot be read: %s", session.id, error)
            malformed = True
        for answer in answers:
            if session_log.answering.get(answer.end.stream_id) is answer:
                yield self._finish(session, answer.end, malformed)

    def _finish(self, session: Session, end: End, malformed: bool) -> int:
        """Sends the last message of an answer; returns the number of its bytes. ``malformed``:
        whether the entries could not be read."""
        session_log, closing = session.log, end.closing or ()
        del session_log.answering[end.stream_id]
        dropped = session_log.ends.get(end.stream_id) is not end
        if dropped or (malformed and not closing):
            # The end may have been dropped in the meantime, because the session's log or its ends
            # have reached their bound.
            self._refuse(session, end, ConnectionLostError(Code.CONNECTION_LOST, _not_kept(end)))
        elif closing:
            self.send_closing(session, closing)
        if not dropped:
            self._on_sent(session, end)
        return sum(map(len, closing))

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


def _not_kept(end: End) -> str:
    return (
        f"the entries of stream {end.stream_id}, which has ended, are not kept any more; send the "
        "request again"
    )
