"""Adopts live requests that workers report. An earlier run of this broker, or another broker, has
accepted these requests.

A session's id is computed from the session's token, and workers report the id. So the broker can
restore the session of a reported request before the client has connected again, and recognize the
client by its token later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..protocol.bodies import decode_as
from ..protocol.columns import TokenBody
from ..protocol.errors import Code, RequestError
from ..protocol.header import FORM, Flag, Header, decode_header
from ..protocol.ids import is_session_token, session_id
from ..protocol.messages import Attach, Cancel
from ..protocol.worker_messages import Claimed, Journal, Register, Released
from .attaches import Attaches
from .claims import Claims
from .controllers import Controllers
from .dispatch import Dispatcher
from .ends import Ends
from .fences import NO_SESSION, drop, give_up, send_claim
from .reconcile import Known, Progress, Verdict, is_behind, judge
from .request import STREAMS, Request, RoutingFields, Steering, Unclaimed
from .returns import Returns
from .session import Session
from .state import BrokerState
from .worker import Worker

log = logging.getLogger(__name__)

MAX_ENDED = 250
"""Maximum number of adopted requests that one tick ends because no client has attached to them."""


class Adoption:
    """Adopts live requests for ``recover_s`` after the start of this broker.

    A worker that registers reports its live requests. The broker requests their journals, and makes
    a request from each journal. The request's session waits for its client, which sends HELLO with
    the session's token and then an ATTACH for each stream. If no client has attached to a request
    when ``recover_s`` is over, the request ends.

    At any time, a client may come from another broker. Each GPU worker then receives a CLAIM for
    the client's session, and sends the journals of the session's streams. A stream to which the
    client does not attach within ``session_grace_s`` ends.
    """

    def __init__(
        self,
        state: BrokerState,
        dispatcher: Dispatcher,
        attaches: Attaches,
        ends: Ends,
        controllers: Controllers,
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._sessions = state.sessions
        self._recovery = state.recovery
        self._dispatcher = dispatcher
        self._attaches = attaches
        self._ends = ends
        self._controllers = controllers
        self._ended = False
        self._adopted = 0
        self._due: OrderedDict[int, float] = OrderedDict()
        """The deadlines of adopted requests in seconds, by request, the earliest deadline first. If
        no client has attached to a request by its deadline, the request ends. The table has ids,
        because a request that has ended or was withdrawn must not stay in memory."""
        self._claims = Claims(state)
        self._returns = Returns(state, dispatcher)
        self._variables: dict[int, list[int]] = {}
        """For each state worker: the requests whose variables the worker reported when it
        registered."""

    def open(self) -> bool:
        """Whether workers may still report requests for adoption, because ``recover_s`` is not
        over."""
        return not self._ended and not self._recovery.has_ended(self._state.now)

    # --- workers --------------------------------------------------------------------------------

    def reported(self, worker: Worker, message: Register) -> tuple[list[int], list[int]]:
        """Handles the live requests that a worker reports when it registers. Returns the requests
        that the worker must drop, and the requests whose journals the worker must send. The second
        list includes the requests that return to this worker (``returns.py``)."""
        returned = self._returns.reported(worker, message)
        live = [each.request for each in message.live]
        if live:
            self._recovery.follow()
        known = self._state.requests
        if worker.role == "state":
            # Some of these requests may still be adopted, so the state worker does not drop their
            # variables yet.
            if not self._may_adopt():
                return [request for request in live if request not in known], []
            self._variables[worker.id] = live
            return [], []
        wanted = returned
        if worker.role == "gpu" and self.open():
            adopted = [r for r in live if r not in known or known[r].reported is not None]
            wanted = returned + adopted
            for request in filter(None, map(known.get, adopted)):
                # Before the JOURNAL arrives, the request may move to another worker or be sent to
                # this one again. In both cases, the fence discards entries of the reported attempt.
                worker.fences.add(request.id, request.session.id, request.stream_id)
        kept = set(wanted)
        return [request for request in live if request not in kept], wanted

    def _may_adopt(self) -> bool:
        """Whether an unknown request may still be adopted."""
        return self.open() or bool(self._claims.sessions)

    def on_journal(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's JOURNAL: the request returns to the worker, or is adopted."""
        header = decode_header(frames[1])
        body: Journal = decode_as(Journal, frames[2], "msgpack")
        worker.fences.progressed(self._state.now)
        request = self._state.requests.get(header.request)
        if request is not None and request.worker is worker:
            self._returns.on_journal(request, body, b"".join(frames[3:4]))
        elif not body.gone:
            self._adopt(worker, header, body, frames[3:])

    def _adopt(
        self, worker: Worker, header: Header, body: Journal, attached: Sequence[bytes]
    ) -> None:
        """Adopts the request of a JOURNAL, or orders the worker to drop a request that must not be
        adopted."""
        if len(attached) < 2:
            raise RequestError(
                Code.BAD_MESSAGE,
                f"this JOURNAL has {3 + len(attached)} frames; expected at least 5: type, header, "
                "body, the entries that were sent, and the request",
            )
        sent, *frames = attached
        fields: RoutingFields = decode_as(RoutingFields, frames[0])
        count = _num_entries(sent) if body.entries is None else body.entries
        copy = Progress(body.moves - body.claimed, count)
        verdict = judge(copy, body.ended, self._known(header, fields.stream_id))
        if verdict is Verdict.IGNORE:
            return
        session = self._session(header) if verdict is Verdict.ADOPT else None
        other = self._state.requests.get(header.request)
        if session is not None:
            session.withdrawn.pop(header.request, None)
        if session is None or not self._has_room(session, other, worker.brokers):
            give_up(self._state, worker, header.request, header.address, fields.stream_id)
            return
        if other is not None:
            self._withdraw(other)
        self._ends.drop(session, fields.stream_id)
        worker.fences.reported(header.request)
        request = self._request(header, session, body, fields, count)
        request.frames = frames
        self._adopted += 1
        if body.ended:
            self._attaches.on_adopted_end(request, sent)
            return
        self._dispatcher.adopt(request, worker, sent)
        due = max(self._state.now + self._settings.session_grace_s, self._recovery.until)
        self._due[request.id] = due
        self._due.move_to_end(request.id)
        self._attaches.on_adopted(request, sent, header.flags & FORM)

    def _has_room(self, session: Session, other: Request | None, brokers: int) -> bool:
        """Whether a session has room for a copy that replaces ``other``, if given."""
        return other is not None or self._state.quotas.may_adopt(session, brokers)

    def _request(
        self, header: Header, session: Session, body: Journal, fields: RoutingFields, entries: int
    ) -> Request:
        """Makes the request that a JOURNAL describes, without its frames."""
        # ``adopted_at`` makes START wait for controller workers that have not registered yet. For
        # the request of a claimed session, the field is not set: such a request may come long after
        # this broker's start, and all controller workers have registered by then.
        adopted_at = None if header.address in self._claims else self._state.now
        arrived, name = self._state.now - body.age_s, fields.steered_by(body.type.encode())
        return Request(
            id=header.request,
            session=session,
            type=body.type.encode(),
            fields=fields,
            frames=[],
            arrived=arrived,
            deadline=None if fields.timeout_s is None else arrived + fields.timeout_s,
            steering=Steering(name, adopted_at=adopted_at) if name else None,
            attachment=Unclaimed(body.claimed),
            entries=entries,
            moves=body.moves,
        )

    def _known(self, header: Header, stream_id: int) -> Known:
        """Collects the knowledge of this broker about a stream that a worker reports."""
        other = self._state.requests.get(header.request)
        copy = other.reported if other is not None else None
        attached = other is not None and copy is None
        session = self._sessions.by_id.get(header.address)
        over = complete = reused = False
        client = None
        if session is not None:
            complete = bool(session.token) and not session.recovering
            stream, end = session.streams.get(stream_id), session.log.ends.get(stream_id)
            reused = stream is not other or (end is not None and end.request != header.request)
            held = self._attaches.held(session, stream_id)
            client = Progress(held.moves, held.received) if held is not None else None
            if end is not None and end.request == header.request:
                copy, over = end.reached, end.reached is None
        return Known(
            awaited=self.open() or header.address in self._claims,
            cancelled=self._attaches.is_cancelled(header.address, stream_id),
            other=copy,
            attached=attached,
            over=over,
            client=client,
            complete=complete,
            reused=reused,
        )

    def _session(self, header: Header) -> Session | None:
        """The session of an adopted request. If its client has not connected yet, makes the
        session; returns None if the broker has too many sessions."""
        session = self._sessions.by_id.get(header.address)
        if session is not None:
            return session
        if len(self._sessions) >= self._settings.max_sessions:
            return None
        now = self._state.now
        session = Session(
            id=header.address,
            token="",
            key="",
            encoding="msgpack" if header.flags & Flag.MSGPACK else "json",
            peer=None,
            last_seen=now,
            greeted=True,
            columns=bool(header.flags & Flag.COLUMNS),
            texts=bool(header.flags & Flag.TEXTS),
            # The session waits for its client until the time for adoption is over.
            detached_at=max(now, self._recovery.until - self._settings.session_grace_s),
        )
        self._sessions.add(session)
        return session

    def _withdraw(self, request: Request) -> None:
        """Orders the worker of a request to drop the request, because another worker has a later
        copy."""
        worker = request.worker
        self._dispatcher.withdraw(request)
        if worker is not None:
            give_up(self._state, worker, request.id, request.session.id, request.stream_id)

    # --- clients --------------------------------------------------------------------------------

    def claim(self, token: str, key: str, now: float) -> Session | None:
        """Returns the session of a client whose token is not in the table of sessions. Returns None
        if the token is not valid, or if the time for adoption is over.

        If no worker has reported the session yet, a new session is made, which receives the streams
        that workers report later.
        """
        if not self.open() or not is_session_token(token):
            return None
        session = self._claimed(token, key, now)
        # Controllers of the session's streams have waited for the client, because the client's key
        # determines which modules the controllers may use.
        self._controllers.start_of(session)
        return session

    def pick_up(self, token: str, key: str, peer: bytes, now: float) -> Session | None:
        """Returns the session of a client that comes from another broker, on the connection
        ``peer``.

        If this broker already has the session, it removes the session's streams, because they may
        have continued at another broker. The workers then report the streams again."""
        if not is_session_token(token):
            return None
        session = self._claimed(token, key, now)
        for request in list(session.streams.values()):
            worker = request.worker
            if request.type not in STREAMS or (worker is None and request.interruption is None):
                continue
            if worker is not None:
                # The fence keeps the place of the stream until the worker has reported the stream.
                worker.fences.add(request.id, session.id, request.stream_id)
            self._dispatcher.withdraw(request)
            session.withdrawn[request.id] = request.stream_id
        self._claims.add(session.id, peer)
        self._begin_claims(now)
        self._controllers.start_of(session)
        return session

    def _claimed(self, token: str, key: str, now: float) -> Session:
        """Returns the session with a client's token, and makes the session if this broker does not
        have it. Workers may report more streams of the session later."""
        self._recovery.follow()
        number = session_id(token, key)
        session = self._sessions.by_id.get(number)
        if session is None:
            session = Session(
                id=number, token=token, key=key, encoding="json", peer=None, last_seen=now
            )
            self._sessions.add(session)
        elif not session.token:
            self._sessions.claim(session, token, key)
        session.recovering = True
        return session

    def on_registered(self, worker: Worker) -> None:
        """Handles the registration of a GPU worker, which may have streams of sessions that are
        being claimed. The broker sends a CLAIM only for sessions with a connection: a client
        without a connection may have gone to the next broker."""
        if worker.role == "gpu":
            fences = worker.fences.all_unasked()
            if fences:
                send_claim(self._state, worker, fences)
            sessions = map(self._sessions.by_id.get, self._claims.sessions)
            here = {s.id for s in sessions if s is not None and s.peer is not None}
            self._claims.on_registered(worker, here)

    def on_claimed(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's CLAIMED: the worker has reported all its streams of a session. A
        CLAIMED with session 0 ends fences (``fences.py``), and confirms that the worker has taken
        requests (``in_flight.py``)."""
        claimed: Claimed = decode_as(Claimed, frames[2], "msgpack")
        session = claimed.session
        num_fences = len(worker.fences)
        number = worker.fences.answered(session, self._state.now)
        if len(worker.fences) < num_fences:
            self._dispatcher.resume(worker)
        if session == NO_SESSION:
            self._dispatcher.on_taken(worker, number)
            return
        self._claims.on_claimed(worker, session)
        self._finish_claims([session])
        self._begin_claims(self._state.now)

    def on_lost(self, worker: Worker) -> None:
        """Handles the loss of a worker, which will not answer claims any more."""
        self._finish_claims(self._claims.on_lost(worker))
        self._begin_claims(self._state.now)

    def on_ended(self, session: Session) -> None:
        """Handles the end of a session, whose streams are not needed any more."""
        self._claims.on_ended(session.id)
        self._attaches.drop_held(session.id)

    def _begin_claims(self, now: float) -> None:
        self._finish_claims(self._claims.begin(now))

    def _finish_claims(self, sessions: Iterable[int]) -> None:
        """Handles the sessions among ``sessions`` whose CLAIM every worker has answered. Ends the
        turns of their claims (``claims.py``) and removes the claims. Refuses ATTACHes to streams
        that no worker has reported. During ``recover_s``, nothing is removed or refused, because
        more workers may register."""
        is_open = self.open()
        for session in sessions:
            if self._claims.finish(session, forget=not is_open):
                known = self._sessions.by_id.get(session)
                if known is not None:
                    known.withdrawn.clear()
                self._attaches.refuse(session, known)

    def on_released(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's RELEASED: another broker has claimed requests of this worker. If the
        other broker was paused, its claim may come late, when the client has already returned to
        this broker. In this case, ``Session.displaced`` is set."""
        released: Released = decode_as(Released, frames[2], "msgpack")
        for number in released.requests:
            request = self._state.requests.get(number)
            if request is not None and request.worker is worker:
                request.session.displaced = request.session.peer is not None
                self._dispatcher.withdraw(request)

    def on_attach(self, session: Session, frames: list[bytes]) -> None:
        """Handles a client's ATTACH; raises RequestError if the stream does not exist."""
        message: Attach = decode_as(Attach, frames[1])
        request = session.streams.get(message.stream_id)
        client = Progress(message.moves, message.received)
        reported = request.reported if request is not None else None
        if request is not None and reported is not None and is_behind(reported, False, client):
            # The worker of the stream was cut off, and the request has continued elsewhere.
            self._withdraw(request)
        end = session.log.ends.get(message.stream_id)
        if end is not None:
            # An end that this broker has routed may precede entries that another broker has routed.
            moved = end.reached is None and end.moves < client.moves
            if moved or (end.reached is not None and is_behind(end.reached, True, client)):
                self._ends.drop(session, message.stream_id)
        self._attaches.on_attach(session, message, hold=self.waits_for(session))

    def waits_for(self, session: Session) -> bool:
        """Whether a worker may still report streams of a session."""
        return session.id in self._claims or (session.recovering and self.open())

    def on_cancel(self, session: Session, frames: list[bytes]) -> None:
        """Handles a client's CANCEL."""
        message: Cancel = decode_as(Cancel, frames[1])
        if not self._attaches.on_cancel(session, message.stream_id, self.waits_for(session)):
            request = session.streams[message.stream_id]
            self._dispatcher.cancel(request, self._state.now, message.reason)

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Begins claims that wait. When ``recover_s`` is over, refuses held ATTACHes, ends adopted
        requests to which no client has attached, and makes state workers drop the variables of
        unknown requests."""
        self._begin_claims(now)
        if self._variables and self._ended and not self._may_adopt():
            self._drop_variables()
        self._end_unclaimed(now)
        if self._ended or not self._recovery.has_ended(now):
            return
        self._ended = True
        for session in self._claims.answered():
            self._claims.finish(session, forget=True)
        self._attaches.refuse_held(self._sessions.by_id, self._claims.sessions)
        if self._adopted:
            log.info("%d streams of an earlier run were adopted", self._adopted)

    def _drop_variables(self) -> None:
        """Makes state workers drop the variables of the unknown requests that they have
        reported."""
        for number, live in self._variables.items():
            worker = self._state.workers.get(number)
            gone = [request for request in live if request not in self._state.requests]
            if worker is not None and gone:
                drop(self._state, worker, gone)
        self._variables.clear()

    def _end_unclaimed(self, now: float) -> None:
        """Ends adopted requests to which no client has attached in time, at most ``MAX_ENDED`` in
        each tick."""
        for _ in range(MAX_ENDED):
            number, due = next(iter(self._due.items()), (0, float("inf")))
            if due > now:
                return
            del self._due[number]
            request = self._state.requests.get(number)
            if request is not None and request.reported is not None:
                self._dispatcher.abandon(request)


def _num_entries(sent: bytes) -> int:
    """The number of entries in a body of TOKEN from a worker of an earlier release; raises
    RequestError if the body is malformed."""
    body: TokenBody = decode_as(TokenBody, sent, "msgpack")
    return len(body) if isinstance(body, list) else len(body.streams) // 8 + len(body.entries)
