"""PAUSE, RESUME and UPDATE_WEIGHTS at a GPU worker.

PAUSE holds the new streams of a model, and in one mode also stops its steps. RESUME continues both.
UPDATE_WEIGHTS replaces the model's weights. The broker sends each of these requests as ORDERs.
UPDATE_WEIGHTS has two ORDERs: ``prepare`` reads the new weights, and ``commit`` makes them current.
New weights are read on a thread, while streams run. They replace the old weights between two steps.
A new stream of a model waits until the worker has the model's current weights and the model is not
paused. If the worker cannot read the current weights from their folder, it receives them from
another worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

from msgspec.structs import replace

from ....protocol.bodies import encode_body
from ....protocol.errors import Code, RequestError
from ....protocol.header import encode_header
from ....protocol.messages import Cancel, UpdateMode
from ....protocol.worker_messages import (
    FetchWeights,
    ModelState,
    Order,
    OrderDone,
    WeightsPart,
)
from ..engine.engine import TokenOutput
from ..model.allow_list import is_allowed
from ..model.models import Models
from ..model.new_weights import NewWeights, WeightsError
from ..model.weights_file import ReceivedFile
from .arrivals import Arrivals
from .live_streams import LiveStreams
from .reading import Reading
from .streams import Frames, Stream
from .weights_exchange import Incoming, Sender

log = logging.getLogger(__name__)

MAX_READ = 4
"""Maximum number of models that have new weights at the same time. The weights are being read, or
wait to be used."""


class Rollouts:
    """The current weights and the pauses of a worker's models.

    ``allow``: the patterns of the setting ``allow``; a folder with new weights must match one of
    them. ``calls``: functions of the worker.
    """

    def __init__(
        self,
        models: Models,
        arrivals: Arrivals,
        streams: LiveStreams,
        allow: list[str],
        calls: Calls,
    ) -> None:
        self._models = models
        self._arrivals = arrivals
        self._streams = streams
        self._allow = allow
        self._calls = calls
        self._sender = Sender(models, calls.post, calls.wake)
        self._states: dict[str, ModelState] = {}
        """By model: the state that the broker has ordered, which is the version of the weights and
        the pause. The engine may not have these weights yet."""
        self._readings: dict[str, Reading] = {}
        self._orders: list[tuple[Order, int]] = []
        """The orders that ``act`` will carry out, and their links."""
        self._waits: dict[str, list[tuple[Order, int, int]]] = {}
        """By model: the PAUSEs that wait until the model's streams have ended, each with its link
        and the number of these streams."""
        self._wanted: SimpleQueue[Reading] = SimpleQueue()
        self._read: SimpleQueue[tuple[Reading, NewWeights | WeightsError]] = SimpleQueue()
        self._reader: threading.Thread | None = None
        self.failed: str | None = None
        """The reason why the worker must exit; None if it can continue. The worker must exit if a
        model has outdated weights or a mixture of two versions."""

    @property
    def states(self) -> list[ModelState]:
        """The states of the models whose weights have changed, and of the models that are or were
        paused. Any thread may read them."""
        return list(self._states.values())

    def frozen(self, model: str) -> bool:
        """Whether the steps of a model must not run, because the model is paused and keeps its
        streams."""
        state = self._states.get(model)
        return state is not None and state.paused == "keep"

    # --- messages -------------------------------------------------------------------------------

    def on_order(self, order: Order, link: int) -> None:
        """Receives an order. Requests that arrive after a commit or a pause wait until the order
        has been carried out."""
        if order.action in ("commit", "pause"):
            self._arrivals.held.add(order.model)
        self._orders.append((order, link))

    def on_states(self, states: Iterable[ModelState]) -> None:
        """Receives the states of models from a broker. The broker sends them when it registers this
        worker."""
        for state in states:
            known = self._states.get(state.model)
            if known is not None and known.version > state.version:
                # The broker has not received the registration with the new version yet.
                state = replace(known, paused=state.paused)
            self._states[state.model] = state
            self._catch_up(state.model)
            self._settle(state.model)

    def on_fetch(self, fetch: FetchWeights, address: int, link: int) -> None:
        """Receives a FETCH_WEIGHTS, with which another worker requests a part of a model's
        weights."""
        self._sender.add(fetch, address, link)

    def on_part(self, part: WeightsPart, content: list[bytes], sender: int) -> None:
        """Receives a part of the weights of a model. ``sender``: the worker that has sent the part;
        0 for a message of the broker itself."""
        reading = self._readings.get(part.model)
        incoming = reading.incoming if reading is not None else None
        if reading is None or incoming is None or incoming.weights != part.weights:
            return
        try:
            if part.error and not sender and (reading.folder or self._streams_of(part.model)):
                raise WeightsError(part.error)
            # If the weights are not in a folder and the model has no streams, the worker waits. It
            # can continue when another worker registers with the weights, or at the next update.
            if not incoming.take(part, content):
                return
        except WeightsError as error:
            if not reading.committed:
                self._take_read(reading, error)
                return
            del self._readings[part.model]
            self._outdated(reading, str(error))
            return
        reading.received, reading.incoming = incoming.file, None
        self._read_soon(reading)

    def on_lease(self, link: int) -> None:
        """Called when a new lease begins at the broker of a link. Discards weights that this broker
        has ordered but has not made current."""
        for model, reading in list(self._readings.items()):
            if reading.link == link and not reading.committed:
                del self._readings[model]

    def hold(self, model: str) -> None:
        """Holds a model's requests if the weights that are loaded may be outdated. Called before an
        event of loading the model is handled."""
        state = self._states.get(model)
        if state is not None and state.version:
            self._arrivals.held.add(model)

    def on_loaded(self, model: str) -> None:
        """Called when a model has been loaded."""
        self._catch_up(model)
        self._settle(model)

    # --- between two steps ----------------------------------------------------------------------

    def act(self) -> None:
        """Carries out the orders that have arrived, and replaces the weights of models whose new
        weights have been read. Called between two steps."""
        while not self._read.empty():
            self._take_read(*self._read.get())
        for reading in self._readings.values():
            if reading.incoming is not None:
                reading.incoming.ask_again()
        self._sender.act()
        orders, self._orders = self._orders, []
        for order, link in orders:
            match order.action:
                case "prepare":
                    self._prepare(order, link)
                case "commit":
                    self._commit(order, link)
                case "drop":
                    self._drop(order)
                    self._done(order, link)
                case "pause":
                    self._pause(order, link)
                case "resume":
                    self._resume(order, link)
            self._settle(order.model)
        for model in list(self._waits):
            if not self._streams_of(model):
                self._answer_waits(model)

    # --- weights --------------------------------------------------------------------------------

    def _prepare(self, order: Order, link: int) -> None:
        """Begins to read the weights that an order names. If the model is not loaded, only answers
        the order."""
        engine = self._models.engines.get(order.model)
        if engine is None:
            self._done(order, link)
        elif order.folder and not is_allowed(order.folder, self._allow):
            shown = ", ".join(self._allow) or "empty"
            error = (
                f"the folder {order.folder!r} is not in the allow-list ({shown}); start the "
                "workers with --allow and a pattern of the folder, or send the weights over the bus"
            )
            self._done(order, link, error=error)
        elif self._reads_current(order.model) or len(self._readings) >= MAX_READ:
            error = "the worker still reads other weights; try again when it has read them"
            self._done(order, link, error=error)
        else:
            reading = Reading(order.model, engine, order.version, order.folder, order.update)
            reading.prepare, reading.link = (order, link), link
            reading.sha256, reading.shared, reading.size = order.sha256, order.shared, order.size
            self._begin(reading)

    def _reads_current(self, model: str) -> bool:
        """Whether the current weights of a model are being read. Another update must then wait.
        Returns False if the weights arrive over the bus, because an update may discard this
        transfer."""
        reading = self._readings.get(model)
        return reading is not None and reading.committed and reading.incoming is None

    def _commit(self, order: Order, link: int) -> None:
        """Records that a version of the weights is now a model's current version. These weights
        replace the old weights as soon as they have been read."""
        state = self._states.get(order.model) or ModelState(model=order.model)
        if order.version > state.version:
            state = replace(state, version=order.version, folder=order.folder, hashes=order.hashes)
            self._states[order.model] = state
        self._catch_up(order.model, order.update)
        reading = self._readings.get(order.model)
        if reading is None:
            self._done(order, link)
            self._calls.changed()
            return
        reading.commits.append((order, link))
        if reading.read is not None:
            self._replace(reading)

    def _drop(self, order: Order) -> None:
        """Discards the weights that an order names, if they have not become the current weights."""
        reading = self._readings.get(order.model)
        if reading is not None and not reading.committed and reading.version == order.version:
            del self._readings[order.model]
            self._catch_up(order.model)

    def _catch_up(self, model: str, mode: UpdateMode = "recompute") -> None:
        """Begins to read the current weights of a model, if the model is loaded and does not have
        them yet."""
        if not self._lags(model):
            return
        engine, state = self._models.engines[model], self._states[model]
        reading = self._readings.get(model)
        weights = state.hashes.get(str(engine.loaded.dtype), "")
        if reading is None or (reading.engine, reading.version) != (engine, state.version):
            commits = reading.commits if reading is not None else []
            reading = Reading(
                model, engine, state.version, state.folder, commits=commits, weights=weights
            )
            self._begin(reading)
        elif reading.prepare is not None and reading.incoming is not None and weights:
            # This worker was receiving the weights from the operator, through a broker whose link
            # is now broken. So it receives them from another worker.
            reading.weights = weights
            self._receive(reading)
        reading.mode, reading.committed, reading.weights = mode, True, weights

    def _lags(self, model: str) -> bool:
        """Whether a model is loaded, but does not have its current weights."""
        engine, state = self._models.engines.get(model), self._states.get(model)
        return engine is not None and state is not None and engine.loaded.version < state.version

    def _begin(self, reading: Reading) -> None:
        """Begins to read weights. If other weights of the model are being read, they are
        discarded."""
        before = self._readings.get(reading.model)
        if before is not None:
            replaced = [before.prepare] if before.prepare is not None else []
            if before.commits is not reading.commits:
                replaced += before.commits
            for order, link in replaced:
                self._done(order, link, error="another update of the model has begun")
        self._readings[reading.model] = reading
        if reading.folder or reading.shared:
            self._read_soon(reading)
        elif reading.prepare is not None:
            self._receive_new(reading, *reading.prepare)
        elif reading.weights:
            self._receive(reading)
        else:
            self._read_soon(reading)

    def _receive(self, reading: Reading, turn: int = 0) -> None:
        """Begins to receive weights from another worker. If ``turn`` is above 0, an earlier attempt
        has failed. The first part is then not requested now, but later by
        ``Incoming.ask_again``."""
        fetch = FetchWeights(model=reading.model, weights=reading.weights, turn=turn)
        log.info("%s gets version %d from another worker", reading.model, reading.version)
        reading.received, reading.shared, reading.sha256 = None, "", ""
        reading.incoming = Incoming(reading.engine.loaded, fetch, self._calls.fetch)
        if not turn:
            reading.incoming.ask()

    def _receive_new(self, reading: Reading, order: Order, link: int) -> None:
        """Begins to receive the weights that the operator sends to the broker of a link."""
        loaded = reading.engine.loaded
        fetch = FetchWeights(model=order.model, weights=order.sha256, order=order.number)
        try:
            file = ReceivedFile(loaded, order.size)
        except WeightsError as error:
            self._take_read(reading, error)
            return

        def send(frames: Frames, turn: int) -> None:
            self._calls.post(frames, link)

        reading.incoming = Incoming(loaded, fetch, send, file)
        reading.incoming.ask()

    def _read_soon(self, reading: Reading) -> None:
        """Queues weights for the thread that reads weights, and starts this thread if needed."""
        self._wanted.put(reading)
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_all, name="weights", daemon=True)
            self._reader.start()

    def _read_all(self) -> None:
        """Reads the queued weights. Runs on a separate thread."""
        while True:
            reading = self._wanted.get()
            found: NewWeights | WeightsError
            try:
                found = reading.load()
            except WeightsError as error:
                found = error
            except Exception as error:
                log.exception("reading the weights of %s failed", reading.model)
                found = WeightsError(f"reading the weights failed: {error}")
            self._read.put((reading, found))
            self._calls.wake()

    def _take_read(self, reading: Reading, found: NewWeights | WeightsError) -> None:
        if self._readings.get(reading.model) is not reading:
            return
        error = str(found) if isinstance(found, WeightsError) else ""
        if isinstance(found, NewWeights):
            reading.read = found
        if reading.prepare is not None:
            order, link = reading.prepare
            reading.prepare = None
            weights = found.weights if isinstance(found, NewWeights) else ""
            dtype = str(reading.engine.loaded.dtype)
            self._done(order, link, error=error, weights=weights, dtype=dtype)
        if error and reading.committed and reading.weights:
            log.warning("%s; another worker may have version %d", error, reading.version)
            self._receive(reading, reading.attempts)
            reading.attempts += 1
        elif error:
            del self._readings[reading.model]
            if reading.committed:
                self._outdated(reading, error)
            else:
                self._catch_up(reading.model)
        elif reading.committed:
            self._replace(reading)
        self._settle(reading.model)

    def _replace(self, reading: Reading) -> None:
        """Replaces the weights of a model. The worker exits if this fails."""
        assert reading.read is not None
        model, engine, new = reading.model, reading.engine, reading.read
        del self._readings[model]
        if self._models.engines.get(model) is not engine:
            self._catch_up(model)
            for order, link in reading.commits:
                self._done(order, link)
            return
        began = time.perf_counter()
        try:
            kept = engine.replace_weights(new, reading.mode == "keep")
        except Exception as error:
            log.exception("replacing the weights of %s failed", model)
            self.failed = f"replacing the weights of {model} failed: {error}"
            return
        pause_ms = round((time.perf_counter() - began) * 1000, 3)
        streams = self._streams.change_path(model, engine.path_of, kept, self._calls.held)
        self._arrivals.embeddings.restart(engine)
        log.info(
            "%s has version %d of its weights (%s) from %s: %d streams, %.1f ms, %s",
            *(model, new.version, new.weights, new.source, streams, pause_ms, reading.mode),
        )
        self._calls.changed()
        for order, link in reading.commits:
            self._done(order, link, streams=streams, pause_ms=pause_ms, weights=new.weights)

    def _outdated(self, reading: Reading, error: str) -> None:
        """Called if the current weights of a model cannot be read. If the model has streams or is
        the default model, the worker exits and the streams move. If not, the model is unloaded."""
        model = reading.model
        why = f"{model} cannot have version {reading.version} of its weights: {error}"
        for order, link in reading.commits:
            self._done(order, link, error=why)
        if model == self._models.default or self._streams_of(model):
            self.failed = why
            return
        log.error("%s", why)
        self._models.unload(model)
        refusal = RequestError(Code.MODEL_LOAD_FAILED, why, path="$.model")
        self._arrivals.fail_model(model, refusal)
        self._calls.changed()

    # --- pauses ---------------------------------------------------------------------------------

    def _pause(self, order: Order, link: int) -> None:
        model = order.model
        state = self._states.get(model) or ModelState(model=model)
        self._states[model] = replace(state, paused=order.pause)
        live = self._streams_of(model)
        if order.pause == "abort":
            waiting = [s for s in self._arrivals.streams() if s.model == model]
            for stream in live + waiting:
                self._calls.cancel(stream, Cancel(stream_id=stream.stream_id))
        if order.pause == "wait" and live:
            self._waits.setdefault(model, []).append((order, link, len(live)))
        else:
            self._done(order, link, streams=len(live))

    def _resume(self, order: Order, link: int) -> None:
        state = self._states.get(order.model)
        if state is not None:
            self._states[order.model] = replace(state, paused=None)
        self._answer_waits(order.model)
        self._done(order, link, streams=len(self._streams_of(order.model)))

    def _answer_waits(self, model: str) -> None:
        for order, link, streams in self._waits.pop(model, ()):
            self._done(order, link, streams=streams)

    # --- details --------------------------------------------------------------------------------

    def _settle(self, model: str) -> None:
        """Holds new requests of a model while the model is paused or does not have its current
        weights. When neither is the case, begins the held requests."""
        state = self._states.get(model)
        if (state is not None and state.paused is not None) or self._lags(model):
            self._arrivals.held.add(model)
        elif model in self._arrivals.held and self.failed is None:
            self._arrivals.held.discard(model)
            self._arrivals.release(model)

    def _streams_of(self, model: str) -> list[Stream]:
        return [stream for stream in self._streams if stream.model == model]

    def _done(
        self,
        order: Order,
        link: int,
        error: str = "",
        streams: int = 0,
        pause_ms: float = 0.0,
        weights: str = "",
        dtype: str = "",
    ) -> None:
        """Answers an order."""
        body = OrderDone(
            number=order.number,
            action=order.action,
            error=error,
            streams=streams,
            pause_ms=pause_ms,
            weights=weights,
            dtype=dtype,
        )
        self._calls.post([b"ORDER_DONE", encode_header(), encode_body(body, "msgpack")], link)


@dataclass(slots=True, frozen=True)
class Calls:
    """The functions of the worker that ``Rollouts`` calls."""

    post: Callable[[Frames, int], None]
    """Sends frames over a link."""
    changed: Callable[[], None]
    """Called when the worker's registration (its models and their weights) has changed."""
    wake: Callable[[], None]
    """Makes the loop call ``act`` soon. Any thread may call this function."""
    fetch: Callable[[Frames, int], None]
    """Sends frames to one of the brokers, which a number selects."""
    cancel: Callable[[Stream, Cancel], None]
    """Ends a stream."""
    held: Callable[[int], list[TokenOutput]]
    """The outputs of a request that have been computed and will be sent later."""
