"""Returns streams to their former worker, if the worker was only cut off from the broker for a
while.

When the worker was cut off, its lease ended, and its streams began to wait for another worker. When
the same process registers again, the streams that still wait return to this process. Before its
other messages, the worker sends a JOURNAL for each stream. The client receives the entries of the
JOURNAL that were not routed yet.
"""

from __future__ import annotations

import logging

from ..protocol.bodies import decode_as, encode_body
from ..protocol.columns import TokenBody, TokenColumns, column_entries
from ..protocol.errors import Code, RequestError
from ..protocol.messages import Token
from ..protocol.worker_messages import Journal, Register
from .dispatch import Dispatcher
from .lifecycle import Event, RequestState, transition
from .reconcile import Verdict, judge_return
from .request import STREAMS, Request
from .state import BrokerState
from .worker import UnreadableError, Worker

log = logging.getLogger(__name__)


class Returns:
    """Returns streams to their former workers."""

    def __init__(self, state: BrokerState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def reported(self, worker: Worker, message: Register) -> list[int]:
        """Assigns waiting streams to their former worker, which registers again. Returns the ids of
        these streams' requests; the worker must send their journals. Call this before any waiting
        request is started at the worker."""
        if self._state.is_hung(worker):
            return []
        returned = []
        for live in message.live:
            request = self._state.waiting.get(live.request)
            interruption = request.interruption if request is not None else None
            if request is None or interruption is None or request.reported is not None:
                continue
            had_it = (interruption.left, interruption.process) == (worker.name, worker.process)
            if request.type in STREAMS and had_it:
                self._dispatcher.take_back(request, worker)
                returned.append(request.id)
        if returned:
            log.info(
                "%d streams continue at worker %s, which has registered again",
                len(returned),
                worker.name,
            )
        return returned

    def on_journal(self, request: Request, body: Journal, sent: bytes) -> None:
        """Handles the JOURNAL of a request that returns. ``sent``: all entries that the worker has
        sent for the request. The client receives the entries that were not routed yet. A second
        JOURNAL of a request has no effect.

        Raises UnreadableError if the worker's entries do not continue the entries that were routed.
        """
        returns = request.state is RequestState.RETURNING and not body.gone
        entries = _entries(sent) if returns else []
        match judge_return(request.state, request.routed, body, len(entries)):
            case Verdict.FORGET:
                self._dispatcher.forget(request)
            case Verdict.MOVE:
                self._dispatcher.move(request, "it has lost the stream")
            case Verdict.CONTINUE:
                self._continue(request, entries[request.entries :], body.ended)
            case Verdict.INCONSISTENT:
                raise UnreadableError(
                    Code.BAD_MESSAGE,
                    f"the JOURNAL of request {request.id} has {len(entries)} entries after "
                    f"{body.moves} moves; {request.entries} entries after {request.moves} moves "
                    "were routed",
                )

    def _continue(self, request: Request, new: list[Token], ended: bool) -> None:
        """Continues a request at its former worker. ``new``: the entries that were not routed.
        ``ended``: whether they include the end of the stream."""
        transition(self._state, request, Event.REPORT)
        if new:
            session = request.session
            routed = encode_body(new, session.encoding)
            self._state.out.tokens(session, routed)
            session.log.append(routed)
        if ended:
            self._dispatcher.on_finished(request)


def _entries(sent: bytes) -> list[Token]:
    """The entries of a TOKEN body; raises UnreadableError if the body is malformed."""
    try:
        body: TokenBody = decode_as(TokenBody, sent, "msgpack")
    except RequestError as error:
        raise UnreadableError(error.code, error.message) from None
    return column_entries(body) if isinstance(body, TokenColumns) else body
