"""Handles requests whose worker is lost. Such requests wait for another worker, and start before
all queued requests.

A request moves with its journal (``stream_log.py``): the next worker continues after the entries
that were routed, so that the client misses no entry and receives none twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from ..protocol.bodies import decode_as, encode_body
from ..protocol.columns import TokenBody, TokenColumns, column_entries
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.messages import System, Token
from ..protocol.transcript import transcript_of
from .lifecycle import Event, transition
from .quarantine import Quarantine
from .request import REPEATABLE, STREAMS, Interruption, Request
from .session import Session
from .state import BrokerState
from .stream_log import StreamLog
from .worker import RETRY_AFTER_S, Loss, Worker

log = logging.getLogger(__name__)


class Moves:
    """Takes requests from lost workers, and prepares each request for the worker that continues it.
    Keeps logs within their bounds."""

    def __init__(self, state: BrokerState, quarantine: Quarantine) -> None:
        self._state = state
        self._settings = state.settings
        self._recent = state.recent
        self._out = state.out
        self._quarantine = quarantine

    # --- the log --------------------------------------------------------------------------------

    def sent(self, request: Request, before: bytes = b"", *, back: bool = False) -> None:
        """Records that a request is sent to a worker. From now on, the log of the request's session
        stores the request's entries, so that the request can move.

        If the broker does not store journals, the request's frames are dropped. ``before``: the
        entries that were routed earlier, as a body of TOKEN. ``back``: whether the request returns
        to its former worker, which still runs it.
        """
        interruption, request.interruption = request.interruption, None
        if not back:
            self._quarantine.on_start(request, self._state.now)
        if interruption is not None and not back:
            request.moves += 1
        if not self._settings.max_journal_bytes:
            request.frames = []
        if not request.movable:
            return
        stored = request.session.log
        sent = interruption.sent if interruption is not None else before
        stored.begin(request.id, request.stream_id, request.bytes, sent)

    def returned(self, request: Request, frames: list[bytes]) -> None:
        """Prepares a request for another worker, after its worker has refused it."""
        request.dispatched, request.frames = None, frames
        request.session.log.remove(request.id)
        self._quarantine.forget(request)
        self._answer_attaching(request)

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended for its client."""
        self._quarantine.forget(request)
        if request.session.log.of(request.id, request.stream_id) is None:
            request.session.log.remove(request.id)

    def tick(self) -> None:
        """Distributes some of the recent messages to logs (``recent.py``), and clears suspects
        (``quarantine.py``)."""
        self._recent.tick()
        self._quarantine.tick(self._state.now)

    def settle(self) -> None:
        """Adds the TOKENs that were routed in the current event to the buffer of recent messages,
        and keeps logs within their bounds. Above a bound, the entries of the oldest requests are
        dropped, and these requests cannot move any more."""
        recent = self._recent
        recent.settle()
        while recent.beyond:
            stored = recent.beyond.pop()
            while stored.size > recent.most and stored.oldest is not None:
                self._give_up(stored)
        if recent.total > recent.max_total:
            self._give_up_largest()

    def _give_up_largest(self) -> None:
        """Drops the entries of requests until all logs together are within their bound. Each step
        chooses the key whose logs have the most bytes and this key's largest log, and drops the
        entries of the oldest request in this log."""
        recent = self._recent
        by_owner: dict[str | int, list[tuple[int, int, StreamLog]]] = {}
        for stored in recent.logs.values():
            session = self._state.sessions.by_id.get(stored.session)
            owner = (session.key if session is not None else "") or stored.session
            by_owner.setdefault(owner, []).append((-stored.size, stored.session, stored))
        # Both heaps have negative sizes, so the largest size comes first. A search of all logs for
        # each request that is dropped would take seconds if many requests are small.
        largest = []
        for number, logs in enumerate(by_owner.values()):
            heapify(logs)
            largest.append((sum(size for size, _, _ in logs), number, logs))
        heapify(largest)
        while recent.total > recent.max_total and largest:
            total, number, logs = largest[0]
            before, session_id, stored = logs[0]
            self._give_up(stored)
            if stored.oldest is None:
                heappop(logs)
            else:
                heapreplace(logs, (-stored.size, session_id, stored))
            if logs:
                heapreplace(largest, (total - before - stored.size, number, logs))
            else:
                heappop(largest)

    def _give_up(self, stored: StreamLog) -> None:
        """Drops the entries of the oldest request in a log. The request cannot move any more."""
        request = self._state.requests.get(stored.give_up())
        if request is None:
            return
        request.frames = []
        if request.type not in STREAMS or not request.open:
            return
        notice = System(
            event="not_movable",
            message="this stream cannot continue at another worker: its entries were dropped "
            "because journals exceeded max_journal_bytes or max_total_journal_bytes",
            stream_id=request.stream_id,
            model=request.model,
        )
        self._out.to_session(request.session, b"SYSTEM", notice)

    # --- the loss of a worker -------------------------------------------------------------------

    def take(
        self, worker: Worker, requests: Iterable[Request], loss: Loss
    ) -> list[tuple[Request, TokenbusError]]:
        """Makes the open requests of a lost worker wait for another worker. Returns the requests
        that cannot move, each with the error that ends it."""
        ended: list[tuple[Request, TokenbusError]] = []
        error = UnavailableError(
            Code.WORKER_LOST,
            f"the worker {worker.name} that ran this stream was lost ({loss.why}); send the "
            "request again",
            retry_after_s=RETRY_AFTER_S,
        )
        by_session: dict[Session, list[Request]] = {}
        for request in requests:
            if request.movable and (request.type in STREAMS or request.type in REPEATABLE):
                by_session.setdefault(request.session, []).append(request)
            else:
                ended.append((request, error))
        taken: list[tuple[Request, list[Token]]] = []
        for session, of_it in by_session.items():
            try:
                sent = session.log.entries(request.id for request in of_it)
            except RequestError as malformed:
                log.error("the streams of worker %s cannot continue: %s", worker.name, malformed)
                ended += [(request, error) for request in of_it]
                continue
            taken += [(request, sent[request.id]) for request in of_it]
        guilty = self._guilty(taken, worker, loss)
        for request, entries in taken:
            if request in guilty:
                self._state.counters.requests_quarantined += 1
                ended.append((request, self._quarantined(request, worker, loss.why)))
            else:
                self._take(request, entries, worker, loss)
        return ended

    def _guilty(
        self, taken: list[tuple[Request, list[Token]]], worker: Worker, loss: Loss
    ) -> list[Request]:
        """The requests that have killed ``worker``, as the quarantine decides. ``taken``: the
        worker's requests, each with its entries."""
        silent_since = worker.last_seen + 2 * self._settings.heartbeat_s
        idle = [
            request
            for request, entries in taken
            # Requests that were sent when the worker was already silent cannot have killed it.
            if request.dispatched is not None
            and request.dispatched <= silent_since
            and request.type in STREAMS
            and len(entries) <= request.entries
        ]
        others = [r for r, entries in taken if len(entries) > r.entries]
        return self._quarantine.on_loss(worker.name, idle, others, loss.died, self._state.now)

    @staticmethod
    def _quarantined(request: Request, worker: Worker, why: str) -> TokenbusError:
        return RequestError(
            Code.QUARANTINED,
            f"{request.deaths} consecutive workers were lost before they produced a token of this "
            f"request; the last one was {worker.name} ({why}); change the request before you send "
            "it again",
        )

    def _take(self, request: Request, entries: list[Token], worker: Worker, loss: Loss) -> None:
        now, name = self._state.now, request.model or worker.default
        if request.began_with is None:
            request.began_with = worker.models.get(name)
        request.entries = len(entries)
        request.interruption = Interruption(
            left=worker.name,
            process=worker.process if loss.returns else 0,
            why=loss.why,
            at=min(worker.last_seen, now),
            since=now,
            sent=encode_body(entries, "msgpack") if entries else b"",
        )
        request.session.log.remove(request.id)
        transition(self._state, request, Event.LOSE)
        self._state.counters.requests_moved += 1
        self._answer_attaching(request)
        log.debug("request %d leaves worker %s: %s", request.id, worker.name, loss.why)

    def worker_lives(self, name: str) -> None:
        """Handles the return of a worker that was lost: the worker's process did not die."""
        self._quarantine.lives(name)

    # --- while a request waits ------------------------------------------------------------------

    def may_start(self, request: Request) -> bool:
        """Whether a request that has lost its worker may go to another worker now."""
        return self._quarantine.may_start(request)

    def transcript(self, request: Request) -> list[bytes]:
        """The transcript for a stream that moves to another worker, as an attachment; empty if the
        request does not move or is not a stream."""
        interruption = request.interruption
        if interruption is None or request.type not in STREAMS:
            return []
        pause_s = round(self._state.now - interruption.at, 3)
        left, why = interruption.left, interruption.why
        return [transcript_of(interruption.sent, left, why, pause_s, request.moves + 1)]

    def attach(self, request: Request, received: int) -> None:
        """Answers an ATTACH to a stream without a worker: the client gets the entries that it has
        not received."""
        interruption = request.interruption
        if interruption is not None and received < request.entries:
            self.answer(request, interruption.sent, received)
        else:
            self._answer_without_entries(request, received)

    def _answer_attaching(self, request: Request) -> None:
        """Answers the ATTACHes that the worker of a request has not answered. Only the last answer
        is followed by the entries that the client has not received."""
        attaching, request.attaching = request.attaching, []
        for received in attaching[:-1]:
            self._answer_without_entries(request, received)
        for received in attaching[-1:]:
            self.attach(request, received)

    def answer(self, request: Request, sent: bytes, received: int) -> None:
        """Answers an ATTACH with the entries of a stream, without the first ``received`` entries.
        ``sent``: the entries as a body of TOKEN; empty without entries."""
        body: TokenBody = decode_as(TokenBody, sent, "msgpack") if sent else []
        entries = column_entries(body) if isinstance(body, TokenColumns) else body
        first = min(received, len(entries))
        missed = entries[first:]
        self._out.attached(request.session, request.stream_id, request.moves, missed, first)

    def _answer_without_entries(self, request: Request, received: int) -> None:
        first = min(received, request.entries)
        self._out.attached(request.session, request.stream_id, request.moves, [], first)

    @staticmethod
    def unserved(request: Request) -> TokenbusError:
        """The error of a request that no worker can continue."""
        interruption = request.interruption
        left, why = (interruption.left, interruption.why) if interruption is not None else ("", "")
        return UnavailableError(
            Code.WORKER_LOST,
            f"the worker {left} that ran this stream was lost ({why}), and no other worker with "
            "the same model has registered since; send the request again",
            retry_after_s=RETRY_AFTER_S,
        )
