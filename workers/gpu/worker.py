"""The GPU worker: takes requests from the bus, steps its engines, sends tokens back."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec import UNSET

from ...protocol.bodies import decode_as, encode_body
from ...protocol.errors import Code, RequestError, TokenbusError, error_for
from ...protocol.header import encode_header
from ...protocol.messages import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Generate,
    ModelInfoRequest,
    Msg,
    Score,
    System,
    Token,
)
from ...protocol.settings import Settings
from ...protocol.worker_messages import (
    LiveRequest,
    Lost,
    Register,
    Registered,
    Result,
    Start,
    TokenizerAnswer,
    TokenizerRequest,
    VocabularyName,
)
from ..bus import Bus, FromBus
from .engine import Engine, TokenOutput
from .models import Failed, Models, Progress, Ready, model_info, tokenizer_json
from .prompts import prompt_tokens, tokenize
from .ranks import Ranks
from .steering import Steering
from .streams import (
    Stream,
    attached_frames,
    error_frames,
    message_frames,
    saved_buffer_frames,
    token_frames,
)

log = logging.getLogger(__name__)

IDLE_S = 0.25
"""How long a worker without work waits for a message before it looks at its own state again."""

_decode_result = msgspec.msgpack.Decoder(Result).decode

Request = Generate | Score | ModelInfoRequest


@dataclass(slots=True)
class Waiting:
    """A request whose model is being loaded."""

    stream: Stream
    message: Request
    attachments: list[bytes] = field(default_factory=list)


class GpuWorker:
    """One process of the GPU group. ``run`` serves until ``stop``; the exit code is its result."""

    def __init__(self, settings: Settings, name: str = "") -> None:
        self._settings = settings
        self._name = name or f"gpu-{socket.gethostname()}-{os.getpid()}"
        self._streams: dict[int, Stream] = {}
        self._waiting: dict[int, Waiting] = {}
        self._bus = Bus(settings.back_endpoint, self._registration, self._load)
        self._ranks = Ranks(settings.tp, settings.device) if settings.tp > 1 else None
        self._models = Models(settings, self._bus.interrupt, self._ranks)
        self._steering = Steering(partial(self._bus.post, wake=False))
        self._draining_since: float | None = None
        self._stop_reason = ""
        self._failed: str | None = None
        self._logged = ("", 0)
        self._unsent: list[TokenOutput] = []
        """Of the last step, on a GPU."""
        self._tokens = 0
        self._rate = 0.0
        self._rate_at = time.monotonic()

    # --- the loop -------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves; returns 0, or 1 where the model that it was started for could not be loaded."""
        if self._models.default:
            self._models.want(self._models.default)
        self._bus.start()
        while not self._done():
            self._take()
            self._load_events()
            self._step()
        self._bus.close(self._stop_reason or "it was stopped")
        if self._ranks is not None:
            self._ranks.close()
        if self._failed is not None:
            log.error("%s", self._failed)
            return 1
        return 0

    def stop(self, reason: str) -> None:
        """Asks for no more requests, finishes what runs, and ends; callable from a signal."""
        self._stop_reason = reason
        self._bus.interrupt()

    def _done(self) -> bool:
        if self._failed is not None:
            return True
        if self._stop_reason and self._draining_since is None:
            self._draining_since = time.monotonic()
            self._bus.drain(self._stop_reason)
            log.info("draining %d streams: %s", len(self._streams), self._stop_reason)
        if self._draining_since is None:
            return False
        late = time.monotonic() - self._draining_since > self._settings.drain_s
        return late or not (self._streams or self._waiting)

    def _take(self) -> None:
        """The messages that are there; waits for one while there is nothing to step."""
        busy = any(engine.has_work for engine in self._models.engines.values())
        self._take_what_is_there(0 if busy else IDLE_S)

    def _take_what_is_there(self, wait_s: float = 0.0) -> None:
        for message in self._bus.take(wait_s):
            try:
                self._on_message(message)
            except Exception:
                log.exception("a %s message was dropped", message.type.decode("ascii", "replace"))
        self._bus.flush()

    def _step(self) -> None:
        """One step of each model that has work, and one message with all its tokens.

        On a GPU the forward runs on while the tokens of the step before are sent and new requests
        are read; on a CPU it is over when ``begin`` returns, so they are sent at once.
        """
        for engine in self._models.engines.values():
            if not engine.has_work:
                continue
            with self._bus.stepping():
                began = time.monotonic()
                step = engine.begin()
                if engine.runs_beside:
                    self._send([])
                    self._take_what_is_there()
                if self._steering.active:
                    engine.wait_for_forward()
                    forward_s = time.monotonic() - began
                    self._steering.decide(engine, step, forward_s, self._take_what_is_there)
                outputs = engine.finish(step)
            if self._steering.active:
                outputs = self._steering.sampled(engine, outputs)
            if engine.runs_beside and engine.has_work:
                self._unsent += outputs
            else:
                self._send(outputs)
            self._bus.flush()

    # --- requests -------------------------------------------------------------------------------

    def _on_message(self, message: FromBus) -> None:
        match message.type:
            case b"GENERATE":
                self._request(message, Generate)
            case b"SCORE":
                self._request(message, Score)
            case b"MODEL_INFO":
                self._request(message, ModelInfoRequest)
            case b"CANCEL":
                self._cancel(message.header.request, decode_as(Cancel, message.body))
            case b"ATTACH":
                stream = self._streams.get(message.header.request)
                if stream is not None:
                    received = decode_as(Attach, message.body).received
                    for frames in attached_frames(stream, received):
                        self._bus.post(frames)
            case b"RESULT":
                result = _decode_result(message.body)
                worker, attachments = message.header.address, message.attachments
                ends = self._steering.on_result(worker, result, attachments)
                if ends:
                    self._send(ends)
            case b"LOST":
                self._lost(decode_as(Lost, message.body, "msgpack"))
            case b"TOKENIZER":
                self._tokenizer(message)
            case b"DRAIN":
                self.stop("the broker asked for it")
            case b"REGISTERED":
                for request in decode_as(Registered, message.body, "msgpack").unknown:
                    self._drop(request)
            case _:
                log.warning("a GPU worker does not know the type %r", message.type)

    def _request(self, message: FromBus, kind: type[Request]) -> None:
        """A request: into its engine, behind the loading of its model, or refused."""
        stream = Stream.of(message.header, _stream_id(message.body), "")
        try:
            request = decode_as(kind, message.body)
            stream.model = request.model or self._models.default
            if not stream.model:
                raise RequestError(
                    Code.UNKNOWN_MODEL,
                    "this worker loads models on demand; name one",
                    path="$.model",
                )
            waiting = Waiting(stream, request, message.attachments)
            engine = self._models.get(stream.model)
            if engine is None:
                self._models.want(stream.model)
                self._waiting[stream.request] = waiting
                self._notice(stream, "loading", f"loading {stream.model}", 0.0)
            else:
                self._begin(waiting, engine)
        except TokenbusError as error:
            self._bus.post(error_frames(stream, error))

    def _begin(self, waiting: Waiting, engine: Engine) -> None:
        """Gives a request to its engine; raises TokenbusError where it is wrong."""
        stream, message = waiting.stream, waiting.message
        tokenizer = engine.loaded.tokenizer
        if isinstance(message, ModelInfoRequest):
            answer = Msg(stream_id=stream.stream_id, model_info=model_info(engine.loaded))
            self._bus.post(message_frames(stream, b"MSG", answer, final=True))
            return
        prompt = prompt_tokens(message, waiting.attachments, tokenizer)
        common = {"priority": message.priority, "client": stream.session}
        if isinstance(message, Score):
            scored = message.scored
            if isinstance(scored, str):
                scored = tokenize(scored, tokenizer, start=False)
            engine.score(stream.request, prompt, scored, text=message.text, **common)
        else:
            steered = message.controller is not None
            sampling = message
            if steered:
                # Its controller decides what an end-of-sequence token is, and is forked with it.
                sampling = msgspec.structs.replace(message, ignore_eos=True, n=1)
            stream.save, stream.prompt, stream.live = message.save, prompt, sampling.n
            engine.add(stream.request, prompt, sampling, text=message.text, **common)
            if message.controller is not None:
                start = Start(
                    controller=message.controller,
                    arg=message.controller_arg,
                    prompt=prompt,
                    n=message.n,
                    max_tokens=min(message.max_tokens, engine.max_length - len(prompt)),
                    model=stream.model,
                    vocabulary=VocabularyName(
                        fingerprint=engine.loaded.fingerprint,
                        size=engine.loaded.vocab_size,
                        eos=sorted(engine.loaded.eos_token_ids),
                    ),
                    ignore_eos=message.ignore_eos,
                )
                self._steering.start(stream.request, engine, start)
        self._streams[stream.request] = stream

    def _cancel(self, request: int, cancel: Cancel) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            end = Token(
                token=None,
                stream_id=waiting.stream.stream_id,
                logprob=None,
                finish_reason=cancel.reason,
            )
            waiting.stream.live = 0
            self._post_tokens([(waiting.stream, [end])])
            return
        stream = self._streams.get(request)
        engine = self._models.get(stream.model) if stream is not None else None
        if stream is not None and engine is not None:
            aborted = engine.abort(request, cancel.reason)
            ends = self._steering.ends_of(request)
            self._send([*ends, *self._steering.noted(request, aborted)])

    def _lost(self, lost: Lost) -> None:
        """Requests that have no controller any more end."""
        error = error_for(lost.code, lost.message, path=lost.path, retry_after_s=lost.retry_after_s)
        for request in lost.requests:
            stream = self._streams.get(request)
            if stream is not None:
                self._drop(request)
                self._bus.post(error_frames(stream, error))

    def _tokenizer(self, message: FromBus) -> None:
        """A controller worker asks for a tokenizer."""
        wanted: TokenizerRequest = decode_as(TokenizerRequest, message.body, "msgpack")
        loaded = (e.loaded for e in self._models.engines.values())
        found = next((m for m in loaded if m.fingerprint == wanted.fingerprint), None)
        json = tokenizer_json(found) if found is not None else None
        error = None
        if json is None:
            error = "the model has no tokenizer in the form of the tokenizers library"
        answer = TokenizerAnswer(fingerprint=wanted.fingerprint, error=error)
        head = encode_header(0, message.header.address)
        attachments = [json.encode()] if json is not None else []
        self._bus.post([b"TOKENIZER_JSON", head, encode_body(answer, "msgpack"), *attachments])

    def _drop(self, request: int) -> None:
        """Ends a stream that nobody waits for any more, without a word."""
        self._waiting.pop(request, None)
        stream = self._streams.pop(request, None)
        self._steering.forget(request)
        engine = self._models.get(stream.model) if stream is not None else None
        if engine is not None:
            engine.abort(request, "cancelled")

    # --- tokens ---------------------------------------------------------------------------------

    def _send(self, outputs: list[TokenOutput]) -> None:
        """Sends outputs, behind those that wait to be sent."""
        outputs, self._unsent = [*self._unsent, *outputs], []
        new: dict[int, tuple[Stream, list[Token]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request)
            if stream is None:
                continue
            stream.live += (output.parent is not None) - (output.finish_reason is not None)
            new.setdefault(output.request, (stream, []))[1].append(_entry(output, stream))
        self._tokens += len(outputs)
        self._post_tokens(list(new.values()))

    def _post_tokens(self, new: list[tuple[Stream, list[Token]]]) -> None:
        for stream, entries in new:
            stream.entries += entries
            if stream.live == 0:
                self._streams.pop(stream.request, None)
                self._steering.forget(stream.request)
                if stream.save:
                    self._bus.post(saved_buffer_frames(stream))
        frames = token_frames(new)
        if frames is not None:
            self._bus.post(frames)

    # --- models ---------------------------------------------------------------------------------

    def _load_events(self) -> None:
        while not self._models.events.empty():
            event = self._models.events.get()
            waiting = [w for w in self._waiting.values() if w.stream.model == event.model]
            match event:
                case Progress(model, part, stage):
                    if (stage, int(10 * part)) != self._logged:
                        self._logged = (stage, int(10 * part))
                        log.info("%s: %s (%d%%)", model, stage, round(100 * part))
                    for w in waiting:
                        self._notice(w.stream, "loading", f"{model}: {stage}", part)
                case Ready(model, engine):
                    for name in self._models.loaded(event):
                        log.info("%s unloaded", name)
                    log.info("%s ready on device %s", model, engine.loaded.device)
                    self._bus.changed()
                    self._release(waiting, _beginner(self._begin, engine))
                case Failed(model, error):
                    self._models.loaded(event)
                    log.error("%s", error)
                    if model == self._models.default and not self._models.engines:
                        self._failed = str(error)
                    refusal = RequestError(Code.MODEL_LOAD_FAILED, str(error), path="$.model")
                    self._release(waiting, _raiser(refusal))

    def _release(self, waiting: list[Waiting], begin: Callable[[Waiting], None]) -> None:
        for w in waiting:
            del self._waiting[w.stream.request]
            try:
                begin(w)
            except TokenbusError as error:
                self._bus.post(error_frames(w.stream, error))

    def _notice(self, stream: Stream, event: str, message: str, progress: float) -> None:
        notice = System(
            event="loading" if event == "loading" else "loaded",
            message=message,
            stream_id=stream.stream_id,
            model=stream.model,
            progress=round(progress, 3),
        )
        self._bus.post(message_frames(stream, b"SYSTEM", notice))

    # --- what the broker is told (on the bus thread) ----------------------------------------------

    def _registration(self) -> Register:
        live = [
            LiveRequest(request=s.request, session=s.session, stream_id=s.stream_id)
            for s in list(self._streams.values())
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
        )

    def _load(self) -> tuple[int, dict[str, float]]:
        now = time.monotonic()
        if now - self._rate_at >= 0.5:
            self._rate = self._tokens / (now - self._rate_at)
            self._tokens, self._rate_at = 0, now
        load = {"tokens_per_s": round(self._rate, 1), "loading": float(len(self._waiting))}
        for engine in list(self._models.engines.values()):
            for name, value in engine.stats().items():
                load[name] = load.get(name, 0.0) + value
        return len(self._streams) + len(self._waiting), load


def _entry(output: TokenOutput, stream: Stream) -> Token:
    return Token(
        token=output.token,
        stream_id=stream.stream_id,
        logprob=output.logprob,
        finish_reason=output.finish_reason,
        top_logprobs=UNSET if output.top_logprobs is None else dict(output.top_logprobs),
        pos=output.pos,
        seq=output.seq,
        text=UNSET if output.text is None else output.text,
        backtrack=output.backtrack,
        parent=output.parent,
        error=output.error,
        code=output.code,
        logs=output.logs,
        storage=list(output.storage),
        live=stream.live if output.finish_reason is not None else 0,
    )


def _beginner(
    begin: Callable[[Waiting, Engine], None], engine: Engine
) -> Callable[[Waiting], None]:
    return lambda waiting: begin(waiting, engine)


def _raiser(error: TokenbusError) -> Callable[[Waiting], None]:
    def refuse(_: Waiting) -> None:
        raise error

    return refuse


def _stream_id(body: bytes) -> int:
    """The stream of a request, which the broker has read already."""
    return int(decode_as(ModelInfoRequest, body).stream_id)
