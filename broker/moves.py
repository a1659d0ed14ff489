"""Requests whose worker is lost: they wait here for another worker, before all queued requests.

A request moves with its journal (``journal.py``): the next worker continues after the entries that
were routed, so that its client receives neither a gap nor a repeated entry.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from ..protocol.bodies import decode_as, encode_body
from ..protocol.columns import TokenBody, TokenColumns, column_entries
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.messages import ModelInfo, System, Token
from ..protocol.transcript import transcript_of
from .journal import Journal
from .outgoing import Outgoings
from .quarantine import Quarantine
from .recent import BODIES_AT_ONCE
from .settings import BrokerSettings
from .sweep import Sweep
from .tables import RETRY_AFTER_S, Interruption, Loss, Request, Session, SessionTable, Worker

log = logging.getLogger(__name__)

STREAMS = frozenset((b"GENERATE", b"SCORE"))
"""Requests that are answered by TOKENs: they continue where they stopped."""
REPEATABLE = frozenset((b"MODEL_INFO", b"TOKENIZER", b"UPLOAD", b"TAG", b"TAGS"))
"""Requests that are sent again from their beginning, because they can safely be repeated."""


JOURNALS_AT_ONCE = 300
"""Journals that one tick checks."""
WALK_TICKS = 32
"""Ticks in which all journals are checked."""


class Moves:
    """Takes requests from lost workers, and decides where each may continue."""

    def __init__(
        self,
        settings: BrokerSettings,
        sessions: SessionTable,
        requests: Mapping[int, Request],
        out: Outgoings,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._recent = sessions.recent
        self._requests = requests
        self._out = out
        self.waiting: dict[int, Request] = {}
        """Requests that have left a worker and wait for another, in the order of their loss."""
        self._in_order: list[tuple[int, float, int]] = []
        """These requests in the order in which they continue: -priority, arrival, id."""
        self._journals = Sweep(sessions.by_id, JOURNALS_AT_ONCE, WALK_TICKS)
        self._largest = 0
        """Bytes of the largest journal that the current walk has seen."""
        self.moved = 0
        """Requests that have left a worker since the broker started."""
        self.quarantined = 0
        self.quarantine = Quarantine()

    # --- the journal ----------------------------------------------------------------------------

    def sent(self, request: Request, before: bytes = b"", *, back: bool = False) -> None:
        """Records that a request goes to a worker: from now on its session's journal has the
        entries that it needs to move.

        Its frames are stored if it has a journal. ``before``: the entries that were routed earlier,
        as a body of TOKEN. ``back``: the worker is the one that it had, and still runs it.
        """
        interruption, request.interruption = request.interruption, None
        self._stop_waiting(request)
        if interruption is not None and not back:
            request.moves += 1
        if not self._settings.max_journal_bytes:
            request.movable = False
        if not request.movable:
            request.frames = []
            return
        journal = request.session.journal
        journal.json = journal.json or request.session.encoding == "json"
        sent = interruption.sent if interruption is not None else before
        journal.begin(request.id, request.stream_id, request.bytes, sent)
        self.keep_bounds()

    def returned(self, request: Request, frames: list[bytes]) -> None:
        """Takes a request back from a worker that had no room for it."""
        request.worker, request.dispatched = None, None
        request.frames, request.movable = frames, True
        request.session.journal.end(request.id)
        self.quarantine.forget(request)
        for received in request.attaching:
            self.attach(request, received)
        request.attaching.clear()

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended for its client."""
        self._stop_waiting(request)
        self.quarantine.forget(request)
        if request.session.ends.of(request.id, request.stream_id) is None:
            request.session.journal.end(request.id)

    def settle(self) -> None:
        """Stores the messages that were routed in the current event."""
        if self._recent.settle():
            self.keep_bounds()

    def tick(self) -> None:
        """Distributes some of the recent messages to journals, and checks the bounds of
        journals."""
        recent = self._recent
        recent.tick()
        if self._journals.begins:
            recent.walked(self._largest)
            self._largest = 0
        for session in self._journals.part():
            self._largest = max(self._largest, session.journal.size)
        self.keep_bounds()

    def keep_bounds(self) -> None:
        """Keeps journals within their bounds: above these, the oldest streams cannot move any
        more."""
        recent = self._recent
        while recent.size > max(0, recent.limit):
            recent.distribute(BODIES_AT_ONCE)
        while recent.beyond:
            journal = recent.beyond.pop()
            while journal.size > recent.most and journal.oldest is not None:
                self._give_up(journal)
        if recent.total > recent.max_total:
            self._give_up_largest()

    def _give_up_largest(self) -> None:
        """Gives up requests until all journals together are within their bound: each time, a
        request in the largest journal of the key whose journals have the most bytes."""
        recent = self._recent
        sizes: Counter[str | int] = Counter()
        journals: dict[str | int, list[Journal]] = {}
        for session in self._sessions:
            if session.journal.oldest is not None:
                owner = session.key or session.id
                sizes[owner] += session.journal.size
                journals.setdefault(owner, []).append(session.journal)
        while recent.total > recent.max_total:
            [(owner, _)] = sizes.most_common(1)
            largest = max(journals[owner], key=lambda j: j.size)
            before = largest.size
            self._give_up(largest)
            sizes[owner] -= before - largest.size
            if largest.oldest is None:
                journals[owner].remove(largest)
                if not journals[owner]:
                    del sizes[owner]

    def _give_up(self, journal: Journal) -> None:
        """Gives up the oldest request in a journal, which cannot move any more."""
        number = journal.oldest
        assert number is not None
        stream_id = journal.stream_of(number)
        journal.end(number)
        session = self._sessions.by_id.get(journal.session)
        end = session.ends.of(number, stream_id) if session is not None else None
        if session is not None and end is not None:
            session.ends.drop(end)
        request = self._requests.get(number)
        if request is None:
            return
        request.movable = False
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
        self,
        worker: Worker,
        requests: Iterable[Request],
        loss: Loss,
        now: float,
    ) -> list[tuple[Request, TokenbusError]]:
        """Takes over the open requests of a worker that is lost; those that cannot move come back,
        with the error that ends them."""
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
                sent = session.journal.entries(request.id for request in of_it)
            except RequestError as malformed:
                log.error("what worker %s sent cannot be continued: %s", worker.name, malformed)
                ended += [(request, error) for request in of_it]
                continue
            taken += [(request, sent[request.id]) for request in of_it]
        silent_since = worker.last_seen + 2 * self._settings.heartbeat_s
        idle = [
            request
            for request, entries in taken
            # Requests that arrived when the worker was already silent cannot be the cause.
            if request.dispatched is not None
            and request.dispatched <= silent_since
            and request.type in STREAMS
            and len(entries) <= request.entries
        ]
        others = [r for r, entries in taken if len(entries) > r.entries]
        guilty = self.quarantine.on_loss(worker.name, idle, others, loss.died, now)
        for request, entries in taken:
            if request in guilty:
                self.quarantined += 1
                ended.append((request, self._quarantine(request, worker, loss.why)))
            else:
                self._take(request, entries, worker, loss, now)
        return ended

    @staticmethod
    def _quarantine(request: Request, worker: Worker, why: str) -> TokenbusError:
        return RequestError(
            Code.QUARANTINED,
            f"{request.deaths} consecutive workers were lost before they produced a token of this "
            f"request; the last one was {worker.name} ({why}); change the request before you send "
            "it again",
        )

    def _take(
        self,
        request: Request,
        entries: list[Token],
        worker: Worker,
        loss: Loss,
        now: float,
    ) -> None:
        name = request.model or worker.default
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
        request.session.journal.end(request.id)
        request.worker, request.returning = None, False
        self.waiting[request.id] = request
        insort(self._in_order, _place(request))
        self.moved += 1
        for received in request.attaching:
            self.attach(request, received)
        request.attaching.clear()
        log.debug("request %d leaves worker %s: %s", request.id, worker.name, loss.why)

    # --- while a request waits ------------------------------------------------------------------

    def first(self, number: int) -> list[Request]:
        """Up to ``number`` waiting requests: the highest priority first, then by arrival."""
        return [self.waiting[request] for _, _, request in self._in_order[:number]]

    def _stop_waiting(self, request: Request) -> None:
        if self.waiting.pop(request.id, None) is not None:
            del self._in_order[bisect_left(self._in_order, _place(request))]

    def transcript(self, request: Request, now: float) -> list[bytes]:
        """The journal of a stream that goes to another worker, as an attachment; empty for another
        request."""
        interruption = request.interruption
        if interruption is None or request.type not in STREAMS:
            return []
        pause_s = round(now - interruption.at, 3)
        left, why = interruption.left, interruption.why
        return [transcript_of(interruption.sent, left, why, pause_s, request.moves + 1)]

    def attach(self, request: Request, received: int) -> None:
        """Answers a client that attaches to a waiting stream with the entries that it has not
        received."""
        sent = request.interruption.sent if request.interruption is not None else b""
        self.answer(request, sent, received)

    def answer(self, request: Request, sent: bytes, received: int) -> None:
        """Answers an ATTACH with the entries of a stream (a body of TOKEN, or nothing) after the
        first ``received``."""
        body: TokenBody = decode_as(TokenBody, sent, "msgpack") if sent else []
        entries = column_entries(body) if isinstance(body, TokenColumns) else body
        self._out.attached(request.session, request.stream_id, request.moves, entries, received)

    @staticmethod
    def fits(request: Request, worker: Worker) -> bool:
        """Whether a request may continue at a worker: it has the same model, as far as is known."""
        began_with = request.began_with
        if began_with is None:
            return True
        name = request.model or worker.default
        loaded = worker.models.get(name)
        return name == began_with.name and (loaded is None or same_model(loaded, began_with))

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

    def overdue(self, now: float, number: int, closing: bool = False) -> list[Request]:
        """Up to ``number`` requests that no worker serves and whose waiting time is over; if the
        broker is ``closing``, it is over at once."""
        since = now - self._settings.move_wait_s
        waiting = islice(self.waiting.values(), number)
        return [
            r
            for r in waiting
            if closing or (r.interruption is not None and r.interruption.since < since)
        ]


def _place(request: Request) -> tuple[int, float, int]:
    return -request.priority, request.arrived, request.id


def same_model(model: ModelInfo, other: ModelInfo) -> bool:
    """Whether two workers' models give the same tokens, as far as their reports show."""
    ours, theirs = (
        (m.fingerprint, m.vocab_size, m.architecture, m.parameters, m.dtype, m.sampling)
        for m in (model, other)
    )
    return ours == theirs
