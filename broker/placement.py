"""Chooses the first worker of a request, and the next worker if a worker of the request is lost."""

from __future__ import annotations

from collections.abc import Iterator

from ..protocol.errors import Code, RequestError, UnavailableError
from ..protocol.messages import ModelInfo
from .pools import Pool
from .prefixes import Prefixes
from .request import Request
from .state import BrokerState
from .worker import RETRY_AFTER_S, Worker, WorkerState


class Placement:
    """Chooses workers for requests. Does not change any table."""

    def __init__(self, state: BrokerState, prefixes: Prefixes) -> None:
        self._state = state
        self._pools = state.pools
        self._prefixes = prefixes

    def candidates(self, role: str, model: str) -> Pool:
        """The workers that serve a model, including busy and draining workers. Raises TokenbusError
        if no worker serves the model."""
        pool = self._pools.serving(role, model)
        if pool.workers:
            return pool
        if not self._pools.of_role(role) or role != "gpu":
            raise UnavailableError(
                Code.NO_WORKER,
                f"no {role} worker is running; if one is starting, try again in a moment, "
                "otherwise start one",
                retry_after_s=RETRY_AFTER_S,
            )
        names = ", ".join(sorted(self._pools.names(role))) or "none"
        if not model:
            raise RequestError(
                Code.UNKNOWN_MODEL,
                f"several models are served; name one of: {names}",
                path="$.model",
            )
        raise RequestError(
            Code.UNKNOWN_MODEL,
            f"no worker serves the model {model!r}; the served models: {names}",
            path="$.model",
        )

    def may_continue_at(self, request: Request) -> Iterator[Worker]:
        """The workers to which a request may move, including busy and draining workers."""
        serving = self._pools.serving(request.role, request.model)
        return (w for w in serving.workers.values() if self.fits(request, w))

    def can_continue_elsewhere(self, request: Request, worker: Worker) -> bool:
        """Whether a registered worker other than ``worker`` can continue a request, now or when it
        has room."""
        name = request.model or worker.default
        loaded = worker.models.get(name)
        for other in self.may_continue_at(request):
            there = other.models.get(name)
            if (
                other is worker
                or other.leaves_with(worker)
                or other.state is not WorkerState.READY
                or self._state.is_hung(other)
            ):
                continue
            if loaded is None or (there is not None and same_model(loaded, there)):
                return True
        return False

    def next_worker(self, request: Request) -> Worker | None:
        """The worker at which a request without a worker continues; None if no worker has room."""
        pool = self._pools.serving(request.role, request.model)
        for worker in pool.free():
            if self.fits(request, worker):
                found = self.with_prefix(request, worker)
                return found if self.fits(request, found) else worker
        if any(w.state is WorkerState.READY for w in self.may_continue_at(request)):
            return None
        # All remaining workers drain, for example because the whole system stops. Even a draining
        # worker may take the request, unless it hands its streams over.
        serving = self.may_continue_at(request)
        free = (w for w in serving if self.has_room(w) and not w.handed_over)
        return min(free, key=pool.rank, default=None)

    def beyond_capacity(self, request: Request) -> Worker | None:
        """Chooses a worker for a request although all workers are full. Returns None if the request
        must wait, for example because a worker already has a request of the same key or of the same
        user.

        Without this exception, the first request of a key would wait until a long stream of another
        key ends. Therefore, a worker accepts the first request of a key up to an eighth above its
        capacity. If the request names a user, the worker accepts only a sixteenth above its
        capacity, because any client can invent names of users. A key may have thousands of
        sessions, so they are examined only after a worker was found.
        """
        queue = self._state.queues.get((request.role, request.model))
        if self._state.waiting or (queue is not None and queue.priority > request.priority):
            return None
        pool = self.candidates(request.role, request.model)
        ready = (w for w in pool.workers.values() if w.state is WorkerState.READY)
        by = request.fields.by
        part = 16 if by else 8
        free = (w for w in ready if w.has_room_beyond(part) and not self._state.is_hung(w))
        worker = min(free, key=pool.rank, default=None)
        if worker is None:
            return None
        if by:
            streams = request.session.streams.values()
            return None if any(r.worker and r.fields.by == by for r in streams) else worker
        key = request.session.key
        sessions = self._state.sessions.of_key(key) if key else [request.session]
        # ``waiting`` is empty, so each live stream is either queued or at a worker.
        at_worker = any(len(session.streams) > session.queued for session in sessions)
        return None if at_worker else worker

    def with_prefix(self, request: Request, worker: Worker) -> Worker:
        """Returns the worker for a request: ``worker``, which is the least loaded one, or another
        worker whose cache has the beginning of the prompt."""
        pool = self._pools.serving(request.role, request.model)
        return self._prefixes.choose(request, pool, self._model_of(request), worker)

    def on_lost(self, worker: Worker) -> None:
        """Handles the loss of a worker, which includes the loss of its cached pages."""
        self._prefixes.lost(worker)

    def expect(self, request: Request, worker: Worker) -> None:
        """Records that a request is sent to a worker. The worker's cache will then have the pages
        of the prompt."""
        self._prefixes.expect(request, worker, self._model_of(request))

    def _model_of(self, request: Request) -> str:
        return request.model or self._pools.default_model

    def has_room(self, worker: Worker) -> bool:
        return worker.has_room and not self._state.is_hung(worker)

    @staticmethod
    def fits(request: Request, worker: Worker) -> bool:
        """Whether a request may continue at a worker: as far as the broker knows, the worker has
        the same model."""
        began_with = request.began_with
        if began_with is None:
            return True
        name = request.model or worker.default
        loaded = worker.models.get(name)
        return name == began_with.name and (loaded is None or same_model(loaded, began_with))


def same_model(model: ModelInfo, other: ModelInfo) -> bool:
    """Whether two workers' models give the same tokens, as far as their reports show."""
    ours, theirs = (
        (m.fingerprint, m.vocab_size, m.architecture, m.parameters, m.dtype, m.sampling, m.adapter)
        for m in (model, other)
    )
    return ours == theirs
