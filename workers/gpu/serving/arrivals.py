"""Receives requests from the bus. Loads their models, tokenizes their texts, and then passes them
to their engines."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from ....protocol import logs
from ....protocol.bodies import decode_as
from ....protocol.errors import Code, RequestError
from ....protocol.header import Flag
from ....protocol.messages import (
    Cancel,
    Embed,
    ForwardPath,
    Generate,
    ModelInfoRequest,
    ModelTokenizerRequest,
    Msg,
    Score,
    System,
    Token,
    controller_of,
)
from ....protocol.structure import FREE_TEXT
from ....protocol.transcript import decode_transcript
from ....protocol.worker_messages import Start, VocabularyName
from ...bus import FromBus
from ..engine.engine import Continued, Engine
from ..model.models import Failed, LoadEvent, Models, Progress, Ready, model_info
from .embeddings import Embeddings
from .live_streams import LiveStreams
from .prompts import Tokens, request_texts
from .resumption import Resumed, Resumption, resume
from .steering import Steering
from .stored_bytes import ID_BYTES, decoded_bytes
from .streams import Frames, Move, Stream, message_frames
from .tokenization import MAX_INLINE_BYTES, Job, Tokenization
from .tokenizer_files import TokenizerAnswers

log = logging.getLogger(__name__)

Request = Generate | Score | ModelInfoRequest | ModelTokenizerRequest | Embed


@dataclass(slots=True)
class Waiting:
    """A request that waits until its model can be used, or until its texts have been tokenized."""

    stream: Stream
    message: Request
    attachments: list[bytes] = field(default_factory=list)
    sent: list[Token] | None = None
    """For a request that moved to this worker: the entries that its client has received."""
    attempt: int = 0
    """``Start.attempt`` of the request's controller: 0 if no worker has run the request before, and
    a new number if a worker has. Decisions for the earlier attempt may still arrive, and this
    number distinguishes them."""
    job: Job[Tokens] | None = None
    """The tokenization of the request's texts; None while the request waits for its model."""

    @property
    def resumption(self) -> Resumption | None:
        """The sequences of a stream that moved to this worker; None if the stream's client has not
        received anything."""
        return _resumption(self.message, self.sent or ())


