"""Drains workers. If possible, other workers take over the streams of a draining worker."""

from __future__ import annotations

import logging

from ..protocol.bodies import decode_as
from ..protocol.errors import Code, RequestError, UnavailableError
from ..protocol.messages import DrainWorker, Msg
from ..protocol.worker_messages import Drain, Handover
from .controllers import Controllers
from .losses import log_drain
from .placement import Placement
from .request import REPEATABLE, STREAMS
from .session import Session
from .state import BrokerState
from .worker import RETRY_AFTER_S, Worker, WorkerState

log = logging.getLogger(__name__)

MAX_ASKED = 64
"""Maximum number of clients' DRAIN messages that may wait for the departure of the same worker."""


class Drains:
    """Drains workers, at the request of the worker itself or of an operator."""

    def __init__(self, state: BrokerState, placement: Placement, controllers: Controllers) -> None:
        self._state = state
        self._out = state.out
        self._placement = placement
        self._controllers = controllers
        self._draining: dict[int, Worker] = {}
        self._asked: dict[int, dict[tuple[int, int], tuple[Session, int]]] = {}
        """The clients' DRAIN messages that wait until a worker has left: first by worker, then by
        session and ``stream_id``. Each value has the message's session, and the number of requests
        that the worker had when the message arrived."""

    def ask(self, session: Session, frames: list[bytes]) -> None:
        """Handles a client's DRAIN: passes the message to the worker. The client receives the
        answer when the worker has left.

        Raises RequestError if the worker is unknown, and UnavailableError if too many DRAIN
        messages already wait for the departure of this worker.
        """
        message: DrainWorker = decode_as(DrainWorker, frames[1])
        workers = self._state.workers.values()
        worker = next((w for w in workers if w.name == message.worker), None)
        if worker is None:
            names = ", ".join(sorted(w.name for w in workers)) or "none"
            raise RequestError(
                Code.INVALID_FIELD,
                f"no worker has the name {message.worker!r}; the registered workers: {names}",
                path="$.worker",
            )
        requests = len(worker.requests) + len(worker.steers)
        asked = self._asked.setdefault(worker.id, {})
        for key, (other, _) in list(asked.items()):
            if not other.alive:
                del asked[key]
        if len(asked) >= MAX_ASKED:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"the worker {worker.name} is draining, and {len(asked)} DRAIN requests wait for "
                f"its end; {MAX_ASKED} are allowed; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        asked[session.id, message.stream_id] = session, requests
        self._out.to_worker(worker, b"DRAIN", Drain(reason="at a client's request"))

    def on_drain(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's DRAIN: the worker receives no new requests."""
        drain: Drain = decode_as(Drain, frames[2], "msgpack")
        worker.state = WorkerState.DRAINING
        worker.succeeded, worker.system_ends = drain.successor, drain.system_ends
        self._draining[worker.id] = worker
        self._controllers.on_drain(worker)
        log_drain(worker, drain.reason)
        self.hand_over()

    def hand_over(self) -> None:
        """Makes a draining worker hand over its streams if other workers can continue all of them,
        or if a new process will replace the worker.

        Otherwise the worker continues its streams, and this method is called again when the workers
        have changed.
        """
        for worker in self._draining.values():
            if not worker.handed_over and self._can_hand_over(worker):
                worker.handed_over = True
                log.info("worker %s hands over its streams", worker.name)
                self._out.to_worker(worker, b"HANDOVER", Handover())

    def _can_hand_over(self, worker: Worker) -> bool:
        requests = [r for r in worker.requests.values() if r.open]
        steered = [r for r in worker.steers.values() if r.steered.started]
        if not requests and not steered:
            return False
        if any(r.type not in STREAMS and r.type not in REPEATABLE for r in requests):
            return False
        if not all(r.movable for r in requests):
            return False
        if worker.succeeded:
            return True
        placement, controllers = self._placement, self._controllers
        return all(placement.can_continue_elsewhere(r, worker) for r in requests) and all(
            controllers.can_start_elsewhere(r, worker) for r in steered
        )

    def on_lost(self, worker: Worker) -> None:
        """Handles the departure or loss of a worker: answers the clients that have sent DRAIN for
        the worker."""
        self._draining.pop(worker.id, None)
        for (_, stream_id), (session, requests) in self._asked.pop(worker.id, {}).items():
            result = {"worker": worker.name, "requests": requests}
            self._out.to_session(session, b"MSG", Msg(stream_id=stream_id, result=result))
