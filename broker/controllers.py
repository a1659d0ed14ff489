"""Assigns the controllers of requests to controller workers, from the reservation of a place at a
worker to the end of the request."""

from __future__ import annotations

import contextlib
import re
from collections import Counter

from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.header import decode_header, encode_header
from ..protocol.messages import System
from ..protocol.pace import Pace
from ..protocol.worker_messages import ANY_MODULE, End, Lost
from .outgoing import Outgoing, Side
from .pools import Pool
from .recovery import MISSING
from .request import Request
from .session import Session
from .state import BrokerState
from .tools import Tools
from .waiting_starts import HELD, WaitingStarts
from .worker import RETRY_AFTER_S, Worker, WorkerState

_MODULE_ID = re.compile("[0-9a-f]{64}")


class Controllers:
    """Chooses a controller worker when a request is sent to its GPU worker, and records the choice
    until the request ends. A *pattern* is a controller's name or ``ANY_MODULE``, as a worker
    registers it.

    From its reservation to its end, a request is in ``steers`` of its controller worker
    (``request.steering.worker``), and counts towards the load of this worker. A queued request has
    no reservation.
    """

    def __init__(self, state: BrokerState, tools: Tools) -> None:
        self._state = state
        self._tools = tools
        self._settings = state.settings
        self._pools = state.pools
        self._out = state.out
        self._pace = Pace()
        """Rate at which requests with a controller end."""
        self._waiting = WaitingStarts()
        self._placed: Counter[tuple[str, str | None]] = Counter()
        """Number of requests with a place at a controller worker, by client and user. The user None
        stands for all users of the client."""

    def check(self, request: Request) -> bool:
        """Whether a new request with a controller has to wait for a worker that may still register.
        Raises an error if the request is refused."""
        name = request.controller
        try:
            self._place_for(request)
        except TokenbusError as error:
            full = error.code == Code.QUEUE_FULL
            if not (self._may_register(name, error) or (full and self._is_replaced(name))):
                raise
            return True
        return False

    def _is_replaced(self, name: str) -> bool:
        """Whether a worker that serves the controller ``name`` drains, and another process is about
        to replace this worker."""
        return any(worker.succeeded for worker in self._serving(name).workers.values())

    def _may_register(self, name: str, error: TokenbusError) -> bool:
        """Whether ``choose`` may have raised this error only because a worker for the controller
        ``name`` has not registered yet."""
        return self._state.recovery.awaits_workers(error, "controller", name, self._state.now)

    def choose(self, name: str, served_as: str = "") -> Worker:
        """The least filled worker that can run the controller ``name``; raises an error if the
        request is refused.

        Workers that registered the name take precedence over workers that run any module.
        ``served_as``: the pattern under which another worker has already started the controller, if
        any. Then only workers with this pattern are considered, because other workers may have a
        different controller of the same name.
        """
        pools = self._pools
        if not pools.of_role("controller"):
            raise UnavailableError(
                Code.NO_WORKER,
                "no controller worker is running; if one is starting, try again in a moment, "
                "otherwise start one",
                retry_after_s=RETRY_AFTER_S,
            )
        serving = self._served_as(name, served_as) if served_as else self._serving(name)
        worker = serving.least_loaded()
        if worker is None:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"every controller worker that serves {name!r} is full or draining; "
                "try again later",
                retry_after_s=self._pace.retry_after_s(self._state.now),
            )
        return worker

    def _served_as(self, name: str, pattern: str) -> Pool:
        """The workers at which a controller that has begun can continue; raises UnavailableError if
        no such worker is registered."""
        serving = self._pools.steering(pattern)
        if not serving.workers:
            raise UnavailableError(
                Code.NO_WORKER,
                f"the worker that served the controller {name!r} is lost, and no other worker "
                "serves it; start one, or try again in a moment",
                retry_after_s=RETRY_AFTER_S,
            )
        return serving

    def _serving(self, name: str) -> Pool:
        """The workers that serve a controller. Raises UnavailableError if the last such worker was
        lost recently, otherwise RequestError if the controller is unknown."""
        pools = self._pools
        for pattern in (name, ANY_MODULE):
            serving = pools.steering(pattern)
            if serving.workers:
                return serving
            if self._has_left(pattern):
                what = "uploaded modules" if pattern == ANY_MODULE else f"the controller {name!r}"
                raise UnavailableError(
                    Code.NO_WORKER,
                    f"the last worker that served {what} was lost; start one, or try again in a "
                    "moment",
                    retry_after_s=RETRY_AFTER_S,
                )
        names = ", ".join(sorted(pools.names("controller")))
        raise RequestError(
            Code.UNKNOWN_CONTROLLER,
            f"no worker serves the controller {name!r}; the served controllers: {names}",
            path="$.controller",
        )

    def _has_left(self, pattern: str) -> bool:
        """Whether the last worker that served a pattern was lost recently and may return. If so,
        the controllers of this pattern do not count as unknown, and workers with other patterns do
        not run them."""
        return self._state.recovery.was_lost("controller", pattern, self._state.now)

    def reserve(self, request: Request) -> None:
        """Reserves a place for a request's controller if a controller worker has a free place.

        If no worker has a place, ``start`` chooses a worker later, or refuses the request.
        """
        if request.steered.worker is None and not self._may_come_back(request):
            with contextlib.suppress(TokenbusError):
                self._assign(request, self._place_for(request))

    def _place_for(self, request: Request) -> Worker:
        """The worker at which a request may reserve a place; raises an error as ``choose`` does."""
        try:
            return self.choose(request.controller, request.steered.served_as)
        except UnavailableError as error:
            worker = self._beyond_capacity(request) if error.code == Code.QUEUE_FULL else None
            if worker is None:
                raise
            return worker

    def _beyond_capacity(self, request: Request) -> Worker | None:
        """Chooses a worker for a request although all workers are full. Returns None if a
        controller of the same client or, if the request names a user, of the same user has a place
        at a worker.

        Without this exception, the programs of one client could take all places for hours. The
        bounds are those of ``Placement.beyond_capacity``.
        """
        by = request.fields.by
        if self._placed[_owner(request), by or None]:
            return None
        part = 16 if by else 8
        serving = self._pools.steering(self._pattern_of(request)).workers.values()
        ready = (worker for worker in serving if worker.state is WorkerState.READY)
        free = (worker for worker in ready if worker.has_place_beyond(part))
        return min(free, key=lambda worker: worker.fill, default=None)

    def _count(self, request: Request, change: int) -> None:
        """Counts the place of a request, or stops counting it (``change`` -1)."""
        owner = request.steered.owner
        for place in {(owner, None), (owner, request.fields.by or None)}:
            self._placed[place] += change
            if not self._placed[place]:
                del self._placed[place]

    def _assign(self, request: Request, worker: Worker) -> None:
        request.steered.worker, request.steered.owner = worker, _owner(request)
        self._count(request, 1)
        request.steered.awaited, request.steered.unknown = False, ""
        worker.steers[request.id] = request
        self._pools.note(worker)

    def start(self, request: Request, body: bytes, now: float) -> None:
        """Sends the START of a request's controller to a controller worker.

        The START goes to the worker with the reserved place, unless this worker was lost or drains.
        If no worker has a place now, the START waits. If the controller is unknown, the GPU worker
        is notified.
        """
        if self._is_held(request):
            self._waiting.add(request, body, now, HELD)
            return
        if request.steered.worker is None:
            try:
                self._assign(request, self.choose(request.controller, request.steered.served_as))
            except TokenbusError as error:
                if isinstance(error, UnavailableError) or self._may_register(
                    request.controller, error
                ):
                    self._waiting.add(request, body, now, self._pattern_of(request))
                else:
                    self._refuse(request, error)
                return
        worker = request.steered.worker
        assert worker is not None
        assert request.worker is not None
        request.steered.started = True
        name = request.controller
        request.steered.served_as = name if name in worker.patterns else ANY_MODULE
        sent_by = encode_header(request.id, request.worker.id)
        session = b"%x" % request.session.id
        given = (b"START", sent_by, body, request.session.tenant, session)
        self._out.append(Outgoing(Side.BACK, worker.peer, given, True))

    def on_start(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles the START that a GPU worker sends when it begins a request with a controller. If
        the START waits, the client is notified."""
        request = self._state.requests.get(decode_header(frames[1]).request)
        if request is None or request.worker is not worker or not request.open:
            return
        if request.steering is not None and not request.steering.started:
            self.start(request, frames[2], self._state.now)
            if request.id in self._waiting:
                self._notify_waiting(request)

    def _notify_waiting(self, request: Request) -> None:
        notice = System(
            event="queued",
            message="waiting for a controller worker",
            stream_id=request.stream_id,
            model=request.model,
        )
        self._out.to_session(request.session, b"SYSTEM", notice)

    def refused(self, request: Request, worker: Worker, body: bytes, unknown: str = "") -> None:
        """Handles a controller worker's refusal of a START.

        If ``unknown`` is empty, the worker has no room, because other brokers use it too. Another
        worker receives the START, or the START waits.

        If the worker does not know the controller, ``unknown`` is the error that it has sent. After
        a restart of the broker, a worker for modules may receive the START although another worker,
        which has not registered yet, serves the controller. As long as such a worker may still
        register, the START waits. After that time, the request ends with the error.
        """
        if unknown:
            # A worker that does not know the controller has begun the request, and must delete it.
            # A worker without room has not begun it.
            self._out.to_worker(worker, b"END", End(requests=[request.id]))
        if request.steered_by is not worker or not request.steered.started:
            return
        self._release(request)
        steered = request.steered
        steered.started = False
        if not request.open or request.worker is None:
            return
        if not unknown:
            self.start(request, body, self._state.now)
        elif self._may_register(request.controller, _unknown(unknown)):
            steered.awaited, steered.unknown, steered.served_as = True, unknown, request.controller
            self._waiting.add(request, body, self._state.now, request.controller)
        else:
            self._refuse(request, _unknown(unknown))

    def _is_held(self, request: Request) -> bool:
        """Whether the START of a request waits for something other than a place.

        If the client of an adopted request has not connected yet, the START waits for the client,
        whose key determines which modules the request may use. A START also waits if the request's
        former controller worker may still register (``_may_come_back``).
        """
        return not request.session.token or self._may_come_back(request)

    def _pattern_of(self, request: Request) -> str:
        """The pattern that a controller worker must serve to run the controller of a request. The
        rules are those of ``choose``."""
        name = request.controller
        if request.steered.served_as:
            return request.steered.served_as
        served = self._pools.steering(name).workers or self._has_left(name)
        return name if served else ANY_MODULE

    def _may_come_back(self, request: Request) -> bool:
        """Whether a worker that served the request's controller in an earlier run of the broker may
        still register.

        Such a worker registers within two heartbeats. The result is False if a registered worker
        serves the name, or if the name is a module id, which every worker for modules can run.
        """
        name, at = request.controller, request.steered.adopted_at
        adopted_now = at is not None and self._state.now - at <= 2 * self._settings.heartbeat_s
        if request.steered.served_as or not (
            adopted_now or self._state.recovery.settles(self._state.now)
        ):
            return False
        workers = self._pools.of_role("controller").values()
        return not (_MODULE_ID.fullmatch(name) or any(name in w.patterns for w in workers))

    def start_waiting(self) -> None:
        """Starts every waiting controller for which a worker has a place now. Call this method when
        workers have changed, or when time has passed. It examines every START that waits."""
        for waiting in self._waiting:
            request = waiting.request
            if self._is_held(request):
                continue
            pattern = self._pattern_of(request)
            pool = self._pools.steering(pattern)
            if pool.workers and pool.least_loaded() is None:
                self._waiting.move(waiting, pattern)
                continue
            self._waiting.remove(request.id)
            self.start(request, waiting.body, waiting.since)

    def start_of(self, session: Session) -> None:
        """Starts the waiting controllers of a session whose client has connected."""
        for request in list(session.streams.values()) if self._waiting else ():
            waiting = self._waiting.remove(request.id)
            if waiting is not None:
                self.start(request, waiting.body, waiting.since)

    def fill(self, worker: Worker) -> None:
        """Starts waiting controllers on a worker as long as the worker has room. Examines only the
        STARTs that it takes from the queues, and not all waiting STARTs."""
        while worker.role == "controller" and self._pools.has_place(worker):
            waiting = self._waiting.first(worker.patterns)
            if waiting is None:
                return
            request = waiting.request
            self._waiting.remove(request.id)
            self.start(request, waiting.body, waiting.since)
            if request.id in self._waiting:
                return

    def refuse_waiting(self, now: float) -> None:
        """Refuses STARTs that have waited for ``move_wait_s``, and STARTs for unknown controllers
        when no further worker is expected."""
        self.start_waiting()
        for waiting in self._waiting:
            request = waiting.request
            overdue = now - waiting.since >= self._settings.move_wait_s
            if not overdue and not request.steered.awaited:
                continue
            try:
                self.choose(request.controller, request.steered.served_as)
            except TokenbusError as error:
                may_register = self._may_register(request.controller, error)
                in_vain = error.code in MISSING and not may_register
                if overdue or in_vain:
                    self._waiting.remove(request.id)
                    unknown = request.steered.unknown
                    self._refuse(request, _unknown(unknown) if unknown else error)

    def _refuse(self, request: Request, error: TokenbusError) -> None:
        """Notifies the GPU worker of a request that the request's controller cannot start."""
        if request.worker is not None:
            self._out.to_worker(request.worker, b"LOST", _lost([request.id], error))

    def can_start_elsewhere(self, request: Request, worker: Worker) -> bool:
        """Whether another controller worker can start the controller of a request again."""
        return any(
            other is not worker
            and not other.leaves_with(worker)
            and other.state is WorkerState.READY
            and other.has_place
            for other in self._pools.steering(request.steered.served_as).workers.values()
        )

    def end(self, request: Request) -> None:
        """Handles the end of a request: its place at the controller worker becomes free, and
        workers delete its controller and its variables."""
        worker = request.steered.worker
        self._tools.end(request)
        self._release(request)
        self._pace.note(self._state.now)
        self._waiting.remove(request.id)
        if worker is not None:
            self.fill(worker)
        if not request.steered.served_as and not request.steered.has_inputs:
            return
        body = End(requests=[request.id])
        if worker is not None:
            self._out.to_worker(worker, b"END", body)
        state = self.state_worker()
        if state is not None:
            body = End(requests=[request.id], detached=request.session.peer is None)
            self._out.to_worker(state, b"END", body)

    def withdraw(self, request: Request) -> None:
        """Handles a request that continues at another broker or in another copy: its controller
        worker deletes the controller, and the state worker keeps the variables."""
        if request.steering is None:
            return
        self._tools.end(request)
        if request.steered.worker is not None and request.steered.started:
            self._out.to_worker(request.steered.worker, b"END", End(requests=[request.id]))
        has_state = request.steered.served_as or request.steered.has_inputs
        state = self.state_worker() if has_state else None
        if state is not None:
            self._out.to_worker(state, b"END", End(requests=[request.id], elsewhere=True))
        request.steered.served_as, request.steered.has_inputs = "", False

    def on_drain(self, worker: Worker) -> None:
        """Handles the drain of a controller worker: other workers start the controllers that this
        worker has not begun."""
        for request in list(worker.steers.values()):
            if not request.steered.started:
                self._release(request)

    def on_moving(self, request: Request) -> None:
        """Handles the loss of a request's GPU worker. The next GPU worker starts the controller
        again.

        The controller worker stays the same unless it drains. END is not sent, because END deletes
        the recorded answers to operations on variables, which the replay needs.
        """
        if request.steering is None:
            return
        self._waiting.remove(request.id)
        request.steered.started = False
        if (
            request.steered.worker is not None
            and request.steered.worker.state is WorkerState.DRAINING
        ):
            self._release(request)

    def on_lost(self, worker: Worker) -> None:
        """Handles the loss of a worker. Remove the worker from all pools before the call.

        If a controller worker is lost, GPU workers send the STARTs of its running controllers
        again, for another controller worker. Controllers that this worker had not begun also start
        at another controller worker.
        """
        self._tools.on_lost(worker)
        by_gpu: dict[int, list[int]] = {}
        for request in list(worker.steers.values()):
            self._release(request)
            if request.steered.started and request.worker is not None:
                by_gpu.setdefault(request.worker.id, []).append(request.id)
            request.steered.started = False
        error = UnavailableError(
            Code.WORKER_LOST,
            f"the worker {worker.name} that ran this stream's controller was lost; send the "
            "request again",
            retry_after_s=RETRY_AFTER_S,
        )
        for gpu, requests in by_gpu.items():
            if gpu in self._state.workers:
                self._out.to_worker(
                    self._state.workers[gpu], b"LOST", _lost(requests, error, worker.name)
                )

    def of_modules(self) -> list[Worker]:
        """The workers that run uploaded modules."""
        return list(self._pools.steering(ANY_MODULE).workers.values())

    def state_worker(self) -> Worker | None:
        """The state worker, which stores the variables; None if no state worker is registered."""
        workers = self._pools.of_role("state").values()
        return min(workers, key=lambda w: w.id, default=None)

    def _release(self, request: Request) -> None:
        worker = request.steered.worker
        if worker is not None:
            worker.steers.pop(request.id, None)
            request.steered.worker = None
            self._count(request, -1)
            self._pools.note(worker)


def _owner(request: Request) -> str:
    """The client of a request: its key or, without a key, its session."""
    return request.session.key or str(request.session.id)


def _unknown(message: str) -> RequestError:
    return RequestError(Code.UNKNOWN_CONTROLLER, message, path="$.controller")


def _lost(requests: list[int], error: TokenbusError, worker: str = "") -> Lost:
    return Lost(
        requests=requests,
        code=error.code,
        message=error.message,
        path=error.path,
        retry_after_s=error.retry_after_s,
        worker=worker,
    )