class Arrivals:
    """Receives requests. ``post`` sends frames over the link to a broker. ``on_models`` is called
    when the set of loaded models has changed. When ``take_tokenized`` has work, another thread
    calls ``wake``.

    A request is passed to its engine, is refused, or waits until its model is loaded and its texts
    are tokenized. If anything fails, the request's client receives an ERROR, and all state of the
    request is removed.
    """

    def __init__(
        self,
        models: Models,
        streams: LiveStreams,
        steering: Steering,
        post: Callable[[Frames, int], None],
        on_models: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._models = models
        self._streams = streams
        self._steering = steering
        self._post = post
        self._on_models = on_models
        self.embeddings = Embeddings(streams, post)
        self._tokenizers = TokenizerAnswers()
        self._tokenization = Tokenization[Tokens](wake)
        self._waiting: dict[int, Waiting] = {}
        self._attempts = itertools.count(1)
        """Yields a new ``Start.attempt`` for each restarted controller."""
        self.held: set[str] = set()
        """Models that are paused or get new weights. New streams of these models wait. ``Rollouts``
        adds models, and removes them before it calls ``release``."""
        self._logged = ("", 0)
        """The stage of loading and the progress in tenths that were logged last."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait until their model is loaded or their texts are tokenized. An
        EMBED that waits for its vectors does not count."""
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        """Number of requests whose models are being loaded, are paused or get new weights."""
        return sum(waiting.job is None for waiting in list(self._waiting.values()))

    def stream(self, request: int) -> Stream | None:
        """The stream of a waiting request; None if the request does not wait here."""
        waiting = self._waiting.get(request)
        return waiting.stream if waiting is not None else self.embeddings.stream(request)

    def streams(self) -> list[Stream]:
        """The streams of the waiting requests; safe on another thread."""
        waiting = [waiting.stream for waiting in list(self._waiting.values())]
        return waiting + self.embeddings.streams()

    def request(self, message: FromBus, kind: type[Request]) -> None:
        """Receives a request. If this worker has an earlier attempt of the request, drops the
        earlier attempt without sending anything."""
        earlier = self._drop_earlier(message.header.request)
        stream = Stream.of(message.header, _stream_id(message.body), "", link=message.link)
        stream.type, stream.frames = message.type, [message.body, *message.attachments]
        try:
            request = decode_as(kind, message.body)
            if isinstance(request, Generate | Score | Embed):
                logs.begin(stream.request, request.request_id, request.trace)
                stream.trace = request.trace
                stream.operation = "score" if isinstance(request, Score) else stream.operation
                stream.client = client_of(stream.session, request)
                stream.decoded_bytes = decoded_bytes(request, len(message.body))
            waiting = Waiting(stream, request, message.attachments)
            moved = message.header.flags & Flag.MOVED
            # If a request has moved, this worker may already have run an earlier attempt and
            # dropped it.
            waiting.attempt = next(self._attempts) if earlier or moved else 0
            if moved:
                _take_transcript(waiting)
            if isinstance(request, Generate | Score | Embed):
                self._streams.store(stream)
            self._take(waiting)
        except Exception as error:
            self._pop(stream.request)
            self._streams.fail(stream, error, "starting this request")

    def take_tokenized(self) -> None:
        """Passes requests whose texts have been tokenized to their engines. If the model of a
        request was unloaded, is paused or gets new weights, the request waits again."""
        done = self._tokenization.done
        while not done.empty():
            job = done.get()
            waiting = self._waiting.get(job.request)
            if waiting is None or waiting.job is not job:
                continue
            del self._waiting[job.request]
            waiting.job = None
            try:
                engine = self._models.get(waiting.stream.model)
                if engine is None or self._holds(waiting):
                    self._take(waiting)
                else:
                    self._run(waiting, engine, job.result())
            except Exception as error:
                self._streams.fail(waiting.stream, error, "starting this request")

    def cancel(self, request: int, cancel: Cancel) -> bool:
        """Ends a waiting request. Returns whether the request was waiting here."""
        waiting = self._pop(request)
        if waiting is None:
            return self.embeddings.cancel(request)
        resumption = waiting.resumption
        live = resumption.live if resumption is not None else [Resumed(0)]
        ends = [
            Token(
                token=None,
                stream_id=waiting.stream.stream_id,
                logprob=None,
                finish_reason=cancel.reason,
                pos=one.num_sent,
                seq=one.seq,
                live=len(live) - number,
            )
            for number, one in enumerate(live, 1)
        ]
        self._streams.send_end(waiting.stream, ends)
        return True

    def drop(self, request: int) -> None:
        """Drops a waiting request without sending anything."""
        stream = self._remove(request)
        if stream is not None:
            self._streams.forget(stream)
            logs.end(request)

    def _drop_earlier(self, number: int) -> bool:
        """Drops an earlier attempt of a request without sending anything. Returns whether this
        worker had an earlier attempt."""
        self.drop(number)
        if self._streams.get(number) is None and self._streams.kept(number) is None:
            return False
        log.info("request %d has arrived again: its earlier attempt is dropped", number)
        self._streams.drop(number)
        return True

    def fail(self, request: int, error: Exception, doing: str) -> bool:
        """Ends a waiting request with an ERROR. Returns whether the request was waiting here."""
        stream = self._remove(request)
        if stream is not None:
            self._streams.fail(stream, error, doing)
        return stream is not None

    def _remove(self, request: int) -> Stream | None:
        """Removes a waiting request or an EMBED; returns its stream. Returns None if the request
        does not wait here."""
        waiting = self._pop(request)
        return waiting.stream if waiting is not None else self.embeddings.pop(request)

    def _pop(self, request: int) -> Waiting | None:
        """Removes a waiting request and drops its tokenization."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None and waiting.job is not None:
            self._tokenization.drop(waiting.job)
        return waiting

    # --- one request ----------------------------------------------------------------------------

    def _take(self, waiting: Waiting) -> None:
        stream, request = waiting.stream, waiting.message
        stream.model, stream.adapter = self._models.split(request.model or self._models.default)
        if not stream.model:
            raise RequestError(
                Code.UNKNOWN_MODEL,
                "the request does not name a model, and this worker has no default model; name one",
                path="$.model",
            )
        engine = self._models.get(stream.model)
        if engine is None:
            self._models.want(stream.model)
            self._waiting[stream.request] = waiting
            self._notice(stream, f"loading {stream.model}", 0.0)
        elif self._holds(waiting):
            self._waiting[stream.request] = waiting
            what = f"{stream.model} is paused, or gets new weights"
            notice = System(
                event="queued", message=what, stream_id=stream.stream_id, model=stream.named
            )
            self._post(message_frames(stream, b"SYSTEM", notice), stream.link)
        else:
            self._begin(waiting, engine)

    def _holds(self, waiting: Waiting) -> bool:
        """Whether a request waits because its model is in ``held``."""
        return waiting.stream.model in self.held and isinstance(waiting.message, Generate | Score)

    def _begin(self, waiting: Waiting, engine: Engine) -> None:
        """Answers a request for the model's info or tokenizer, or begins an EMBED. Passes any other
        request to its engine after its texts have been tokenized. Raises TokenbusError if the
        request is not valid."""
        stream, message = waiting.stream, waiting.message
        if isinstance(message, ModelInfoRequest):
            answer = Msg(stream_id=stream.stream_id, model_info=model_info(engine, stream.adapter))
            self._post(message_frames(stream, b"MSG", answer, final=True), stream.link)
            return
        if isinstance(message, ModelTokenizerRequest):
            self._post(self._tokenizers.frames(stream, engine.loaded), stream.link)
            return
        if isinstance(message, Embed):
            if stream.adapter:
                raise RequestError(
                    Code.UNSUPPORTED,
                    f"the LoRA adapter {stream.adapter!r} does not give embeddings; use the model "
                    f"{stream.model!r}",
                    path="$.model",
                )
            self.embeddings.add(stream, engine, message)
            return
        loaded = engine.loaded
        texts = request_texts(message, waiting.attachments, loaded, engine.max_length)
        num_bytes = texts.check()
        if num_bytes <= MAX_INLINE_BYTES:
            self._run(waiting, engine, texts.tokens())
            return
        waiting.job = Job(stream.request, stream.client, num_bytes, texts.tokens)
        self._waiting[stream.request] = waiting
        self._tokenization.submit(waiting.job)

    def _run(self, waiting: Waiting, engine: Engine, tokens: Tokens) -> None:
        """Passes a request to its engine. Raises TokenbusError if the request is not valid."""
        stream, message, prompt = waiting.stream, waiting.message, tokens.prompt
        assert isinstance(message, Generate | Score)
        if isinstance(message, Generate) and message.heal_prompt:
            message = waiting.message = _with_controller(message)
            stream.healed = engine.healed(prompt)
            prompt = prompt if stream.healed is None else prompt[:-1]
        resumption = waiting.resumption
        if resumption is not None and not resumption.live:
            stream.prompt = prompt
            stream.save = message.save if isinstance(message, Generate) else None
            self._streams.finish(stream)
            return
        path = engine.path_of(stream.adapter)
        _check_adapter(stream, waiting.sent or (), path)
        stream.compute_by(path)
        stream.decoded_bytes += ID_BYTES * (len(prompt) + len(tokens.scored))
        common = {"priority": message.priority, "client": stream.client}
        if isinstance(message, Score):
            stream.usage = engine.score(
                stream.request,
                prompt,
                tokens.scored,
                text=message.text,
                top_logprobs=message.top_logprobs,
                num_scored=len(waiting.sent or ()),
                adapter=stream.adapter,
                **common,
            )
        else:
            stream.save, stream.prompt, stream.message = message.save, prompt, message
            self._generate(stream, message, engine, resumption, waiting.attempt)
        self._streams.add(stream)

    def _generate(
        self,
        stream: Stream,
        message: Generate,
        engine: Engine,
        resumption: Resumption | None,
        attempt: int = 0,
    ) -> None:
        """Begins a generation or resumes one. ``attempt``: ``Start.attempt`` of a restarted
        controller."""
        steered = message.controller is not None
        # The controller handles end-of-sequence tokens, and makes the forks itself.
        sampling = msgspec.structs.replace(message, ignore_eos=True, n=1) if steered else message
        stream.live, continued = sampling.n, None
        if resumption is not None:
            stream.live = len(resumption.live)
            generated = {one.seq: one.tokens for one in resumption.live}
            num_drops = {one.seq: one.num_drops for one in resumption.live}
            prompts = {one.seq: one.prompt for one in resumption.live if one.prompt}
            continued = Continued(generated, len(resumption.sequences), num_drops, prompts)
        stream.usage = engine.add(
            stream.request,
            stream.prompt,
            sampling,
            text=message.text,
            inspect=message.inspect,
            speculate=not steered,
            priority=message.priority,
            client=stream.client,
            continued=continued,
            healed=stream.healed,
            adapter=stream.adapter,
        )
        if steered:
            start = _start(message, stream, engine)
            start.attempt = attempt
            given = None
            if resumption is not None:
                start.replay, given = resumption.replay, resumption.given
            self._steering.start(stream.request, engine, start, given, stream.link)

    def start_again(self, stream: Stream, left: str, why: str) -> None:
        """Restarts the controller of a live stream after the controller was lost. Does nothing if
        the stream has no controller. Tokens that were computed but not sent are dropped and
        computed again. ``left``: the lost controller worker. ``why``: the reason, for the
        client."""
        message = stream.message
        if message is None or message.controller is None:
            return
        engine = self._models.engines[stream.model]
        self._steering.forget(stream.request)
        engine.abort(stream.request)
        sent = self._streams.sent(stream)
        stream.move = stream.move or Move(left, why, time.monotonic())
        resumption = _resumption(message, sent)
        self._generate(stream, message, engine, resumption, next(self._attempts))

    # --- models ---------------------------------------------------------------------------------

    def on_load_event(self, event: LoadEvent) -> str | None:
        """Handles an event of loading a model. If the default model could not be loaded, the worker
        cannot serve at all, and this method returns the reason. In all other cases, it returns
        None."""
        loading = [w for w in self._waiting.values() if w.job is None]
        waiting = [w for w in loading if w.stream.model == event.model]
        match event:
            case Progress(model, part, stage):
                if (stage, int(10 * part)) != self._logged:
                    self._logged = (stage, int(10 * part))
                    log.info("%s: %s (%d%%)", model, stage, round(100 * part))
                for w in waiting:
                    self._notice(w.stream, f"{model}: {stage}", part)
            case Ready(model, engine):
                self._models.loaded(event)
                log.info("%s ready on device %s", model, engine.loaded.device)
                self.evict()
                self._on_models()
                self._begin_all([w for w in waiting if not self._holds(w)], engine)
            case Failed(model, error):
                self._models.loaded(event)
                log.error("%s", error)
                refusal = RequestError(Code.MODEL_LOAD_FAILED, str(error), path="$.model")
                self.fail_model(model, refusal)
                if model == self._models.default and not self._models.engines:
                    return str(error)
        return None

    def release(self, model: str) -> None:
        """Begins the requests that have waited because ``model`` was in ``held``."""
        engine = self._models.get(model)
        if engine is not None:
            waiting = self._waiting.values()
            loading = [w for w in waiting if w.job is None and w.stream.model == model]
            self._begin_all(loading, engine)

    def _begin_all(self, waiting: list[Waiting], engine: Engine) -> None:
        for w in waiting:
            del self._waiting[w.stream.request]
            try:
                self._begin(w, engine)
            except Exception as error:
                self._streams.fail(w.stream, error, "starting this request")

    def evict(self) -> None:
        """If more models are loaded than allowed, unloads idle models."""
        # A stream uses its model until its last output. The engine may not have returned this
        # output yet.
        used = {stream.model for stream in (*self._streams, *self.streams())}
        evicted = self._models.evict(used)
        for name in evicted:
            log.info("%s unloaded", name)
        if evicted:
            self._on_models()

    def fail_model(self, model: str, error: Exception) -> None:
        """Sends an ERROR to all requests that wait for a model, and ends them."""
        for w in [w for w in self._waiting.values() if w.stream.model == model]:
            self.fail(w.stream.request, error, "loading its model")

    def _notice(self, stream: Stream, message: str, progress: float) -> None:
        notice = System(
            event="loading",
            message=message,
            stream_id=stream.stream_id,
            model=stream.named,
            progress=round(progress, 3),
        )
        self._post(message_frames(stream, b"SYSTEM", notice), stream.link)


def client_of(session: int, message: Generate | Score | Embed) -> int:
    """Returns a number that identifies the client of a request. The engine shares its slots fairly
    among clients. If the request has a ``group``, the client is the user ``by`` (possibly empty) of
    this group of sessions. If it has only ``by``, the client is the user ``by`` of the session. If
    it has neither, the client is the session."""
    if not message.by and not message.group:
        return session
    owner = message.group or str(session)
    digest = blake2b(f"{owner}\0{message.by}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _with_controller(message: Generate) -> Generate:
    """If a request has ``heal_prompt`` but does not name a controller, adds a controller that
    allows any text, because controllers apply the healing."""
    if message.controller:
        return message
    name = controller_of(message.controller, message.heal_prompt)
    return msgspec.structs.replace(message, controller=name, controller_arg=FREE_TEXT)


def _start(message: Generate, stream: Stream, engine: Engine) -> Start:
    assert message.controller is not None
    return Start(
        controller=message.controller,
        arg=message.controller_arg,
        prompt=stream.prompt,
        healed=stream.healed,
        n=message.n,
        max_tokens=min(message.max_tokens, engine.max_length - len(stream.prompt)),
        model=stream.named,
        vocabulary=VocabularyName(
            fingerprint=engine.loaded.fingerprint,
            size=engine.loaded.vocab_size,
            eos=sorted(engine.loaded.eos_token_ids),
            special=engine.loaded.special_tokens,
        ),
        ignore_eos=message.ignore_eos,
        inspect=message.inspect,
        trace=message.trace,
        request_id=message.request_id,
        reads_usual=True,
        takes_runs=True,
    )


def _resumption(message: Request, sent: Collection[Token]) -> Resumption | None:
    if not sent or not isinstance(message, Generate | Score):
        return None
    if isinstance(message, Score):
        return resume(sent)
    steered = message.controller is not None
    return resume(sent, 1 if steered else message.n, steered)


def _check_adapter(stream: Stream, sent: Iterable[Token], path: ForwardPath) -> None:
    """Raises RequestError if a moved stream has tokens from another LoRA adapter with the same
    name. The broker compares the adapters of workers. But while a worker loads its model, it has
    not reported its adapters yet."""
    spans = {entry.span.weights.partition("+")[2] for entry in sent if entry.span is not None}
    if spans - {path.weights.partition("+")[2]}:
        raise RequestError(
            Code.UNKNOWN_MODEL,
            f"the LoRA adapter {stream.adapter!r} of the worker at which this stream continues "
            "differs from the adapter with which the stream began; give all workers equal adapters",
            path="$.model",
        )


def _take_transcript(waiting: Waiting) -> None:
    """Decodes the entries that the client of a moved request has received, and restores the
    request's stream from them."""
    if not waiting.attachments:
        raise RequestError(
            Code.BAD_MESSAGE,
            "the moved request has no transcript; expected a transcript as the last attachment",
        )
    *waiting.attachments, last = waiting.attachments
    del waiting.stream.frames[-1]
    transcript = decode_transcript(last)
    stream, waiting.sent = waiting.stream, transcript.entries
    since = stream.received - transcript.pause_s
    move = Move(transcript.left, transcript.why, since)
    stream.restore(waiting.sent, move, transcript.moves)


def _stream_id(body: bytes) -> int:
    """The stream id in a request's body, which the broker has validated."""
    return int(decode_as(ModelInfoRequest, body).stream_id)
