"""Dispatch: assigns requests to workers, queues requests, and ends them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from ..protocol import logs
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.header import Flag, encode_header, waited_flags
from ..protocol.messages import Cancel, System
from .controllers import Controllers
from .deadlines import Deadlines
from .ends import Ends
from .fair_queue import FairQueue
from .losses import log_continued, log_given_up
from .moves import Moves, same_model
from .outgoing import Outgoing, Outgoings, Side
from .pools import Pool, Pools
from .prefixes import Prefixes
from .queue_bounds import QueueBounds
from .recovery import Recovery
from .revocations import revoke
from .settings import BrokerSettings
from .spans import record_span
from .tables import (
    RETRY_AFTER_S,
    CancelReason,
    Loss,
    Request,
    SessionTable,
    Worker,
    WorkerState,
)

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0
"""Seconds that a worker has to end a cancelled request."""

MAX_ENDED = 250
"""Maximum requests that one tick ends. The next tick follows soon and ends more of them."""
MAX_STARTED = 100
"""Maximum requests that one event starts at another worker after theirs was lost."""
MAX_LOOKED_AT = 2_000
"""Maximum requests without a worker that one event examines."""
MAX_NOTICES = 400
"""Maximum notices of a place in the queue that one tick sends."""


class Dispatcher:
    """Sends each request to a worker with room, or queues the request."""

    def __init__(
        self,
        settings: BrokerSettings,
        sessions: SessionTable,
        out: Outgoings,
        recovery: Recovery,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._recovery = recovery
        self._out = out
        self.workers: dict[int, Worker] = {}
        self.requests: dict[int, Request] = {}
        self.tokenizers = Counter[str]()
        """By key: the requests for tokenizers that have not ended."""
        self.queues: dict[tuple[str, str], FairQueue] = {}
        self._unserved: dict[tuple[str, str], float] = {}
        """By queue that no worker serves: when the broker first found that, in seconds."""
        self._early: set[tuple[str, str]] = set()
        """Queues of requests that arrived before any worker that serves them."""
        self.pools = Pools(self.is_hung)
        self.prefixes = Prefixes(settings.route_by_prefix)
        self.controllers = Controllers(
            settings, self.workers, self.pools, out, lambda: self.now, recovery
        )
        self.moves = Moves(settings, sessions, self.requests, out)
        self.ends = Ends(settings, sessions, out, lambda: self.now)
        self.deadlines = Deadlines()
        self._queue_bounds = QueueBounds(settings, self.queues)
        self.closing: TokenbusError | None = None
        """The error for new requests once the broker is about to stop."""
        self.behind = False
        """Whether the last tick has left work for the next one."""
        self._places: Iterator[tuple[Request, int]] = iter(())
        """Places in the queue of which clients have not been notified yet."""
        self.now = 0.0
        """The time of the event that is handled, in seconds."""

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return sum(map(len, self.queues.values())) + len(self.moves.waiting)

    # --- the life of a request ------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Starts a request on a worker, or queues it; raises an error if it is refused."""
        key, early = (request.role, request.model), False
        try:
            worker = self._candidates(*key).least_loaded()
        except TokenbusError as error:
            if not self._recovery.awaits_workers(error, self.now):
                raise
            worker, early = None, True
        beyond = self._beyond_capacity(request) if worker is None and not early else None
        if worker is not None:
            worker = self._with_prefix(request, worker)
        elif beyond is None:
            self._queue_bounds.check(request, self.queued, self.now)
        if request.controller:
            request.controller_awaited = self.controllers.check(request.controller)
        self.requests[request.id] = request
        if request.type == b"TOKENIZER":
            self.tokenizers[request.session.key] += 1
        request.session.streams[request.stream_id] = request
        self.deadlines.add(request)
        logs.begin(request.id, request.request_id, request.trace)
        if beyond is not None:
            beyond.take_beyond(request)
            worker = beyond
        if worker is not None:
            self._start(request, worker)
            return
        queue = self.queues.setdefault(key, FairQueue())
        queue.push(request)
        if early:
            self._early.add(key)
        self._notify_queued(request, len(queue))

    def adopt(self, request: Request, worker: Worker, sent: bytes) -> None:
        """Adopts a request that its worker began under an earlier run of the broker.

        ``sent`` has the entries that were sent, as a body of TOKEN.
        """
        self.requests[request.id] = request
        request.session.streams[request.stream_id] = request
        self.deadlines.add(request)
        logs.begin(request.id, request.request_id, request.trace)
        request.worker, request.dispatched = worker, request.arrived
        worker.take(request)
        self.pools.note(worker)
        self.moves.sent(request, sent)

    def withdraw(self, request: Request) -> None:
        """Removes a request that continues elsewhere; its client and the state worker are not
        notified."""
        self.controllers.withdraw(request)
        self.forget(request)
        request.open = False
        if request.session.streams.get(request.stream_id) is request:
            del request.session.streams[request.stream_id]

    def cancel(self, request: Request, now: float, reason: CancelReason) -> None:
        """Ends a request at its client's request; its last TOKEN entry has the reason.

        That entry comes from the request's worker if it has one. The broker sends it if the worker
        sends none in time, for example because its step hangs.
        """
        if request.worker is None:
            self.ends.finish(request, reason)
            self.forget(request)
        elif request.cancelled is None:
            request.cancelled = reason
            request.deadline = now + CANCEL_GRACE_S
            self.deadlines.add(request)
            self._send_cancel(request, reason)

    def abandon(self, request: Request, error: TokenbusError | None = None) -> None:
        """Ends a request for its client at once: with ``error``, or without an answer.

        Its worker is asked to cancel it. Until the worker has reported the end, the request counts
        towards the worker's load.
        """
        if not request.open:
            return
        if error is not None:
            request.error = error.message
            self.ends.error(request, error)
        request.open = False
        if request.session.streams.get(request.stream_id) is request:
            del request.session.streams[request.stream_id]
        if request.worker is None:
            self.forget(request)
        else:
            self.moves.forget(request)
            self._send_cancel(request, "cancelled")

    def forget(self, request: Request) -> None:
        """Removes a request that has ended from every table, and starts the next one."""
        if self.requests.pop(request.id, None) is None:
            return
        if request.session.streams.get(request.stream_id) is request:
            del request.session.streams[request.stream_id]
        self.deadlines.remove(request)
        if request.type == b"TOKENIZER":
            self.tokenizers.subtract({request.session.key: 1})
            self.tokenizers = +self.tokenizers
        self.moves.forget(request)
        if request.trace:
            record_span(request)
        logs.end(request.id)
        request.session.pace.note(self.now)
        if request.controller:
            self.controllers.end(request)
        worker = request.worker
        if worker is None:
            self._dequeue(request)
            return
        worker.requests.pop(request.id, None)
        self.pools.note(worker)
        if self.queues or self.moves.waiting:
            self.refill(worker)

    def tick(self, now: float) -> None:
        """Checks deadlines, waiting requests and journals."""
        self.behind = False
        self.expire(now)
        self.refuse_unserved(now)
        self.moves.tick()
        self.moves.quarantine.tick(now)
        if self.moves.waiting:
            self._continue_moved()

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        due = list(islice(self.deadlines.due(now), MAX_ENDED))
        self.behind |= len(due) == MAX_ENDED
        for number in due:
            request = self.requests.get(number)
            if request is None or not request.open or request.deadline is None:
                continue
            if request.deadline > now:
                self.deadlines.add(request)
            elif request.cancelled is None:
                self.cancel(request, now, "timeout")
            else:
                self.ends.finish(request, request.cancelled)
                self.abandon(request)

    # --- workers --------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Adds a worker that has registered; it receives requests that wait for it."""
        self.workers[worker.id] = worker
        self.pools.add(worker)
        self.rebalance()

    def remove(self, worker: Worker, loss: Loss) -> None:
        """Removes a worker that is lost; its streams move."""
        if self.workers.pop(worker.id, None) is None:
            return
        self.pools.remove(worker)
        if not self.pools.names(worker.role).issuperset(worker.names()):
            self._recovery.lost(self.now)
        self.prefixes.lost(worker)
        self.controllers.on_lost(worker)
        self._take_from(worker, list(worker.requests.values()), loss)
        if not loss.replaced:
            self.rebalance(quiet=True)

    def move(self, request: Request, why: str) -> None:
        """Moves a request that its worker does not have any more. The request continues from its
        journal, at another worker or at the same one."""
        worker = request.worker
        assert worker is not None
        self._take_from(worker, [request], Loss(why, died=False, returns=False))
        self.pools.note(worker)
        self.rebalance()

    def take_back(self, request: Request, worker: Worker) -> None:
        """Returns a waiting request to its former worker, which has registered again and is about
        to be added."""
        request.worker, request.dispatched, request.returning = worker, self.now, True
        self.moves.sent(request, back=True)
        worker.take(request)

    def _take_from(self, worker: Worker, requests: list[Request], loss: Loss) -> None:
        """Removes requests from a worker. Each of them waits for another worker, or ends."""
        running = []
        for request in requests:
            del worker.requests[request.id]
            if request.open and request.cancelled is None:
                running.append(request)
                continue
            if request.open and request.cancelled is not None:
                self.ends.finish(request, request.cancelled)
            self.forget(request)
        ended = self.moves.take(worker, running, loss, self.now)
        for request in running:
            self.controllers.on_moving(request)
        for request, error in ended:
            self._refuse([request], error)

    def rebalance(self, *, quiet: bool = False) -> None:
        """Starts waiting requests after the workers, or the models that they serve, have changed.

        ``quiet``: streams that continue after they have waited for a worker are not logged.

        Requests that no worker serves any more wait for a worker to register. Requests that name no
        model are refused if it is not clear any more which model they mean.
        """
        unclear = self.queues.get(("gpu", ""))
        if unclear is not None and not self.default_model() and self.pools.has_default:
            try:
                self._candidates("gpu", "")
            except TokenbusError as error:
                self._refuse(list(unclear), error)
        if self.moves.waiting:
            waiting = len(self.moves.waiting)
            self._continue_moved()
            log_continued(0 if quiet else waiting - len(self.moves.waiting))
        for role, model in list(self.queues):
            pool = self.pools.serving(role, model)
            if pool.workers:
                self._early.discard((role, model))
            while (role, model) in self.queues:
                worker = pool.least_loaded()
                if worker is None:
                    break
                self.refill(worker)
        self.controllers.start_waiting()

    def refused(self, request: Request, worker: Worker, frames: list[bytes]) -> None:
        """Handles a refusal by a worker that is full because other brokers use it too.

        Another worker receives the request, or the request waits. ``frames`` are the frames that
        the worker received.
        """
        if request.worker is not worker:
            return
        del worker.requests[request.id]
        self.pools.note(worker)
        if not request.open or request.cancelled is not None:
            if request.open and request.cancelled is not None:
                self.ends.finish(request, request.cancelled)
            request.worker = None
            self.forget(request)
            return
        self.controllers.on_moving(request)
        if request.moves:
            loss = Loss("it has no room for the request", died=False)
            for moved, error in self.moves.take(worker, [request], loss, self.now):
                self._refuse([moved], error)
            self._continue_moved()
            return
        self.moves.returned(request, frames)
        other = self.pools.serving(request.role, request.model).least_loaded()
        if other is not None:
            self._start(request, other)
            return
        queue = self.queues.setdefault((request.role, request.model), FairQueue())
        queue.push(request)
        self._notify_queued(request, len(queue))

    def resume(self, worker: Worker) -> None:
        """Handles the end of a hang: the step of the worker continues."""
        self.pools.note(worker)
        self.refill(worker)

    def refuse_unserved(self, now: float) -> None:
        """Refuses requests that have waited for ``move_wait_s`` without a worker that serves them,
        and requests for unknown models when no further worker is expected."""
        for key in [key for key in self._unserved if key not in self.queues]:
            del self._unserved[key]
        self._early &= self.queues.keys()
        for (role, model), queue in list(self.queues.items()):
            try:
                self._candidates(role, model)
            except TokenbusError as error:
                since = self._unserved.setdefault((role, model), now)
                awaited = self._recovery.awaits_workers(error, now)
                in_vain = (role, model) in self._early and not awaited
                if in_vain or now - since >= self._settings.move_wait_s:
                    self._refuse(list(islice(queue, MAX_ENDED)), error)
                    self.behind |= bool(queue)
            else:
                self._unserved.pop((role, model), None)
        given_up = 0
        for request in self.moves.overdue(now, MAX_LOOKED_AT, self.closing is not None):
            if not any(True for _ in self._may_continue_at(request)):
                self._refuse([request], self.closing or self.moves.unserved(request))
                given_up += self.closing is None
        log_given_up(given_up, self._settings.move_wait_s)
        self.controllers.refuse_waiting(now)

    def _refuse(self, requests: list[Request], error: TokenbusError) -> None:
        for request in requests:
            request.error = error.message
            self.ends.error(request, error)
            self.forget(request)

    def refill(self, worker: Worker) -> None:
        """Starts waiting requests on a worker while it has room.

        Requests that have moved are first if any worker has room for them; then the highest
        priority. Queues of models with the same priority take turns.
        """
        if self.moves.waiting:
            self._continue_moved(worker)
        if not self.queues or not self.pools.accepts(worker):
            return
        served = {
            (role, model): queue
            for (role, model), queue in self.queues.items()
            if role == worker.role and worker.id in self.pools.serving(role, model).workers
        }
        while served and self.pools.accepts(worker):
            key = max(served, key=lambda key: served[key].priority)
            queue = served.pop(key)
            del self.queues[key]
            request = queue.pop(self.now)
            if queue:
                served[key] = self.queues[key] = queue
            if request.deadline is not None and request.deadline <= self.now:
                # The client does not need its tokens any more.
                self.cancel(request, self.now, "timeout")
                continue
            self._queue_bounds.pace.note(self.now)
            self._start(request, worker)

    def report_places(self) -> None:
        """Begins to notify clients whose waiting request has a new place in its queue;
        ``report_more_places`` notifies the rest."""
        self._places = chain.from_iterable([queue.places() for queue in self.queues.values()])
        self.report_more_places()

    def report_more_places(self) -> None:
        """Notifies the next clients of their places."""
        for request, place in islice(self._places, MAX_NOTICES):
            waits = request.worker is None and self.requests.get(request.id) is request
            if waits and place != request.place:
                self._notify_queued(request, place)

    def default_model(self) -> str:
        """The model of a request that names none; empty if the workers' defaults differ."""
        return self.pools.default_model

    # --- inside ---------------------------------------------------------------------------------

    def _candidates(self, role: str, model: str) -> Pool:
        """The workers that serve a model, including busy and draining ones; raises an error if
        there are none."""
        pool = self.pools.serving(role, model)
        if pool.workers:
            return pool
        if not self.pools.of_role(role) or role != "gpu":
            raise UnavailableError(
                Code.NO_WORKER,
                f"no {role} worker is running; if one is starting, try again in a moment, "
                "otherwise start one",
                retry_after_s=RETRY_AFTER_S,
            )
        names = ", ".join(sorted(self.pools.names(role))) or "none"
        if not model:
            raise RequestError(
                Code.UNKNOWN_MODEL,
                f"several models are served; name one of: {names}",
                path="$.model",
            )
        raise RequestError(
            Code.UNKNOWN_MODEL,
            f"no worker serves the model {model!r}; served are: {names}",
            path="$.model",
        )

    def _may_continue_at(self, request: Request) -> Iterator[Worker]:
        """The workers to which a request may move, including busy and draining ones."""
        serving = self.pools.serving(request.role, request.model)
        return (w for w in serving.workers.values() if self.moves.fits(request, w))

    def can_continue_elsewhere(self, request: Request, worker: Worker) -> bool:
        """Whether another registered worker can take a request over."""
        name = request.model or worker.default
        loaded = worker.models.get(name)
        for other in self._may_continue_at(request):
            there = other.models.get(name)
            if other is worker or other.state is not WorkerState.READY or self.is_hung(other):
                continue
            if loaded is None or (there is not None and same_model(loaded, there)):
                return True
        return False

    def _continue_moved(self, worker: Worker | None = None) -> None:
        """Sends requests that have lost their worker to other workers as far as these have room, or
        only to ``worker``."""
        full: set[tuple[str, str, int]] = set()
        """The kinds of requests for which no worker has room."""
        started = 0
        for request in self.moves.first(MAX_LOOKED_AT):
            if worker is not None and not self._has_room(worker):
                return
            if started == MAX_STARTED:
                self.behind = True
                return
            kind = (request.role, request.model, id(request.began_with))
            if kind in full or not self.moves.quarantine.may_start(request):
                continue
            found = self._next_worker(request)
            if found is None:
                full.add(kind)
            else:
                started += 1
                self._start(request, found)

    def _next_worker(self, request: Request) -> Worker | None:
        """The worker at which a request without a worker continues; None if no worker has room."""
        pool = self.pools.serving(request.role, request.model)
        for worker in pool.free():
            if self.moves.fits(request, worker):
                found = self._with_prefix(request, worker)
                return found if self.moves.fits(request, found) else worker
        if any(w.state is WorkerState.READY for w in self._may_continue_at(request)):
            return None
        # All remaining workers drain, for example because the whole system stops: one of them takes
        # the request.
        serving = self._may_continue_at(request)
        free = (w for w in serving if self._has_room(w) and not w.handed_over)
        return min(free, key=pool.rank, default=None)

    def _beyond_capacity(self, request: Request) -> Worker | None:
        """The worker for a request if all workers are full, but the key of the request has no
        request at a worker; None if the request must wait.

        Long streams of other keys may have taken all places, and the key would wait until one of
        them ends. For such requests, each worker accepts an eighth of its capacity in addition.
        The workers are searched first, because a key may have thousands of sessions.
        """
        queue = self.queues.get((request.role, request.model))
        if self.moves.waiting or (queue is not None and queue.priority > request.priority):
            return None
        pool = self._candidates(request.role, request.model)
        ready = (w for w in pool.workers.values() if w.state is WorkerState.READY)
        free = (w for w in ready if w.has_room_beyond and not self.is_hung(w))
        worker = min(free, key=pool.rank, default=None)
        if worker is None:
            return None
        key = request.session.key
        sessions = self._sessions.of_key(key) if key else [request.session]
        # No request has lost its worker, so each stream outside a queue is at a worker.
        at_worker = any(len(session.streams) > session.queued for session in sessions)
        return None if at_worker else worker

    def _with_prefix(self, request: Request, worker: Worker) -> Worker:
        """The worker for a request for which ``worker`` is the least loaded: possibly another one
        that has the beginning of its prompt."""
        pool = self.pools.serving(request.role, request.model)
        return self.prefixes.choose(request, pool, self._model_of(request), worker)

    def _model_of(self, request: Request) -> str:
        return request.model or self.pools.default_model

    def _has_room(self, worker: Worker) -> bool:
        return worker.has_room and not self.is_hung(worker)

    def is_hung(self, worker: Worker) -> bool:
        """Whether a worker's current step has run for so long that it counts as hung."""
        return worker.step_age_s is not None and worker.step_age_s > self._settings.hung_step_s

    def _start(self, request: Request, worker: Worker) -> None:
        if request.controller:
            self.controllers.reserve(request)
        since = request.arrived if request.interruption is None else request.interruption.since
        flags = request.session.flags | waited_flags(self.now - since)
        transcript = self.moves.transcript(request, self.now)
        if transcript:
            flags |= Flag.MOVED
        header = encode_header(request.id, request.session.id, flags)
        frames = [request.type, header, *request.frames, *transcript]
        self.prefixes.expect(request, worker, self._model_of(request))
        self.moves.sent(request)
        if worker.may_send(request):
            revoke(self._out, worker, self._settings, request, self.now)
        self.moves.quarantine.on_start(request, self.now)
        request.worker = worker
        request.dispatched = self.now
        worker.take(request)
        self.pools.note(worker)
        self._out.append(Outgoing(Side.BACK, worker.peer, frames, True))
        if log.isEnabledFor(logging.DEBUG):
            what = "request %d goes to %s: %s"
            shown = request.type.decode()
            log.debug(what, request.id, worker.name, shown, extra=logs.about(request.id))

    def _dequeue(self, request: Request) -> None:
        key = (request.role, request.model)
        queue = self.queues.get(key)
        if queue is not None and queue.remove(request) and not queue:
            del self.queues[key]

    def _send_cancel(self, request: Request, reason: CancelReason) -> None:
        if request.worker is not None:
            body = Cancel(stream_id=request.stream_id, reason=reason)
            self._out.to_worker(request.worker, b"CANCEL", body, request.id)

    def _notify_queued(self, request: Request, place: int) -> None:
        request.place = place
        message = f"waiting for a worker, at place {place}"
        notice = System(
            event="queued",
            message=message,
            stream_id=request.stream_id,
            model=request.model,
            place=place,
        )
        self._out.to_session(request.session, b"SYSTEM", notice)
