"""Which worker takes a request, what waits for one, and how a request ends."""

from __future__ import annotations

import heapq
from typing import Literal

from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.header import Flag, encode_header
from ..protocol.messages import Cancel, System
from ..protocol.worker_messages import ANY_MODULE, End, Lost
from .fair_queue import FairQueue
from .outgoing import Outgoing, Outgoings, Side
from .settings import BrokerSettings
from .tables import Request, Worker, WorkerState

EMBEDDED = "embedded"
"""The model that a request without a name means where several are served."""

RETRY_AFTER_S = 1.0


class Dispatcher:
    """Requests and workers: admission, the queue of each model, least load, and ends."""

    def __init__(self, settings: BrokerSettings, out: Outgoings) -> None:
        self._settings = settings
        self._out = out
        self.workers: dict[int, Worker] = {}
        self.requests: dict[int, Request] = {}
        self.queues: dict[tuple[str, str], FairQueue] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return sum(map(len, self.queues.values()))

    # --- the life of a request ------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Takes a request in: to a worker, into its queue, or raises what is wrong."""
        candidates = self._candidates(request.role, request.model)
        free = [w for w in candidates if self._accepts(w)]
        if not free and self.queued >= self._settings.max_queued:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"{self.queued} requests wait already, which is the most; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.requests[request.id] = request
        request.session.streams[request.stream_id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        if free:
            self._start(request, self._least_loaded(free, request.model))
            return
        queue = self.queues.setdefault((request.role, request.model), FairQueue())
        queue.push(request)
        self._say_queued(request, len(queue))

    def cancel(
        self, request: Request, reason: Literal["cancelled", "timeout"] = "cancelled"
    ) -> None:
        """Ends a request for a reason of its client's, who is told by its last TOKEN entry."""
        if request.worker is None:
            self._out.finish(request, reason)
            self.forget(request)
        else:
            self._tell_cancel(request, reason)

    def abandon(self, request: Request, error: TokenbusError | None = None) -> None:
        """Ends a request that nobody is to hear of any more, but for ``error``.

        A worker that has it is told; it keeps its place in the worker's load until the worker says
        that it is over.
        """
        if not request.open:
            return
        if error is not None:
            self._out.error(request, error)
        request.open = False
        if request.session.streams.get(request.stream_id) is request:
            del request.session.streams[request.stream_id]
        if request.worker is None:
            self.forget(request)
        else:
            self._tell_cancel(request, "cancelled")

    def forget(self, request: Request) -> None:
        """Drops a request that is over from every table and lets the next one start."""
        if self.requests.pop(request.id, None) is None:
            return
        if request.session.streams.get(request.stream_id) is request:
            del request.session.streams[request.stream_id]
        if request.controller:
            self._end_controller(request)
        worker = request.worker
        if worker is None:
            self._dequeue(request)
            return
        worker.requests.pop(request.id, None)
        if self.queues:
            self.refill(worker)

    def expire(self, now: float) -> None:
        """Ends the requests whose time has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            request = self.requests.get(number)
            if request is not None and request.open:
                self.cancel(request, "timeout")

    # --- workers --------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """A worker has registered: it takes what waits for it."""
        self.workers[worker.id] = worker
        self.refill(worker)

    def remove(self, worker: Worker, error: TokenbusError) -> None:
        """A worker is gone: its clients are told, and what only it could serve is refused."""
        if self.workers.pop(worker.id, None) is None:
            return
        self._tell_lost(worker)
        for request in list(worker.requests.values()):
            worker.requests.pop(request.id, None)
            if request.open:
                self._out.error(request, error)
            self.forget(request)
        self.recheck()

    def recheck(self) -> None:
        """Refuses queued requests that no worker serves any more."""
        for (role, model), queue in list(self.queues.items()):
            try:
                self._candidates(role, model)
            except TokenbusError as error:
                for request in list(queue):
                    self._out.error(request, error)
                    self.forget(request)

    def refill(self, worker: Worker) -> None:
        """Starts waiting requests on a worker while it has room."""
        for role, model in list(self.queues):
            if role != worker.role or worker not in self._serving(role, model):
                continue
            while self._accepts(worker):
                queue = self.queues.get((role, model))
                request = queue.pop() if queue is not None else None
                if request is None:
                    break
                if not queue:
                    self.queues.pop((role, model), None)
                self._start(request, worker)

    def say_places(self) -> None:
        """Tells every client whose request waits at which place it is now."""
        for queue in self.queues.values():
            for request, place in queue.places():
                if place != request.place:
                    self._say_queued(request, place)

    def default_model(self) -> str:
        """The model of a request that names none; empty where that is not clear."""
        names = {w.default for w in self.workers.values() if w.default}
        return names.pop() if len(names) == 1 else EMBEDDED if EMBEDDED in names else ""

    # --- controllers ----------------------------------------------------------------------------

    def controller_worker(self, name: str) -> Worker:
        """The least filled worker that runs the controller ``name``, or raises why there is none.

        One that serves it by its name goes before those that take any module.
        """
        workers = [w for w in self.workers.values() if w.role == "controller"]
        if not workers:
            raise UnavailableError(
                Code.NO_WORKER,
                "no controller worker is running; start one, or try again in a moment",
                retry_after_s=RETRY_AFTER_S,
            )
        serving = [w for w in workers if name in w.patterns] or self.module_workers()
        if not serving:
            names = ", ".join(sorted({p for w in workers for p in w.patterns}))
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"no worker serves the controller {name!r}; served are: {names}",
                path="$.controller",
            )
        free = [w for w in serving if w.state is WorkerState.READY and w.fill < 1]
        if not free:
            raise UnavailableError(
                Code.QUEUE_FULL,
                "every controller worker is full or draining; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        return min(free, key=lambda w: (w.fill, w.id))

    def module_workers(self) -> list[Worker]:
        """The controller workers that run uploaded modules."""
        every = self.workers.values()
        return [w for w in every if w.role == "controller" and ANY_MODULE in w.patterns]

    def start_controller(self, request: Request) -> Worker:
        """Chooses the worker of a request's controller."""
        worker = self.controller_worker(request.controller)
        request.steered_by = worker
        worker.steers[request.id] = request
        return worker

    def state_worker(self) -> Worker | None:
        """The worker that keeps the variables."""
        workers = [w for w in self.workers.values() if w.role == "state"]
        return min(workers, key=lambda w: w.id, default=None)

    def refuse_controller(self, request: Request, error: TokenbusError) -> None:
        """Tells a request's GPU worker that it has no controller."""
        if request.worker is not None:
            self._out.to_worker(request.worker, b"LOST", _lost([request.id], error))

    def _end_controller(self, request: Request) -> None:
        body = End(requests=[request.id])
        steering, state = request.steered_by, self.state_worker()
        if steering is not None and steering.steers.pop(request.id, None) is not None:
            self._out.to_worker(steering, b"END", body)
        if state is not None:
            self._out.to_worker(state, b"END", body)

    def _tell_lost(self, worker: Worker) -> None:
        """A controller worker is gone: the GPU workers end what it steered."""
        by_gpu: dict[int, list[int]] = {}
        for request in worker.steers.values():
            request.steered_by = None
            if request.worker is not None:
                by_gpu.setdefault(request.worker.id, []).append(request.id)
        worker.steers.clear()
        error = UnavailableError(
            Code.WORKER_LOST,
            f"the worker {worker.name} that ran this stream's controller is gone; send it again",
            retry_after_s=RETRY_AFTER_S,
        )
        for gpu, requests in by_gpu.items():
            if gpu in self.workers:
                self._out.to_worker(self.workers[gpu], b"LOST", _lost(requests, error))

    # --- inside ---------------------------------------------------------------------------------

    def _serving(self, role: str, model: str) -> list[Worker]:
        if role == "controller":
            return self.module_workers()
        workers = [w for w in self.workers.values() if w.role == role]
        if not model:
            default = self.default_model()
            return [w for w in workers if default and w.default == default]
        return [w for w in workers if w.serves(model)]

    def _candidates(self, role: str, model: str) -> list[Worker]:
        """The workers that serve a model, busy and draining ones included, or why there is none."""
        serving = self._serving(role, model)
        if serving:
            return serving
        workers = [w for w in self.workers.values() if w.role == role]
        if not workers or role != "gpu":
            raise UnavailableError(
                Code.NO_WORKER,
                f"no {role} worker is running; start one, or try again in a moment",
                retry_after_s=RETRY_AFTER_S,
            )
        names = ", ".join(sorted({name for w in workers for name in w.names()})) or "none"
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

    def _accepts(self, worker: Worker) -> bool:
        hung = worker.step_age_s is not None and worker.step_age_s > self._settings.hung_step_s
        room = len(worker.requests) < worker.capacity
        return worker.state is WorkerState.READY and room and not hung

    @staticmethod
    def _least_loaded(workers: list[Worker], model: str) -> Worker:
        """The least filled; one that has the model loaded before one that would load it."""
        return min(workers, key=lambda w: (bool(model) and model not in w.models, w.fill, w.id))

    def _start(self, request: Request, worker: Worker) -> None:
        flags = Flag.MSGPACK if request.session.encoding == "msgpack" else 0
        header = encode_header(request.id, request.session.id, flags)
        frames = [request.type, header, *request.frames]
        request.frames = []
        request.worker = worker
        worker.requests[request.id] = request
        self._out.append(Outgoing(Side.BACK, worker.peer, frames, True))

    def _dequeue(self, request: Request) -> None:
        key = (request.role, request.model)
        queue = self.queues.get(key)
        if queue is not None and queue.remove(request) and not queue:
            del self.queues[key]

    def _tell_cancel(self, request: Request, reason: Literal["cancelled", "timeout"]) -> None:
        if request.worker is not None:
            body = Cancel(stream_id=request.stream_id, reason=reason)
            self._out.to_worker(request.worker, b"CANCEL", body, request.id)

    def _say_queued(self, request: Request, place: int) -> None:
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


def _lost(requests: list[int], error: TokenbusError) -> Lost:
    return Lost(
        requests=requests,
        code=error.code,
        message=error.message,
        path=error.path,
        retry_after_s=error.retry_after_s,
    )
