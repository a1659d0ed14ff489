"""Dispatch: assigns requests to workers, queues requests, and ends them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice

from ..protocol import logs
from ..protocol.bodies import decode_as
from ..protocol.errors import Code, ServiceError, TokenbusError
from ..protocol.header import Flag, decode_header, encode_header, waited_flags
from ..protocol.messages import Cancel, System
from ..protocol.worker_messages import Refused
from .controllers import Controllers
from .ends import Ends
from .fences import give_up, send_claim
from .lifecycle import Event, NoTransitionError, RequestState, transition
from .losses import log_continued, log_given_up
from .moves import Moves
from .outgoing import Outgoing, Side
from .placement import Placement
from .queue_bounds import QueueBounds
from .request import CancelReason, Request
from .spans import record_span
from .state import BrokerState
from .worker import Loss, Worker

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0
"""Seconds in which a worker must end a cancelled request. After this time, the broker ends the
request itself."""

MAX_ENDED = 250
"""Maximum number of requests that one tick ends for the same reason. If more requests are due, the
next tick follows soon."""
MAX_STARTED = 100
"""Maximum number of requests that one event moves to other workers after their worker was lost."""
MAX_LOOKED_AT = 2_000
"""Maximum number of requests without a worker that one event examines."""
MAX_NOTICES = 400
"""Maximum number of notices of a place in the queue that one tick sends."""


class Dispatcher:
    """Sends each request to a worker with room, or queues the request."""

    def __init__(
        self,
        state: BrokerState,
        controllers: Controllers,
        moves: Moves,
        ends: Ends,
        placement: Placement,
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._out = state.out
        self._pools = state.pools
        self._controllers = controllers
        self._moves = moves
        self._ends = ends
        self._placement = placement
        self._queue_bounds = QueueBounds(state.settings, state.queues)
        self._unserved: dict[tuple[str, str], float] = {}
        """For each queue without a worker that serves it: the time at which the broker first
        noticed this, in seconds."""
        self._early: set[tuple[str, str]] = set()
        """Queues whose requests arrived before a worker with the requests' model had registered."""
        self.behind = False
        """Whether the last tick has left work for the next one."""
        self._places: Iterator[tuple[Request, int]] = iter(())
        """The waiting requests, each with its place in its queue, that the current round of notices
        has not reached yet."""

    # --- the life of a request ------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Starts a request on a worker, or queues the request. Raises TokenbusError if the request
        is refused."""
        state, early = self._state, False
        try:
            worker = self._placement.candidates(*request.queue).least_loaded()
        except TokenbusError as error:
            if not state.recovery.awaits_workers(error, *request.queue, state.now):
                raise
            worker, early = None, True
        beyond = self._placement.beyond_capacity(request) if worker is None and not early else None
        if worker is not None:
            worker = self._placement.with_prefix(request, worker)
        elif beyond is None:
            self._queue_bounds.check(request, state.num_queued, state.now)
        if request.steering is not None:
            request.steering.awaited = self._controllers.check(request)
        if beyond is not None:
            beyond.take_beyond(request)
            worker = beyond
        if worker is not None:
            self._start(request, worker)
            return
        transition(state, request, Event.QUEUE)
        if early:
            self._early.add(request.queue)
        self._notify_queued(request, len(state.queues[request.queue]))

    def adopt(self, request: Request, worker: Worker, sent: bytes) -> None:
        """Adopts a request that its worker began for an earlier run of this broker, or for another
        broker.

        ``sent`` has the entries that the worker has sent, as a body of TOKEN.
        """
        transition(self._state, request, Event.ADOPT, worker)
        request.dispatched = request.arrived
        self._moves.sent(request, sent)

    def withdraw(self, request: Request) -> None:
        """Removes a request because another broker or another worker has the valid copy of it. The
        client is not notified."""
        self._controllers.withdraw(request)
        worker = request.worker
        transition(self._state, request, Event.WITHDRAW)
        self._on_gone(request, worker)

    def cancel(self, request: Request, now: float, reason: CancelReason) -> None:
        """Ends a request because its client has sent CANCEL, or because its time is up. The last
        TOKEN entry of the request has the reason.

        The worker of the request sends this entry. If the request has no worker, or if the worker
        does not send the entry in time (for example in a step that hangs), the broker sends it.
        """
        if request.worker is None:
            self._ends.finish(request, reason)
            self.forget(request)
        elif request.cancelled is None:
            request.cancelled = reason
            request.deadline = now + CANCEL_GRACE_S
            self._state.deadlines.add(request)
            self._send_cancel(request, reason)

    def abandon(self, request: Request, error: TokenbusError | None = None) -> None:
        """Ends a request for its client at once: with ``error``, or without an answer.

        The request's worker receives a CANCEL. Until the worker has reported the end, the request
        counts towards the worker's load.
        """
        if not request.open or request.state is RequestState.NEW:
            return
        if error is not None:
            request.error = error.message
            self._ends.error(request, error)
        if request.worker is None:
            self.forget(request)
            return
        transition(self._state, request, Event.CLOSE)
        self._moves.forget(request)
        self._send_cancel(request, "cancelled")

    def on_finished(self, request: Request) -> None:
        """Handles the end of a stream whose last entries were routed."""
        if request.open:
            self._ends.finished(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Removes a request that has ended from every table, and starts the next waiting
        request."""
        if request.state not in (RequestState.NEW, RequestState.GONE):
            worker = request.worker
            transition(self._state, request, Event.END)
            self._on_gone(request, worker)

    def _on_gone(self, request: Request, worker: Worker | None) -> None:
        """Handles a request that was just removed from all tables. ``worker``: the worker that had
        the request."""
        state = self._state
        self._moves.forget(request)
        if request.trace:
            record_span(request, worker)
        request.session.pace.note(state.now)
        if request.steering is not None:
            self._controllers.end(request)
        if worker is not None and (state.queues or state.waiting):
            self.refill(worker)

    def on_defect(self, where: str, error: Exception) -> None:
        """Counts and logs an exception that is a defect of the broker. After a NoTransitionError,
        the request ends for its client."""
        self._state.counters.internal_errors += 1
        log.error("a defect of the broker: %s failed", where, exc_info=error)
        if isinstance(error, NoTransitionError):
            failure = ServiceError(
                Code.INTERNAL, "the broker cannot continue this stream; the broker's log says why"
            )
            self.abandon(error.request, failure)

    def tick(self, now: float) -> None:
        """Checks deadlines, waiting requests and journals."""
        self.behind = False
        self.expire(now)
        self.refuse_unserved(now)
        self._moves.tick()
        if self._state.waiting:
            self._continue_moved()

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        due = list(islice(self._state.deadlines.due(now), MAX_ENDED))
        self.behind |= len(due) == MAX_ENDED
        for number in due:
            request = self._state.requests.get(number)
            if request is None or not request.open or request.deadline is None:
                continue
            if request.deadline > now:
                self._state.deadlines.add(request)
            elif request.cancelled is None:
                self.cancel(request, now, "timeout")
            else:
                self._ends.finish(request, request.cancelled)
                self.abandon(request)

    # --- workers --------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Adds a worker that has registered, and sends it requests that wait for a worker."""
        self._state.workers[worker.id] = worker
        self._pools.add(worker)
        self._state.recovery.registered(worker)
        self.rebalance()

    def remove(self, worker: Worker, loss: Loss) -> None:
        """Removes a worker that is lost; its streams move."""
        if self._state.workers.pop(worker.id, None) is None:
            return
        self._pools.remove(worker)
        unserved = set(worker.names()) - self._pools.names(worker.role)
        self._state.recovery.lost(worker, unserved, self._state.now)
        self._placement.on_lost(worker)
        self._controllers.on_lost(worker)
        self._take_from(worker, list(worker.requests.values()), loss)
        if not loss.replaced:
            self.rebalance(quiet=True)

    def move(self, request: Request, why: str) -> None:
        """Moves a request that its worker does not have any more. The request continues from its
        journal, at another worker or at the same worker."""
        assert request.worker is not None
        self._take_from(request.worker, [request], Loss(why, died=False, returns=False))
        self.rebalance()

    def take_back(self, request: Request, worker: Worker) -> None:
        """Returns a waiting request to its former worker, which has registered again and is about
        to be added."""
        transition(self._state, request, Event.RETURN, worker)
        self._moves.sent(request, back=True)

    def _take_from(self, worker: Worker, requests: list[Request], loss: Loss) -> None:
        """Removes requests from a worker. Each of them waits for another worker, or ends."""
        running = []
        for request in requests:
            if request.open and request.cancelled is None:
                running.append(request)
                continue
            if request.open and request.cancelled is not None:
                self._ends.finish(request, request.cancelled)
            self.forget(request)
        ended = self._moves.take(worker, running, loss)
        for request in running:
            self._controllers.on_moving(request)
        for request, error in ended:
            self._refuse([request], error)

    def rebalance(self, *, quiet: bool = False) -> None:
        """Starts waiting requests after the workers, or the models that they serve, have changed.
        ``quiet``: streams that continue after a wait are not logged.

        If the last worker for a request has gone, the request waits for another worker to register.
        If the default model has become ambiguous, requests that do not name a model are refused.
        """
        unclear = self._state.queues.get(("gpu", ""))
        if unclear is not None and not self._pools.default_model and self._pools.has_default:
            try:
                self._placement.candidates("gpu", "")
            except TokenbusError as error:
                self._refuse(list(unclear), error)
        if self._state.waiting:
            waiting = len(self._state.waiting)
            self._continue_moved()
            log_continued(0 if quiet else waiting - len(self._state.waiting))
        for role, model in list(self._state.queues):
            pool = self._pools.serving(role, model)
            if pool.workers:
                self._early.discard((role, model))
            while (role, model) in self._state.queues:
                worker = pool.least_loaded()
                if worker is None:
                    break
                self.refill(worker)
        self._controllers.start_waiting()

    def _refused_by(self, request: Request, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's refusal of a request. The worker is full, because other brokers use it
        too.

        Another worker receives the request, or the request waits. ``frames`` are the frames that
        the worker received.
        """
        if request.worker is not worker:
            return
        if request.moves or not request.open or request.cancelled is not None:
            loss = Loss("it has no room for the request", died=False)
            self._take_from(worker, [request], loss)
            self._continue_moved()
            return
        self._controllers.on_moving(request)
        self._moves.returned(request, frames)
        transition(self._state, request, Event.REFUSE)
        other = self._pools.serving(*request.queue).least_loaded()
        if other is not None:
            self._start(request, other)
        else:
            self._notify_queued(request, len(self._state.queues[request.queue]))

    def on_refused(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles REFUSED: a worker has no room for a message that the broker sent to it, or does
        not know the controller of a START."""
        refused: Refused = decode_as(Refused, frames[2], "msgpack")
        request = self._state.requests.get(decode_header(frames[1]).request)
        if not refused.unknown:
            worker.elsewhere = refused.elsewhere
            self._pools.note(worker)
        if request is None or len(frames) < 4:
            return
        if refused.type == "START":
            self._controllers.refused(request, worker, frames[3], refused.unknown)
        else:
            self._refused_by(request, worker, frames[3:])

    def count_elsewhere(self, worker: Worker, elsewhere: int) -> None:
        """Records how many requests of other brokers a worker runs."""
        worker.elsewhere, before = elsewhere, worker.elsewhere
        self._pools.note(worker)
        if elsewhere < before:
            self.resume(worker)
            self._controllers.fill(worker)

    def worker_lives(self, name: str) -> None:
        """Handles the return of a worker that was lost: the worker's process did not die."""
        self._moves.worker_lives(name)

    def resume(self, worker: Worker) -> None:
        """Starts waiting requests on a worker that may have room again, for example because its
        hung step has ended."""
        self._pools.note(worker)
        self.refill(worker)

    def refuse_unserved(self, now: float) -> None:
        """Refuses requests that have waited for ``move_wait_s`` without a worker that serves them,
        and requests for unknown models when no further worker is expected."""
        for key in [key for key in self._unserved if key not in self._state.queues]:
            del self._unserved[key]
        self._early &= self._state.queues.keys()
        for (role, model), queue in list(self._state.queues.items()):
            try:
                self._placement.candidates(role, model)
            except TokenbusError as error:
                since = self._unserved.setdefault((role, model), now)
                awaited = self._state.recovery.awaits_workers(error, role, model, now)
                in_vain = (role, model) in self._early and not awaited
                if in_vain or now - since >= self._settings.move_wait_s:
                    self._refuse(list(islice(queue, MAX_ENDED)), error)
                    self.behind |= bool(queue)
            else:
                self._unserved.pop((role, model), None)
        given_up = 0
        closing = self._state.closing
        since = float("inf") if closing is not None else now - self._settings.move_wait_s
        for request in self._state.waiting.lost_before(since, MAX_LOOKED_AT):
            if not any(True for _ in self._placement.may_continue_at(request)):
                self._refuse([request], closing or self._moves.unserved(request))
                given_up += closing is None
        log_given_up(given_up, self._settings.move_wait_s)
        self._controllers.refuse_waiting(now)

    def _refuse(self, requests: list[Request], error: TokenbusError) -> None:
        for request in requests:
            request.error = error.message
            self._ends.error(request, error)
            self.forget(request)

    def refill(self, worker: Worker) -> None:
        """Starts waiting requests on a worker as long as the worker has room.

        Moved requests go first if any worker has room for them, then requests by descending
        priority. Queues whose next requests have the same priority take turns.
        """
        if self._state.waiting:
            self._continue_moved(worker)
        if not self._state.queues or not self._pools.accepts(worker):
            return
        served = {
            (role, model): queue
            for (role, model), queue in self._state.queues.items()
            if role == worker.role and worker.id in self._pools.serving(role, model).workers
        }
        while served and self._pools.accepts(worker):
            key = max(served, key=lambda key: served[key].priority)
            queue = served.pop(key)
            request = self._state.queues.next_of(key, self._state.now)
            if queue:
                served[key] = queue
            if request.deadline is not None and request.deadline <= self._state.now:
                # The request's time is up, so the client does not need its tokens any more.
                self.cancel(request, self._state.now, "timeout")
                continue
            self._queue_bounds.pace.note(self._state.now)
            self._start(request, worker)

    def report_places(self) -> None:
        """Begins to notify clients whose waiting request has a new place in its queue;
        ``report_more_places`` notifies the rest."""
        self._places = chain.from_iterable(
            [queue.places() for queue in self._state.queues.values()]
        )
        self.report_more_places()

    def report_more_places(self) -> None:
        """Notifies the next clients of their places."""
        for request, place in islice(self._places, MAX_NOTICES):
            self._notify_queued(request, place)

    def _continue_moved(self, worker: Worker | None = None) -> None:
        """Sends the requests that have lost their worker to other workers, as long as any worker
        has room. If ``worker`` is given, stops when this worker has no room."""
        full: set[tuple[str, str, int]] = set()
        """The role, the model and ``began_with`` of requests for which no worker has room."""
        started = 0
        for request in self._state.waiting.first(MAX_LOOKED_AT):
            if worker is not None and not self._placement.has_room(worker):
                return
            if started == MAX_STARTED:
                self.behind = True
                return
            kind = (request.role, request.model, id(request.began_with))
            if kind in full or not self._moves.may_start(request):
                continue
            found = self._placement.next_worker(request)
            if found is None:
                full.add(kind)
            else:
                started += 1
                self._start(request, found)

    def _start(self, request: Request, worker: Worker) -> None:
        state = self._state
        since = request.arrived if request.interruption is None else request.interruption.since
        flags = request.session.flags | waited_flags(state.now - since)
        transcript = self._moves.transcript(request)
        if transcript:
            flags |= Flag.MOVED
        header = encode_header(request.id, request.session.id, flags)
        frames = [request.type, header, *request.frames, *transcript]
        for fence in worker.fences.of(request.session.id, request.stream_id):
            if not worker.fences.is_void(fence.request):
                give_up(state, worker, fence.request, fence.session, fence.stream_id)
        transition(state, request, Event.START, worker)
        if request.steering is not None:
            self._controllers.reserve(request)
        self._placement.expect(request, worker)
        self._moves.sent(request)
        self._out.append(Outgoing(Side.BACK, worker.peer, frames, True))
        if worker.role == "gpu":
            worker.in_flight.add(request.id, sum(map(len, frames)))
            self._bound_in_flight(worker)
        if log.isEnabledFor(logging.DEBUG):
            what = "request %d goes to %s: %s"
            shown = request.type.decode()
            log.debug(what, request.id, worker.name, shown, extra=logs.about(request.id))

    def _bound_in_flight(self, worker: Worker) -> None:
        """Sends a CLAIM if many bytes of requests to the worker are not confirmed
        (``in_flight.py``). If too many are not confirmed, updates the pools, so that the worker
        gets no further requests."""
        if worker.in_flight.must_ask:
            worker.in_flight.asked(send_claim(self._state, worker, []))
        if not worker.in_flight.has_room:
            self._pools.note(worker)

    def on_taken(self, worker: Worker, claim: int) -> None:
        """Handles a worker's answer to the CLAIM with this number. The answer confirms that the
        worker has taken all requests that were sent before this CLAIM."""
        if worker.in_flight.answered(claim):
            self._bound_in_flight(worker)
            self.resume(worker)

    def _send_cancel(self, request: Request, reason: CancelReason) -> None:
        if request.worker is not None:
            body = Cancel(stream_id=request.stream_id, reason=reason)
            self._out.to_worker(request.worker, b"CANCEL", body, request.id)

    def _notify_queued(self, request: Request, place: int) -> None:
        """Notifies a client of the place of its request in the queue, if the place has changed."""
        queue = self._state.queues.get(request.queue)
        if queue is None or not queue.note_place(request, place):
            return
        message = f"waiting for a worker, at place {place}"
        notice = System(
            event="queued",
            message=message,
            stream_id=request.stream_id,
            model=request.model,
            place=place,
        )
        self._out.to_session(request.session, b"SYSTEM", notice)
