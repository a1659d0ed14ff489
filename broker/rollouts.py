"""Handles PAUSE, RESUME, UPDATE_WEIGHTS and WEIGHTS: sends orders to all GPU workers of a model,
and collects their answers.

An update has two phases. In the first phase, all workers that have loaded the model read the new
weights. If one of them cannot read the weights, the update ends, and no worker uses the new
weights. In the second phase, the broker records the new version and orders all workers to use it. A
worker that is lost during an update receives the current version when it registers again. If this
worker cannot read the weights itself, it receives them from another worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..protocol.bodies import decode_as, error_body
from ..protocol.errors import Code, RequestError, ServiceError, TokenbusError, UnavailableError
from ..protocol.header import encode_header
from ..protocol.messages import (
    ModelInfo,
    Msg,
    PauseModel,
    ResumeModel,
    Rollout,
    SendWeights,
    UpdateWeights,
)
from ..protocol.worker_messages import (
    FetchWeights,
    ModelState,
    Order,
    OrderDone,
    Register,
    WeightsPart,
)
from .outgoing import Outgoing, Side
from .placement import Placement
from .session import Session
from .state import BrokerState
from .upload import Upload, check_source
from .worker import RETRY_AFTER_S, Worker

log = logging.getLogger(__name__)

MAX_RUNNING = 64
"""Maximum number of pauses and updates that wait for workers."""
MAX_STATES = 1024
"""Maximum number of models in ``BrokerState.states``: models that were paused or whose weights have
changed."""


@dataclass(slots=True, eq=False)
class _Running:
    """A message of the operator that waits for the answers of workers."""

    session: Session
    stream_id: int
    result: Rollout
    order: Order
    awaited: dict[int, Worker] = field(default_factory=dict)
    """The workers that have not answered the order, by id."""
    prepared: dict[int, Worker] = field(default_factory=dict)
    """The workers that have read the weights."""
    read: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By dtype: the hash of the weights that workers have read, and the name of the first worker
    that reported this hash."""
    upload: Upload | None = None
    """The weights that the operator sends; None if they are in a folder or in shared memory."""
    give_up_at: float = float("inf")
    """A time in seconds. If some worker has not read the weights by then, the update ends with the
    error ``timeout``."""


