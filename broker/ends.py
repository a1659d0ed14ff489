"""Ends requests for their clients. Each request ends exactly once.

An end is the last entry of a stream, an ERROR or a MSG. The broker may notice late that a
connection has failed, so an end that it sends may be lost. The broker stores each end until the
client acknowledges the end or attaches to the stream, or until the end expires.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from ..protocol.bodies import encode_body, error_body
from ..protocol.errors import (
    Code,
    ConnectionLostError,
    SlowClientError,
    TokenbusError,
)
from ..protocol.messages import FinishReason, Token
from .answers import Answers
from .request import STREAMS, Request
from .session import Session
from .state import BrokerState
from .stream_log import End
from .unread import LARGE_BYTES

log = logging.getLogger(__name__)

MAX_CLOSING_BYTES = 1024 * 1024
"""Maximum size of a stored answer, in bytes. If a larger answer is lost, the client receives an
ERROR instead."""
MAX_CLOSING_BYTES_WITHOUT_JOURNAL = 4096
"""Maximum size of a stored answer, in bytes, if the broker does not store journals
(``max_journal_bytes`` 0)."""
MAX_EXPIRED = 250
"""Maximum number of stored ends of a session that one tick drops."""
MAX_SENT_AGAIN = 64
"""Maximum number of a session's ends that one tick sends again. An end is sent again if its message
was dropped."""


class Ends:
    """Ends requests for their clients, and stores the ends that may not have arrived."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._settings = state.settings
        self._out = state.out
        self.answers = Answers(state, self._was_sent)
        self._max_pending = state.settings.max_pending_bytes
        self._keeps = state.recent.enabled
        self._max_closing = MAX_CLOSING_BYTES if self._keeps else MAX_CLOSING_BYTES_WITHOUT_JOURNAL

    # --- requests that end ----------------------------------------------------------------------

    def error(self, request: Request, error: TokenbusError) -> None:
        """Ends a request with an ERROR."""
        self._out.count_error(error)
        body = encode_body(error_body(error, request.stream_id), request.session.encoding)
        self._close(request, (b"ERROR", body))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a stream with an entry that the broker creates."""
        entry = Token(token=None, stream_id=request.stream_id, logprob=None, finish_reason=reason)
        self._close(request, (b"TOKEN", encode_body([entry], request.session.encoding)))

    def answered(self, request: Request, frames: Sequence[bytes]) -> None:
        """Ends a request with its worker's answer, which is an ERROR or a MSG. If the answer is
        large, and too many bytes of earlier answers may be unread, the broker sends its own ERROR
        instead."""
        peer, size = request.session.peer, sum(map(len, frames[1:]))
        if peer is not None:
            unread = self._state.sessions.unread
            try:
                if size >= LARGE_BYTES:
                    what = f"an answer of {size} bytes"
                    unread.check(peer, self._max_pending, what, "read the earlier answers first")
            except SlowClientError as error:
                self.error(request, error)
                return
            unread.add(peer, size)
        self._close(request, frames)

    def finished(self, request: Request) -> None:
        """Handles a stream whose last entries were routed. Stores the end if the client may need it
        again."""
        session = request.session
        if not (session.acks or request.awaits_attach or session.peer is None):
            return
        end = self._keep(request, None)
        if end is None:
            return
        if request.attaching:
            self._answer_attaching(request, end)
        elif session.peer is not None and not request.awaits_attach:
            session.log.on_sent(end)

    def keep(self, request: Request, sent: bytes) -> None:
        """Stores the end of a stream that a worker has reported for adoption. ``sent``: the entries
        of the stream, as a body of TOKEN."""
        end = self._keep(request, None, sent)
        if end is not None:
            end.reached = request.reported

    def _close(self, request: Request, closing: Sequence[bytes]) -> None:
        """Sends the message that ends a request. If the client has to attach first, the message is
        sent after the client's ATTACH."""
        session = request.session
        wanted = session.acks or request.awaits_attach or session.peer is None
        end = self._keep(request, closing) if wanted else None
        if end is not None and request.attaching:
            self._answer_attaching(request, end)
            return
        awaited = end is not None and request.awaits_attach
        if session.peer is None or (awaited and session.recovers):
            return
        self.answers.send_closing(session, closing)
        if end is not None and not awaited:
            session.log.on_sent(end)

    def _answer_attaching(self, request: Request, end: End) -> None:
        """Answers the ATTACHes that the worker of a request has not answered."""
        attaching, request.attaching = request.attaching, []
        self.answers.begin(request.session, end, attaching)

    # --- the stored ends ------------------------------------------------------------------------

    def _keep(
        self, request: Request, closing: Sequence[bytes] | None, sent: bytes | None = None
    ) -> End | None:
        """Stores the end of a request, unless the request's session has ended or ends with its
        connection."""
        session = request.session
        if not session.alive or not (session.greeted or request.attaching):
            return None
        if sent is None and request.worker is None:
            sent = request.interruption.sent if request.interruption is not None else b""
        if closing is not None and sum(map(len, closing)) > self._max_closing:
            closing = self._too_large(session, request.stream_id, closing)
        # Without journals, the end of a stream can be sent again only if the stream has no entries.
        stored = session.log.has(request.id) or sent == b"" or (bool(sent) and self._keeps)
        stored = stored and request.type in STREAMS
        end = End(request.id, request.stream_id, request.moves, closing, stored)
        session.log.close(end, sent or b"", self._state.now)
        return end

    @staticmethod
    def _too_large(session: Session, stream_id: int, closing: Sequence[bytes]) -> Sequence[bytes]:
        """The ERROR that is stored in place of an answer above the bound."""
        lost = ConnectionLostError(
            Code.CONNECTION_LOST,
            f"the answer of {sum(map(len, closing))} bytes was sent on a connection that is lost, "
            f"and an answer of more than {MAX_CLOSING_BYTES} bytes is not kept; send the request "
            "again",
        )
        return b"ERROR", encode_body(error_body(lost, stream_id), session.encoding)

    def drop(self, session: Session, stream_id: int) -> None:
        """Drops the end of a stream, because the session's client does not need this end any
        more."""
        session.log.answering.pop(stream_id, None)
        end = session.log.ends.get(stream_id)
        if end is not None:
            session.log.drop(end)

    def acknowledge(self, session: Session, position: int) -> None:
        """Handles an acknowledgement: the client has received all ends up to this position
        (``stream_log.py``)."""
        for end in session.log.acknowledged(position):
            session.log.drop(end)

    def tick(self, session: Session) -> None:
        """Sends again the ends whose messages were dropped. Removes the ends that the client has
        neither acknowledged nor attached to in time."""
        if session.peer is None:
            return
        session_log = session.log
        for end in list(islice(session_log.lost.values(), MAX_SENT_AGAIN)):
            del session_log.lost[end.stream_id]
            if end.closing is not None:
                self.answers.send_closing(session, end.closing)
            self._was_sent(session, end)
        before = self._state.now - self._settings.session_cut_s
        for end in session_log.expired(before, MAX_EXPIRED):
            if end.stream_id not in session_log.answering:
                session_log.drop(end)

    # --- messages that were dropped -------------------------------------------------------------

    def lost(self, session: Session, stream_id: int, closing: Sequence[bytes]) -> None:
        """Handles a dropped message that ends a stream: a later tick sends ``closing`` instead."""
        session.log.on_lost(self._closed(session, stream_id, closing))

    def fail(self, session: Session, stream_id: int, error: TokenbusError) -> None:
        """Handles a stream whose last entries were dropped: an ERROR ends the stream, and is sent
        at once."""
        closing = (b"ERROR", encode_body(error_body(error, stream_id), session.encoding))
        end = self._closed(session, stream_id, closing)
        self.answers.send_closing(session, closing)
        self._was_sent(session, end)

    def fail_answers(self, session: Session, error: TokenbusError) -> None:
        """Ends a session's incomplete answers to ATTACHes with an ERROR, because some entries of
        these answers were dropped."""
        for stream_id in list(session.log.answering):
            self.fail(session, stream_id, error)

    def _closed(self, session: Session, stream_id: int, closing: Sequence[bytes]) -> End:
        """Makes ``closing`` the final message of a stream's stored end, and returns this end."""
        end = session.log.ends.get(stream_id)
        if end is None:
            # A refused request does not have an id. So its end is stored under a number that is not
            # the id of any request.
            end = End(-1 - stream_id, stream_id, 0, closing, stored=False)
            session.log.close(end, b"", self._state.now)
        end.closing = closing
        return end

    # --- ATTACH ---------------------------------------------------------------------------------

    def attach(self, session: Session, stream_id: int, received: int) -> bool:
        """Begins to answer an ATTACH with the stored end of a stream. Returns False if no end is
        stored, or if the end was already sent on the present connection."""
        end = session.log.ends.get(stream_id)
        if end is None or end.position:
            return False
        end.reached = None
        self.answers.begin(session, end, [received])
        return True

    def _was_sent(self, session: Session, end: End) -> None:
        """Records that an end was sent. Only an acknowledgement shows whether the end has arrived.
        If the client does not send acknowledgements, the end is dropped now."""
        session.log.answering.pop(end.stream_id, None)
        if session.acks:
            session.log.on_sent(end)
        else:
            session.log.drop(end)
