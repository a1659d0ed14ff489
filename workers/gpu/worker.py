"""The GPU worker: receives messages from the bus, steps its engines, and sends tokens."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import defaultdict
from functools import partial

from ...protocol.bodies import decode_as, encode_body
from ...protocol.errors import Code, error_for
from ...protocol.header import encode_header
from ...protocol.health_file import HealthFile
from ...protocol.keys import own_key
from ...protocol.messages import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Embed,
    Generate,
    ModelInfoRequest,
    ModelTokenizerRequest,
    Score,
)
from ...protocol.metrics import Series
from ...protocol.pages import join_keys
from ...protocol.settings import Settings
from ...protocol.transcript import moves_of
from ...protocol.worker_messages import (
    Claim,
    Claimed,
    FetchTokenizer,
    FetchWeights,
    LiveRequest,
    Lost,
    Order,
    Pages,
    Register,
    Registered,
    Released,
    TokenizerAnswer,
    WeightsPart,
)
from .. import bus
from ..bus import Bus, FromBus, refused_frames
from ..successor import successor_comes
from .engine.engine import Engine, StepOutputs
from .model.models import Models, device_works
from .model.ranks import Ranks
from .serving.arrivals import Arrivals, Request
from .serving.attaching import ANSWER_ENTRIES, Attaching, ClaimEnd, Claiming, ReportQueue
from .serving.live_streams import LiveStreams
from .serving.rollouts import Calls, Rollouts
from .serving.steering import Steering, decision_timeout
from .serving.streams import Stream, gone_frames

log = logging.getLogger(__name__)

PAGES_EVERY_S = 0.1
"""Minimum time in seconds between two reports of the KV caches' changed pages. Workers report the
content of their caches to the broker in units of pages (``engine/pages.py``)."""
REQUESTS: dict[bytes, type[Request]] = {
    b"GENERATE": Generate,
    b"SCORE": Score,
    b"EMBED": Embed,
    b"MODEL_INFO": ModelInfoRequest,
    b"TOKENIZER": ModelTokenizerRequest,
}
"""The types of the client requests that a GPU worker serves, each with the struct of its body."""
IDLE_S = 0.25
"""If the worker does not have work, one pass of the main loop waits for a message for at most this
number of seconds."""


class GpuWorker:
    """A GPU worker process. ``run`` serves until ``stop`` is called, and returns the exit code."""

    def __init__(self, settings: Settings, name: str = "") -> None:
        self._settings = settings
        self._name = name or f"gpu-{socket.gethostname()}-{os.getpid()}"
        self._bus = Bus(
            settings.back_endpoint,
            self._registration,
            self._load,
            metrics=self._series,
            health=HealthFile(settings),
            key=own_key(settings, "worker"),
            link_of=self._link_of,
            elsewhere=self._elsewhere,
        )
        self._ranks = Ranks(settings.tp, settings.device) if settings.tp > 1 else None
        self._models = Models(settings, self._bus.interrupt, self._ranks)
        self._streams = LiveStreams(
            self._bus.post, self._release, name=self._name, num_workers=settings.gpu_workers
        )
        self._steering = Steering(
            partial(self._bus.post, wake=False),
            decision_timeout(settings),
            metrics=self._streams.metrics,
            again_s=settings.move_wait_s,
        )
        self._arrivals = Arrivals(
            self._models,
            self._streams,
            self._steering,
            self._bus.post,
            self._bus.changed,
            self._bus.interrupt,
        )
        calls = Calls(
            post=self._bus.post,
            changed=self._bus.changed,
            wake=self._bus.interrupt,
            fetch=self._bus.post_to_any,
            cancel=self._cancel,
            held=self._steering.kept_ends,
        )
        self._rollouts = Rollouts(
            self._models, self._arrivals, self._streams, settings.allow, calls
        )
        self._reports = ReportQueue()
        self._draining_since: float | None = None
        self._paged: set[str] = set()
        """The models whose pages have been reported."""
        self._pages_at = 0.0
        self._all_pages = False
        """Whether the next report contains all pages. If not, it contains only the changes."""
        self._handed_over: set[int] = set()
        """The links of the brokers that have sent HANDOVER: other workers continue the requests of
        these brokers."""
        self._stop_reason = ""
        self._restarts = False
        """Whether supervisord may start a successor. If so, the worker asks supervisord at the
        beginning of its drain. ``stop`` sets the flag."""
        self._failed: str | None = None
        """The reason why the worker must exit; None while the worker can continue."""
        self._rate = 0.0
        self._rate_at = time.monotonic()
        self._counted = 0
        """Number of outputs that had been sent when ``_rate`` (tokens per second) was last
        computed."""

    # --- the loop -------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until ``stop`` is called. Returns 0, or 1 after a failure that the worker cannot
        survive, such as a failed device or a default model that could not be loaded."""
        if self._models.default:
            self._models.want(self._models.default)
        self._bus.start()
        try:
            while not self._done():
                self._take()
                self._report()
                self._load_events()
                self._expire()
                self._follow_orders()
                self._step()
                self._report_pages()
        finally:
            self._bus.close(self._failed or self._stop_reason or "it failed")
            self._models.close()
            if self._ranks is not None:
                self._ranks.close()
        if self._failed is not None:
            log.error("%s", self._failed)
            return 1
        return 0

    def stop(self, reason: str, *, restarts: bool = False) -> None:
        """Drains the worker: it refuses further requests, and exits when its requests have ended or
        moved, or after ``drain_s``. May be called from a signal handler. ``restarts``: whether
        supervisord may start a successor, to which the streams are then handed over."""
        self._stop_reason = reason
        self._restarts = restarts
        self._bus.interrupt()

    def _done(self) -> bool:
        if self._failed is not None:
            return True
        if self._stop_reason and self._draining_since is None:
            self._draining_since = time.monotonic()
            self._bus.drain(self._stop_reason, self._restarts and successor_comes())
            log.info("draining %d streams: %s", len(self._streams), self._stop_reason)
        if self._draining_since is None:
            return False
        timed_out = time.monotonic() - self._draining_since > self._settings.drain_s
        return (
            timed_out
            or {s.link for s in (*self._streams, *self._arrivals.streams())} <= self._handed_over
        )

    def _take(self) -> None:
        """Receives the messages that have arrived. If the worker has no work, waits for a message
        for up to ``IDLE_S``."""
        frozen, engines = self._rollouts.frozen, self._models.engines
        busy = any(e.has_work and not frozen(model) for model, e in engines.items())
        busy = busy or self._arrivals.embeddings.has_work
        self._receive(0 if busy or self._reports else IDLE_S)

    def _receive(self, wait_s: float = 0.0) -> None:
        for message in self._bus.take(wait_s):
            try:
                # Handling a message may hang, for example while a prompt is tokenized. Heartbeats
                # therefore report how long the handling has taken so far.
                with self._bus.stepping():
                    self._on_message(message)
            except Exception as error:
                self._message_failed(message, error)
        self._arrivals.take_tokenized()
        self._bus.flush()

    def _report(self) -> None:
        """Answers ATTACHes and CLAIMs. One pass of the worker's loop sends a bounded number of
        entries, and later passes send the rest (``ReportQueue``)."""
        self._reports.renew()
        with self._bus.stepping():
            self._answer()
        self._bus.flush()

    def _answer(self) -> None:
        """Answers ATTACHes and CLAIMs until this pass of the loop has sent the maximum number of
        entries. Skips ATTACHes of streams that have ended, because the broker has answered these
        ATTACHes."""
        answered: dict[Stream, Attaching] = {}
        released: defaultdict[int, list[int]] = defaultdict(list)
        while (next_ := self._reports.next()) is not None:
            if isinstance(next_, ClaimEnd):
                self._reports.spend(ANSWER_ENTRIES)
                self._claimed(next_.session, next_.link)
                continue
            stream = next_.stream
            if stream in answered:
                self._streams.attach(answered.values())
                answered.clear()
            if isinstance(next_, Claiming):
                self._continue_at(next_, released)
            elif self._stream(stream.request) is stream and stream.link == next_.link:
                self._reports.spend(self._streams.cost(next_))
                answered[stream] = next_
        self._streams.attach(answered.values())
        for left, requests in released.items():
            self._leave_to_another(requests, left)

    def _load_events(self) -> None:
        while not self._models.events.empty():
            event = self._models.events.get()
            try:
                with self._bus.stepping():
                    self._rollouts.hold(event.model)
                    self._failed = self._arrivals.on_load_event(event) or self._failed
                    self._rollouts.on_loaded(event.model)
            except Exception as error:
                self._arrivals.fail_model(event.model, error)
            self._bus.flush()
        if self._models.excess:
            self._arrivals.evict()

    def _expire(self) -> None:
        """Ends the sequences whose decisions are overdue."""
        ends = self._steering.expire()
        if ends:
            self._streams.send(ends)
            self._bus.flush()

    def _follow_orders(self) -> None:
        """Pauses models, resumes them and replaces their weights."""
        with self._bus.stepping():
            self._rollouts.act()
        self._failed = self._rollouts.failed or self._failed
        self._bus.flush()

    def _step(self) -> None:
        """Runs one step of each model that has work. Sends the tokens of each step, in one message
        for each broker. Then computes a batch of EMBED requests if no step ran or the batch is
        due."""
        stepped = False
        for model, engine in self._models.engines.items():
            if not engine.has_work or self._rollouts.frozen(model):
                continue
            stepped = True
            try:
                self._streams.send(self._computed(engine))
            except Exception as error:
                self._step_failed(model, engine, error)
            self._bus.flush()
        embeddings = self._arrivals.embeddings
        if stepped:
            embeddings.note_step()
        if embeddings.has_work and (embeddings.due or not stepped):
            # ``busy`` also counts sequences that wait for a decision, because they may continue
            # while the batch of texts is computed. ``has_work`` does not count these sequences.
            busy = any(engine.has_requests for engine in self._models.engines.values())
            with self._bus.stepping():
                embeddings.step(busy)
            self._bus.flush()

    def _report_pages(self) -> None:
        """Reports the changed pages of the KV caches to all brokers."""
        logs = {name: engine.pages for name, engine in self._models.engines.items()}
        if logs.keys() != self._paged:
            # If a model was evicted, its pages are gone, but no ``PageLog`` lists them as removed.
            # So the next report replaces all pages.
            self._all_pages, self._paged = True, set(logs)
        now = time.monotonic()
        if now - self._pages_at < PAGES_EVERY_S:
            return
        added: list[bytes] = []
        removed: list[bytes] = []
        for log_of_model in logs.values():
            if self._all_pages:
                added += log_of_model.every()
            elif log_of_model.changed:
                more, less = log_of_model.take()
                added += more
                removed += less
        if not (self._all_pages or added or removed):
            return
        body = encode_body(Pages(reset=self._all_pages), "msgpack")
        self._pages_at, self._all_pages = now, False
        self._bus.post_all([b"PAGES", encode_header(), body, join_keys(added), join_keys(removed)])

    def _computed(self, engine: Engine) -> StepOutputs:
        """Runs one step of an engine and returns the outputs for clients.

        If steps overlap, the forward of this step was launched during the previous call of this
        method, and ran while the previous tokens were sent. The forward of the next step already
        runs when this method returns. A step with drafts does not overlap with other steps.
        """
        with self._bus.stepping():
            step = engine.begin()
            self._receive()
            if self._steering.active:
                self._steering.decide(engine, step, self._receive)
            outputs = engine.finish(step)
        if self._steering.active:
            outputs = self._steering.sampled(engine, outputs)
            # The controllers' rounds begin while the tokens are sent.
            self._bus.flush()
        return outputs

    # --- failures -------------------------------------------------------------------------------

    def _message_failed(self, message: FromBus, error: Exception) -> None:
        """Ends the request of a message whose handling raised ``error``. If the message does not
        belong to a known request, only logs the error."""
        shown = message.type.decode("ascii", "backslashreplace")
        request = message.header.request
        stream = self._streams.get(request)
        if stream is not None:
            self._streams.fail(stream, error, f"handling a {shown} message")
        elif not self._arrivals.fail(request, error, f"handling a {shown} message"):
            log.error("a %s message was dropped", shown, exc_info=error)

    def _step_failed(self, model: str, engine: Engine, error: Exception) -> None:
        """Ends the streams of a model whose step failed as a whole. The worker exits if its device
        is lost or its tables are inconsistent."""
        for stream in self._streams:
            if stream.model == model:
                self._streams.fail(stream, error, f"computing a step of {model}")
        if not device_works(engine.loaded.device):
            self._failed = f"the device {engine.loaded.device} has failed: {error}"
        elif self._streams.inconsistent or engine.has_requests:
            self._failed = f"a step of {model} failed, and its requests cannot be removed: {error}"

    # --- messages -------------------------------------------------------------------------------

    def _on_message(self, message: FromBus) -> None:
        kind = REQUESTS.get(message.type)
        if kind is not None:
            self._request(message, kind)
            return
        match message.type:
            case b"CANCEL":
                stream = self._stream(message.header.request)
                if stream is not None and _is_of(stream, message.link):
                    self._cancel(stream, decode_as(Cancel, message.body))
            case b"ATTACH":
                stream = self._stream(message.header.request)
                if stream is not None and stream.link == message.link:
                    received = decode_as(Attach, message.body).received
                    self._streams.take_form(stream, message.header.flags)
                    owner = message.header.address
                    self._reports.add(Attaching(stream, message.link, received), owner)
            case b"RESULT":
                worker, attachments = message.header.address, message.attachments
                ends = self._steering.on_result(worker, message.body, attachments, message.link)
                if ends:
                    self._streams.send(ends)
            case b"LOST":
                self._lost(decode_as(Lost, message.body, "msgpack"), message.link)
            case b"FETCH_TOKENIZER":
                self._tokenizer(message)
            case b"HANDOVER":
                self._handed_over.add(message.link)
            case b"DRAIN":
                self.stop("the broker has sent DRAIN")
            case b"ORDER":
                self._rollouts.on_order(decode_as(Order, message.body, "msgpack"), message.link)
            case b"FETCH_WEIGHTS":
                fetch = decode_as(FetchWeights, message.body, "msgpack")
                self._rollouts.on_fetch(fetch, message.header.address, message.link)
            case b"WEIGHTS_PART":
                part = decode_as(WeightsPart, message.body, "msgpack")
                self._rollouts.on_part(part, message.attachments, message.header.address)
            case b"REGISTERED":
                self._registered(decode_as(Registered, message.body, "msgpack"), message.link)
            case b"CLAIM":
                claim = decode_as(Claim, message.body, "msgpack")
                self._claim(claim.session, message.header.address, message.link)
            case bus.LEASE_ENDED:
                # This worker continues the broker's streams, because the broker's successor or
                # another broker may claim them.
                self._reports.drop_claims(message.link)
            case _:
                log.warning("a GPU worker does not accept messages of type %r", message.type)

    def _request(self, message: FromBus, kind: type[Request]) -> None:
        """Handles a client's request. Refuses the request if the worker is full and some of its
        requests belong to other brokers. A later attempt of a known request replaces the earlier
        attempt."""
        elsewhere = self._elsewhere(message.link) if self._bus.num_links > 1 else 0
        known = self._stream(message.header.request) if self._bus.num_links > 1 else None
        if known is not None and not _is_of(known, message.link):
            moves = moves_of(message.header, message.attachments)
            if known.claimed_by in (None, message.link) and moves > known.moves:
                # The client has left the broker of the known stream, so the known stream is stale.
                # The new copy, which has moved more often, replaces it.
                self._leave_to_another([known.request], known.link)
                self._arrivals.request(message, kind)
                return
            # The stream now belongs to another broker. The broker that sent this request has not
            # been notified yet, and treats the stream as lost.
            self._leave_to_another([known.request], message.link)
        elif elsewhere and known is None and self._num_requests >= self._settings.capacity:
            self._bus.post(refused_frames(message, elsewhere), message.link)
        else:
            self._arrivals.request(message, kind)

    def _claim(self, session: int, owner: int, link: int) -> None:
        """Handles a CLAIM. The client of ``session`` has connected to the broker of ``link``, so
        the session's requests continue at this broker. ``owner``: the owner of the session
        (``ReportQueue``). If this pass of the loop has sent the maximum number of entries, later
        passes handle the remaining requests."""
        if not session:
            self._claimed(session, link)
            return
        streams = [
            stream
            for stream in (*self._arrivals.streams(), *self._streams.reported())
            if stream.session == session and stream.type in (b"GENERATE", b"SCORE")
        ]
        self._reports.add_claim(session, owner, link, streams)
        self._answer()

    def _continue_at(self, claiming: Claiming, released: dict[int, list[int]]) -> None:
        """Continues a stream at the broker that has claimed the stream. If the stream belonged to
        another broker, adds its request to ``released``, under the link of the other broker."""
        stream, link = claiming
        is_live = self._stream(stream.request) is stream
        if stream.dropped or not (is_live or stream.live == 0):
            return
        self._reports.spend(self._streams.cost(claiming))
        claimed = 0
        if stream.link != link:
            released[stream.link].append(stream.request)
            stream.link = link
            # The previous broker may move a copy of the stream once more before it is notified.
            # The client keeps the copy with more moves, so two moves are added here.
            claimed = 2
            stream.moves += claimed
        try:
            self._go_on(stream, "the client has connected to another broker", claimed)
        except Exception as error:
            doing = "reporting it to another broker"
            if self._streams.get(stream.request) is stream:
                self._streams.fail(stream, error, doing)
            elif not self._arrivals.fail(stream.request, error, doing):
                log.error("request %d was not reported to a broker", stream.request, exc_info=error)

    def _claimed(self, session: int, link: int) -> None:
        """Reports to a broker that its CLAIM has been answered."""
        body = encode_body(Claimed(session=session), "msgpack")
        self._bus.post([b"CLAIMED", encode_header(), body], link)

    def _leave_to_another(self, requests: list[int], link: int) -> None:
        """Notifies a broker that these requests continue at another broker."""
        body = encode_body(Released(requests=requests), "msgpack")
        self._bus.post([b"RELEASED", encode_header(), body], link)

    def _go_on(self, stream: Stream, why: str, claimed: int = 0) -> None:
        """Sends a stream's journal to the broker at which it continues, and restarts its
        controller. ``claimed``: ``Journal.claimed``."""
        self._streams.send_journal(stream, claimed)
        if self._streams.get(stream.request) is stream:
            # The controller is restarted, because messages between the controller worker and this
            # worker may have been lost.
            self._start_again(stream, "", why)

    def _registered(self, answer: Registered, link: int) -> None:
        """Drops the streams that the broker gave to other workers while the lease was lost. If the
        broker was restarted or disconnected, it requests journals. Sends these journals, and
        continues their requests at this broker."""
        kept = self._bus.kept(answer, link)
        if kept is not None:
            self._reports.drop_claims(link)
        for stream in (*self._arrivals.streams(), *self._streams.reported()):
            if not _is_of(stream, link):
                continue
            request = stream.request
            if request in answer.unknown or (kept is not None and request not in kept):
                self._arrivals.drop(request)
                self._streams.drop(request)
        if kept is not None:
            self._rollouts.on_lease(link)
        self._rollouts.on_states(answer.states)
        self._bus.registered(answer, link)
        # This broker may not have received the earlier reports of pages, so the next report has all
        # pages.
        self._all_pages = True
        for request in answer.wanted:
            wanted = self._stream(request) or self._streams.kept(request)
            if wanted is not None and wanted.link != link:
                self._leave_to_another([request], link)
            elif wanted is None or wanted.type not in (b"GENERATE", b"SCORE"):
                self._bus.post(gone_frames(request), link)
            else:
                self._go_on(wanted, "the connection to the broker was lost")

    def _stream(self, request: int) -> Stream | None:
        """The stream of a request that an engine runs or that waits in ``Arrivals``; None if the
        request is unknown."""
        return self._streams.get(request) or self._arrivals.stream(request)

    def _cancel(self, stream: Stream, cancel: Cancel) -> None:
        request = stream.request
        if self._streams.get(request) is None:
            self._arrivals.cancel(request, cancel)
            return
        engine = self._models.engines[stream.model]
        self._steering.note_text_ends(request)
        aborted = engine.abort(request, cancel.reason)
        ends = self._steering.kept_ends(request)
        self._streams.send([*ends, *self._steering.with_notes(request, aborted)])

    def _lost(self, lost: Lost, link: int) -> None:
        """Restarts lost controllers on other controller workers. If no worker can run a controller,
        its request ends with an ERROR, after the tokens that have been computed."""
        error = error_for(lost.code, lost.message, path=lost.path, retry_after_s=lost.retry_after_s)
        for request in lost.requests:
            stream = self._streams.get(request)
            if stream is None or stream.link != link:
                continue
            if lost.code == Code.WORKER_LOST:
                self._start_again(stream, lost.worker, lost.message)
            else:
                self._streams.fail(stream, error, "running its controller")

    def _start_again(self, stream: Stream, left: str, why: str) -> None:
        """Restarts the controller of a stream, if it has one."""
        try:
            self._arrivals.start_again(stream, left, why)
        except Exception as failure:
            self._streams.fail(stream, failure, "starting its controller again")

    def _tokenizer(self, message: FromBus) -> None:
        """Sends the tokenizer that a controller worker requests, or an error."""
        wanted: FetchTokenizer = decode_as(FetchTokenizer, message.body, "msgpack")
        loaded = (e.loaded for e in self._models.engines.values())
        found = next((m for m in loaded if m.fingerprint == wanted.fingerprint), None)
        json = found.tokenizer_json if found is not None else None
        error = None
        if found is None:
            error = f"no loaded model has a tokenizer with the fingerprint {wanted.fingerprint}"
        elif json is None:
            error = "the model has no tokenizer that the tokenizers library can represent"
        answer = TokenizerAnswer(fingerprint=wanted.fingerprint, error=error)
        head = encode_header(0, message.header.address)
        attachments = [json] if json is not None else []
        frames = [b"TOKENIZER_JSON", head, encode_body(answer, "msgpack"), *attachments]
        self._bus.post(frames, message.link)

    def _release(self, stream: Stream) -> None:
        """Frees the state of an ended stream in the engine and in ``Steering``."""
        self._steering.forget(stream.request)
        engine = self._models.engines.get(stream.model)
        if engine is not None:
            engine.abort(stream.request)

    # --- registration and heartbeat (on a bus thread) ---------------------------------------------

    def _link_of(self, request: int) -> int | None:
        stream = self._stream(request) or self._streams.kept(request)
        return stream.link if stream is not None else None

    def _elsewhere(self, link: int) -> int:
        """Number of requests that do not belong to the broker of a link."""
        return sum(s.link != link for s in (*self._streams, *self._arrivals.streams()))

    @property
    def _num_requests(self) -> int:
        return len(self._streams) + self._arrivals.num_waiting

    def _registration(self) -> Register:
        live = [
            LiveRequest(request=s.request, session=s.session, stream_id=s.stream_id)
            for s in (*self._streams.reported(), *self._arrivals.streams())
        ]
        return Register(
            name=self._name,
            role="gpu",
            version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            capacity=self._settings.capacity,
            models=self._models.infos(),
            patterns=self._models.patterns,
            default=self._models.default,
            live=live,
            states=self._rollouts.states,
            brokers=self._bus.num_links,
        )

    def _load(self) -> tuple[int, dict[str, float]]:
        now = time.monotonic()
        if now - self._rate_at >= 0.5:
            sent = self._streams.num_outputs
            self._rate = (sent - self._counted) / (now - self._rate_at)
            self._counted, self._rate_at = sent, now
        waiting = self._arrivals.num_loading
        load = {"tokens_per_s": round(self._rate, 1), "loading": float(waiting)}
        for engine in list(self._models.engines.values()):
            for name, value in engine.stats().items():
                load[name] = load.get(name, 0.0) + value
        return self._num_requests, load

    def _series(self) -> list[Series]:
        return self._streams.metrics.series(dict(self._models.engines))


def _is_of(stream: Stream, link: int) -> bool:
    """Whether the broker of a link may end a stream. It may if the stream belongs to this broker
    and no other broker has claimed the stream."""
    return stream.link == link and stream.claimed_by in (None, link)