class Rollouts:
    """Pauses models and updates their weights. ``BrokerState.states`` has the present state of each
    model."""

    def __init__(self, state: BrokerState, placement: Placement) -> None:
        self._state = state
        self._states = state.states
        self._out = state.out
        self._placement = placement
        self._running: dict[int, _Running] = {}
        """The operator's messages that wait for workers, by the number of their order."""

    # --- messages of the operator ---------------------------------------------------------------

    def pause(self, session: Session, frames: list[bytes]) -> None:
        """Handles PAUSE."""
        message: PauseModel = decode_as(PauseModel, frames[1])
        model = self._model(message.model)
        state = replace(self._state_of(model), paused=message.mode)
        order = self._order("pause", state)
        order.pause = message.mode
        self._begin(session, message.stream_id, order, self._serving(model))
        self._states[model] = state

    def resume(self, session: Session, frames: list[bytes]) -> None:
        """Handles RESUME."""
        message: ResumeModel = decode_as(ResumeModel, frames[1])
        model = self._model(message.model)
        state = replace(self._state_of(model), paused=None)
        order = self._order("resume", state)
        self._begin(session, message.stream_id, order, self._serving(model))
        self._states[model] = state

    def update(self, session: Session, frames: list[bytes]) -> None:
        """Handles UPDATE_WEIGHTS: begins the first phase of the update."""
        message: UpdateWeights = decode_as(UpdateWeights, frames[1])
        model = self._model(message.model)
        state = self._state_of(model)
        check_source(message)
        version = message.version or state.version + 1
        if version <= state.version:
            raise RequestError(
                Code.INVALID_FIELD,
                f"version {version} of the weights of {model} is not new; the current version is "
                f"{state.version}; name a higher one",
                path="$.version",
            )
        if any(one.order.model == model and _changes(one) for one in self._running.values()):
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"the weights of {model} are being updated; try again when that update has ended",
                retry_after_s=RETRY_AFTER_S,
            )
        new = replace(state, version=version, folder=message.folder, hashes={})
        order = self._order("prepare", new)
        order.update = message.mode
        order.shared, order.size, order.sha256 = message.shared, message.size, message.sha256
        upload = None
        if not message.folder and not message.shared:
            upload = Upload(message.size, message.sha256)
        one = self._begin(session, message.stream_id, order, self._serving(model))
        one.upload = upload
        one.give_up_at = self._state.now + message.timeout_s

    def send(self, session: Session, frames: list[bytes]) -> None:
        """Handles WEIGHTS: passes the next part of new weights to the workers that read them."""
        message: SendWeights = decode_as(SendWeights, frames[1])
        part = frames[2] if len(frames) > 2 else b""
        uploads = (
            (one, one.upload)
            for one in self._running.values()
            if one.session is session and one.upload is not None
        )
        one, upload = next((o for o in uploads if o[1].sha256 == message.sha256), (None, None))
        if one is None or upload is None or one.order.action != "prepare":
            raise RequestError(
                Code.CONFLICT,
                "no update of this session waits for weights with this sha256; send "
                "UPDATE_WEIGHTS with their size and sha256 first",
                path="$.sha256",
            )
        upload.add(message, part)
        self._pass_on(one, upload)

    # --- messages of workers --------------------------------------------------------------------

    def on_done(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles ORDER_DONE, a worker's answer to an order."""
        done: OrderDone = decode_as(OrderDone, frames[2], "msgpack")
        one = self._running.get(done.number)
        if one is None or done.action != one.order.action:
            return
        if one.awaited.pop(worker.id, None) is None:
            return
        if done.action == "prepare":
            error = done.error or self._compared(one, worker, done)
            if error:
                one.prepared[worker.id] = worker
                why = f"no worker has new weights, because {worker.name} cannot have them: {error}"
                self._give_up(one, RequestError(Code.INVALID_FIELD, why, path="$.folder"))
                return
            one.prepared[worker.id] = worker
        elif done.error:
            log.warning("worker %s: %s", worker.name, done.error)
        else:
            result = one.result
            result.workers += 1
            result.streams += done.streams
            result.update_pause_ms = max(result.update_pause_ms, done.pause_ms)
            result.weights = result.weights or done.weights
        self._go_on(one)

    def on_fetch(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles FETCH_WEIGHTS: a worker requests the next part of an upload, or current weights
        that another worker has."""
        fetch: FetchWeights = decode_as(FetchWeights, frames[2], "msgpack")
        if fetch.order:
            one = self._running.get(fetch.order)
            if one is not None and one.upload is not None and worker.id in one.awaited:
                if fetch.offset == one.upload.offset:
                    one.upload.ready.add(worker.id)
                self._pass_on(one, one.upload)
            return
        peers = [
            other
            for other in self._serving(fetch.model, worker)
            if (info := other.models.get(fetch.model)) and info.path.weights == fetch.weights
        ]
        if peers:
            peer = peers[fetch.turn % len(peers)]
            sent = (b"FETCH_WEIGHTS", encode_header(0, worker.id), *frames[2:])
            self._out.append(Outgoing(Side.BACK, peer.peer, sent, True))
            return
        error = f"no worker has the weights {fetch.weights} of {fetch.model}"
        part = WeightsPart(model=fetch.model, weights=fetch.weights, error=error)
        self._out.to_worker(worker, b"WEIGHTS_PART", part)

    def current(self, message: Register) -> dict[str, ModelInfo]:
        """The loaded models of a worker, by name. A model whose weights at this worker are not
        current is left out, so that its requests go to other workers."""
        return {
            model.name: model
            for model in message.models
            if model.path.version >= self._state_of(model.parent or model.name).version
        }

    def on_lost(self, worker: Worker) -> None:
        """Handles the loss of a worker: orders do not wait for its answers any more. When the
        worker registers again, it receives the current states."""
        for one in list(self._running.values()):
            one.prepared.pop(worker.id, None)
            if one.awaited.pop(worker.id, None) is not None:
                self._go_on(one)

    def adopt(self, worker: Worker, states: Iterable[ModelState]) -> None:
        """Takes over the states that a worker reports. These states come from another broker, or
        from an earlier run of this broker."""
        for reported in states:
            known = self._states.get(reported.model)
            if known is None and len(self._states) >= MAX_STATES:
                log.warning("too many models have a state; that of %s is ignored", reported.model)
                continue
            if known is None:
                self._states[reported.model] = reported
            elif reported.version > known.version:
                self._states[reported.model] = replace(reported, paused=known.paused)
            if reported.version > (known.version if known is not None else 0):
                self._send(self._order("commit", reported), self._serving(reported.model, worker))

    def tick(self, now: float) -> None:
        """Gives up updates that are still in the first phase when their time is over."""
        for one in list(self._running.values()):
            if one.upload is not None and not one.session.alive:
                why = "no worker has new weights, because the session that sent them has ended"
                if one.order.action == "prepare":
                    self._give_up(one, ServiceError(Code.TIMEOUT, why))
            elif one.order.action == "prepare" and now > one.give_up_at:
                names = ", ".join(sorted(w.name for w in one.awaited.values()))
                why = f"no worker has new weights, because they were not read in time by: {names}"
                self._give_up(one, ServiceError(Code.TIMEOUT, why))

    # --- the phases -----------------------------------------------------------------------------

    def _begin(
        self, session: Session, stream_id: int, order: Order, workers: list[Worker]
    ) -> _Running:
        if len(self._running) >= MAX_RUNNING or len(self._states) >= MAX_STATES:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"{len(self._running)} pauses and updates wait for workers and {len(self._states)} "
                f"models have a state; {MAX_RUNNING} and {MAX_STATES} are allowed; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        result = Rollout(model=order.model, version=order.version)
        one = _Running(session, stream_id, result, order)
        self._running[order.number] = one
        one.awaited = {worker.id: worker for worker in workers}
        self._send(order, workers)
        if not workers:
            self._go_on(one)
        return one

    def _go_on(self, one: _Running) -> None:
        """Continues with the next phase if all workers have answered."""
        if one.awaited:
            if one.upload is not None and one.order.action == "prepare":
                self._pass_on(one, one.upload)
            return
        if one.order.action == "prepare":
            self._commit(one)
            return
        del self._running[one.order.number]
        self._out.to_session(one.session, b"MSG", Msg(stream_id=one.stream_id, result=one.result))

    def _pass_on(self, one: _Running, upload: Upload) -> None:
        """Passes the part of the weights that waits at the broker to the workers, when all of them
        have requested this part."""
        if not upload.part or not one.awaited.keys() <= upload.ready:
            return
        for worker in one.awaited.values():
            self._out.append(Outgoing(Side.BACK, worker.peer, upload.frames(one.order), True))
        answer = Msg(stream_id=upload.stream_id, result={"sent": upload.passed_on()})
        self._out.to_session(one.session, b"MSG", answer)

    def _commit(self, one: _Running) -> None:
        """Begins the second phase. From now on, the new weights are the model's current weights."""
        order, current = one.order, self._state_of(one.order.model)
        if not one.prepared:
            why = f"all workers of {order.model} were lost; the weights have not changed"
            self._give_up(one, UnavailableError(Code.WORKER_LOST, why, retry_after_s=RETRY_AFTER_S))
            return
        if not one.read:
            why = f"no worker has loaded the model {order.model!r}; send a request for it first"
            self._give_up(one, UnavailableError(Code.NO_WORKER, why, retry_after_s=RETRY_AFTER_S))
            return
        if order.version <= current.version:
            why = (
                f"no worker has new weights, because {order.model} has version {current.version} "
                "now; name a higher version"
            )
            self._give_up(one, RequestError(Code.CONFLICT, why, path="$.version"))
            return
        hashes = {dtype: weights for dtype, (weights, _) in one.read.items()}
        self._states[order.model] = replace(
            current, version=order.version, folder=order.folder, hashes=hashes
        )
        one.order = order = replace(order, action="commit", hashes=hashes)
        workers = self._serving(order.model)
        one.awaited = {worker.id: worker for worker in workers}
        log.info("the weights of %s have version %d: %s", order.model, order.version, order.folder)
        self._send(order, workers)

    def _give_up(self, one: _Running, error: TokenbusError) -> None:
        """Ends an update in its first phase. No worker uses the new weights yet. Workers that have
        read the new weights drop them."""
        del self._running[one.order.number]
        drop = replace(one.order, action="drop")
        self._send(drop, [*one.awaited.values(), *one.prepared.values()])
        self._out.count_error(error)
        body = error_body(error, one.stream_id, b"UPDATE_WEIGHTS")
        self._out.to_session(one.session, b"ERROR", body)
        if one.upload is not None and one.upload.part:
            body = error_body(error, one.upload.stream_id, b"WEIGHTS")
            self._out.to_session(one.session, b"ERROR", body)

    # --- parts of the phases --------------------------------------------------------------------

    @staticmethod
    def _compared(one: _Running, worker: Worker, done: OrderDone) -> str:
        """An error message if a worker's weights differ from the weights of the other workers;
        otherwise empty."""
        if not done.weights:
            return ""
        weights, name = one.read.setdefault(done.dtype, (done.weights, worker.name))
        if weights == done.weights:
            return ""
        return f"it has read other weights than {name}; expected equal files on all machines"

    def _order(self, action: str, state: ModelState) -> Order:
        return Order(
            number=next(self._state.ids),
            action=action,  # type: ignore[arg-type]
            model=state.model,
            version=state.version,
            folder=state.folder,
            hashes=state.hashes,
        )

    def _send(self, order: Order, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._out.to_worker(worker, b"ORDER", order)

    def _model(self, name: str) -> str:
        """The model that a message names; raises TokenbusError if no worker serves this model, or
        if it is a LoRA adapter."""
        name = name or self._state.pools.default_model
        for worker in self._placement.candidates("gpu", name).workers.values():
            info = worker.models.get(name)
            if info is not None and info.parent:
                raise RequestError(
                    Code.UNSUPPORTED,
                    f"{name!r} is a LoRA adapter, which shares the weights of its model; name the "
                    f"model {info.parent!r}",
                    path="$.model",
                )
        return name

    def _state_of(self, model: str) -> ModelState:
        return self._states.get(model) or ModelState(model=model)

    def _serving(self, model: str, besides: Worker | None = None) -> list[Worker]:
        """The GPU workers that serve a model, including workers that have not loaded it yet."""
        workers = self._state.workers.values()
        return [w for w in workers if w.role == "gpu" and w.serves(model) and w is not besides]


def _changes(one: _Running) -> bool:
    """Whether the operator's message is an UPDATE_WEIGHTS."""
    return one.order.action in ("prepare", "commit")
