"""Computes the vectors of EMBED requests. A batch may contain inputs of several requests.

Sessions take turns, and so do the users of a session. All streams of the worker wait while a batch
is computed. So the number of tokens of a batch is bounded, depending on the measured time of the
model's earlier batches. An input above the bound is computed in chunks if the model is causal, one
chunk in each step, and other inputs have their turns between the chunks. Encoders refuse long
inputs, because every state of an encoder depends on the whole input.

An input that is computed in chunks has a KV cache. The worker computes at most one such input of
each *length class* at a time. The longest inputs of a class are less than twice as long as its
shortest inputs. So an input never waits for the end of another user's much longer input, and all
caches together have less than twice as many tokens as the longest input.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from ....protocol import logs
from ....protocol.errors import Code, RequestError
from ....protocol.messages import Embed, Embedded, Msg, Pooling
from ..engine.engine import Engine
from ..model.loader import LoadedModel
from ..model.pooling import (
    ChunkedText,
    check_poolable,
    pool_chunk,
    pooled,
    pooling_of,
    vector_bytes,
)
from .live_streams import LiveStreams
from .streams import Frames, Stream, message_frames

MAX_BATCH_TOKENS = 8192
"""Maximum number of tokens of a batch, with padding, and of an input of an encoder."""
MAX_WIDTH = 2048
"""Maximum number of tokens of an input that a causal model computes in one batch. The time of
attention grows with the square of this number, so the time of shorter inputs does not predict it.
"""
MAX_CPU_ENCODER_TOKENS = 2048
"""Maximum number of tokens of an input of an encoder on a CPU."""
FIRST_BATCH_TOKENS = 512
"""Maximum number of tokens of a model's first batch, whose time cannot be estimated."""
MIN_BATCH_TOKENS = 16
"""Number of tokens that a batch may always have. With fewer tokens, a batch takes about as long,
because its time is bound by reading the weights."""
BATCH_S = 0.05
"""Time that a batch should take at most if other requests wait for it, in seconds."""
IDLE_BATCH_S = 0.5
"""Time that a batch should take at most when the engines are idle, in seconds. Requests that arrive
during the batch wait for its end."""
IDLE_AFTER_S = 1.0
"""The engines count as idle after this time without a step, in seconds. Clients that send one
request after another leave shorter pauses."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    """An EMBED whose vectors are being computed."""

    stream: Stream
    user: str
    engine: Engine
    inputs: list[list[int]]
    pooling: Pooling
    vectors: list[torch.Tensor] = field(default_factory=list)
    """The vectors that have been computed, in the order of ``inputs``."""


@dataclass(slots=True)
class _Bounds:
    """The maximum numbers of tokens of a model's batches."""

    busy: int = FIRST_BATCH_TOKENS
    """The bound if an engine has requests, or has run a step in the last ``IDLE_AFTER_S``."""
    idle: int = FIRST_BATCH_TOKENS
    """The bound if the engines are idle."""

    def of(self, busy: bool) -> int:
        """The bound of the next batch."""
        return self.busy if busy else self.idle

    def measure(self, tokens: int, seconds: float) -> None:
        """Adapts the bounds to the time that a batch took."""
        self.busy = _adapted(self.busy, tokens, seconds, BATCH_S)
        self.idle = _adapted(self.idle, tokens, seconds, IDLE_BATCH_S)


@dataclass(slots=True)
class _LongInput:
    """The next input of a job, which is computed in chunks."""

    job: _Job
    text: ChunkedText
    bounds: _Bounds
    """The bounds of the chunks. They are separate from the model's bounds, because the time of a
    token grows with the number of tokens before it."""


def _length_class(text: list[int]) -> int:
    """The length class of an input that is computed in chunks."""
    return len(text).bit_length()


class _Turns:
    """The jobs in the order of their turns. A user's jobs are computed in the order of their
    arrival."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, OrderedDict[str, dict[int, _Job]]] = OrderedDict()
        """The jobs by session, user and request; the next session or user comes first."""

    def __iter__(self) -> Iterator[_Job]:
        sessions = self._sessions.values()
        return _interleaved(
            _interleaved(jobs.values() for jobs in users.values()) for users in sessions
        )

    def add(self, job: _Job) -> None:
        """Adds a job after the earlier jobs of its user."""
        users = self._sessions.setdefault(job.stream.session, OrderedDict())
        users.setdefault(job.user, {})[job.stream.request] = job

    def remove(self, job: _Job) -> None:
        """Removes a job."""
        users = self._sessions[job.stream.session]
        jobs = users[job.user]
        del jobs[job.stream.request]
        if not jobs:
            del users[job.user]
        if not users:
            del self._sessions[job.stream.session]

    def end_turn(self, job: _Job) -> None:
        """Moves a job's session, and the job's user within the session, to the end of the order.
        Called after inputs of the job were taken."""
        self._sessions[job.stream.session].move_to_end(job.user)
        self._sessions.move_to_end(job.stream.session)


class Embeddings:
    """The EMBEDs of a worker. ``post`` sends frames over a link.

    Each ``step`` computes one batch of one model, so that EMBEDs and the steps of engines take
    turns.
    """

    def __init__(
        self,
        streams: LiveStreams,
        post: Callable[[Frames, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._post = post
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        """The jobs by request."""
        self._turns = _Turns()
        self._bounds: WeakKeyDictionary[Engine, _Bounds] = WeakKeyDictionary()
        self._long: dict[int, _LongInput] = {}
        """The inputs that are being computed in chunks, by length class. Other long inputs of their
        classes wait."""
        self._due_at = 0.0
        self._idle_at = 0.0
        """The time at which the engines count as idle if they do not run another step."""

    @property
    def has_work(self) -> bool:
        """Whether an EMBED waits for its vectors."""
        return bool(self._jobs)

    @property
    def due(self) -> bool:
        """Whether at least as much time has passed since the last batch as that batch took. The
        engines run their steps in this time, so EMBEDs take at most half of the worker's time."""
        return self._clock() >= self._due_at

    def note_step(self) -> None:
        """Records that an engine has run a step."""
        self._idle_at = self._clock() + IDLE_AFTER_S

    def stream(self, request: int) -> Stream | None:
        """The stream of a waiting EMBED; None if the request is not an EMBED."""
        job = self._jobs.get(request)
        return job.stream if job is not None else None

    def streams(self) -> list[Stream]:
        """The streams of all waiting EMBEDs; safe on another thread."""
        return [job.stream for job in list(self._jobs.values())]

    def add(self, stream: Stream, engine: Engine, message: Embed) -> None:
        """Receives an EMBED. Raises RequestError if the model or an input is not suitable, and
        UnavailableError if the vectors would exceed the client's share of memory."""
        loaded = engine.loaded
        check_poolable(loaded)
        for number, tokens in enumerate(message.inputs):
            _check(loaded, number, tokens)
        stream.decoded_bytes += len(message.inputs) * vector_bytes(loaded)
        self._streams.store(stream)
        pooling = message.pooling or pooling_of(loaded)
        job = _Job(stream, message.by, engine, message.inputs, pooling)
        self._jobs[stream.request] = job
        self._turns.add(job)

    def pop(self, request: int) -> Stream | None:
        """Removes an EMBED without answering it. Returns its stream; None if the request is not an
        EMBED."""
        job = self._jobs.pop(request, None)
        if job is None:
            return None
        self._turns.remove(job)
        self._drop_long(lambda other: other is job)
        return job.stream

    def restart(self, engine: Engine) -> None:
        """Computes the vectors of a model's EMBEDs from the first input again, because the weights
        have changed. All vectors of an EMBED come from one version of the weights."""
        for job in self._jobs.values():
            if job.engine is engine:
                job.vectors.clear()
        self._drop_long(lambda job: job.engine is engine)

    def cancel(self, request: int) -> bool:
        """Called when a request was cancelled or took too long. If the request is an EMBED, ends it
        with an ERROR ``timeout``. Returns whether the request was an EMBED."""
        stream = self.pop(request)
        if stream is not None:
            error = RequestError(Code.TIMEOUT, "the embeddings were not computed in time")
            self._streams.fail(stream, error, "cancelling an EMBED")
        return stream is not None

    def step(self, busy: bool) -> None:
        """Computes the vectors of one batch, or one chunk of a long input, and answers the EMBEDs
        that are complete. ``busy``: whether an engine has requests, which wait for the batch."""
        busy = busy or self._clock() < self._idle_at
        job = next((job for job in self._turns if self._may_run(job, busy)), None)
        if job is None:
            return
        if self._is_long(job, busy):
            self._compute_chunk(job, busy)
        else:
            self._compute_batch(self._batch(busy))

    def _compute_batch(self, batch: list[tuple[_Job, int]]) -> None:
        """Computes the vectors of inputs, which are pairs of a job and the input's index."""
        engine = batch[0][0].engine
        texts = [job.inputs[place] for job, place in batch]
        poolings = [job.pooling for job, _ in batch]
        jobs = list(dict.fromkeys(job for job, _ in batch))
        found = self._computed(jobs, lambda: pooled(engine.loaded, texts, poolings))
        if found is None:
            return
        vectors, seconds = found
        tokens = len(texts) * max(map(len, texts))
        self._bounds.setdefault(engine, _Bounds()).measure(tokens, seconds)
        for (job, _), vector in zip(batch, vectors, strict=True):
            job.vectors.append(vector)
        self._answer_complete(jobs)

    def _compute_chunk(self, job: _Job, busy: bool) -> None:
        """Computes the next chunk of a job's long input."""
        tokens = job.inputs[len(job.vectors)]
        length_class = _length_class(tokens)
        if length_class not in self._long:
            text = ChunkedText(tokens, job.pooling)
            bounds = self._bounds.get(job.engine, _Bounds())
            own = _Bounds(min(bounds.busy, MAX_WIDTH), min(bounds.idle, MAX_WIDTH))
            self._long[length_class] = _LongInput(job, text, own)
        text, bounds = self._long[length_class].text, self._long[length_class].bounds
        start, bound = text.num_computed_tokens, bounds.of(busy)
        found = self._computed([job], lambda: pool_chunk(job.engine.loaded, text, bound))
        if found is None:
            return
        vector, seconds = found
        bounds.measure(text.num_computed_tokens - start, seconds)
        if vector is not None:
            del self._long[length_class]
            job.vectors.append(vector[0])
            self._answer_complete([job])

    def _computed(self, jobs: list[_Job], compute: Callable[[], T]) -> tuple[T, float] | None:
        """The result of computing inputs of these jobs, which end their turns, and its time in
        seconds. If the computation fails, ends the jobs and returns None."""
        for job in jobs:
            self._turns.end_turn(job)
        engine = jobs[0].engine
        try:
            result, seconds = engine.run(lambda: self._timed(engine.loaded, compute))
        except Exception as error:
            for job in jobs:
                self.pop(job.stream.request)
                self._streams.fail(job.stream, error, "computing embeddings")
            return None
        self._due_at = self._clock() + seconds
        return result, seconds

    def _timed(self, loaded: LoadedModel, compute: Callable[[], T]) -> tuple[T, float]:
        """The result of ``compute``, and the time in seconds to compute it. This time does not
        include the forwards that were launched before."""
        if loaded.device.type == "cuda":
            torch.cuda.current_stream(loaded.device).synchronize()
        began = self._clock()
        result = compute()
        return result, self._clock() - began

    def _is_long(self, job: _Job, busy: bool) -> bool:
        """Whether the next input of a job is computed in chunks."""
        if self._runs(job):
            return True
        return self._above(job, len(job.vectors), busy)

    def _above(self, job: _Job, place: int, busy: bool) -> bool:
        """Whether an input of a job is too long for one batch."""
        bound = self._bounds.get(job.engine, _Bounds()).of(busy)
        return job.engine.loaded.causal and len(job.inputs[place]) > min(bound, MAX_WIDTH)

    def _may_run(self, job: _Job, busy: bool) -> bool:
        """Whether the next input of a job does not wait for the long input of another job."""
        waits = _length_class(job.inputs[len(job.vectors)]) in self._long
        return not waits or self._runs(job) or not self._is_long(job, busy)

    def _runs(self, job: _Job) -> bool:
        """Whether the next input of a job is being computed in chunks."""
        return any(long.job is job for long in self._long.values())

    def _drop_long(self, wanted: Callable[[_Job], bool]) -> None:
        """Discards the chunks of long inputs whose jobs are ``wanted``."""
        self._long = {k: long for k, long in self._long.items() if not wanted(long.job)}

    def _batch(self, busy: bool) -> list[tuple[_Job, int]]:
        """The next inputs of one model, as pairs of a job and the input's index in the job. Each
        job, in the order of the turns, adds inputs until the batch is full. Jobs whose next input
        is long are left out."""
        batch: list[tuple[_Job, int]] = []
        width = bound = 0
        for job in self._turns:
            if self._is_long(job, busy):
                continue
            if not batch:
                bound = self._bounds.get(job.engine, _Bounds()).of(busy)
            elif batch[0][0].engine is not job.engine:
                continue
            for place in range(len(job.vectors), len(job.inputs)):
                width = max(width, len(job.inputs[place]))
                if batch and (width * (len(batch) + 1) > bound or self._above(job, place, busy)):
                    return batch
                batch.append((job, place))
        return batch

    def _answer_complete(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if len(job.vectors) == len(job.inputs):
                self._answer(job)

    def _answer(self, job: _Job) -> None:
        vectors = torch.stack(job.vectors)
        content = vectors.numpy().astype("<f4").tobytes()
        found = Embedded(dimensions=vectors.shape[1], vectors=content, pooling=job.pooling)
        stream = job.stream
        self.pop(stream.request)
        self._streams.forget(stream)
        answer = Msg(stream_id=stream.stream_id, embedded=found)
        self._post(message_frames(stream, b"MSG", answer, final=True), stream.link)
        logs.end(stream.request)


def _interleaved(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """The first item of each group, then the second item of each, and so on."""
    return (item for turn in zip_longest(*groups) for item in turn if item is not None)


def _adapted(bound: int, tokens: int, seconds: float, limit_s: float) -> int:
    """The maximum number of tokens of batches that take at most ``limit_s``, after a batch of
    ``tokens`` took ``seconds``. ``bound``: the maximum so far."""
    if 2 * seconds <= limit_s:
        bound = max(bound, 2 * tokens)
    else:
        fitting = int(tokens * limit_s / seconds)
        bound = fitting if seconds > limit_s else max(bound, fitting)
    return min(max(bound, MIN_BATCH_TOKENS), MAX_BATCH_TOKENS)


def _check(loaded: LoadedModel, number: int, tokens: list[int]) -> None:
    path = f"$.inputs[{number}]"
    if len(tokens) > loaded.context_length:
        raise RequestError(
            Code.PROMPT_TOO_LONG,
            f"the input has {len(tokens)} tokens; {loaded.name} takes at most "
            f"{loaded.context_length}",
            path=path,
        )
    on_cpu = loaded.device.type == "cpu"
    most = MAX_CPU_ENCODER_TOKENS if on_cpu else MAX_BATCH_TOKENS
    if not loaded.causal and len(tokens) > most:
        raise RequestError(
            Code.PROMPT_TOO_LONG,
            f"the input has {len(tokens)} tokens; an encoder{' on a CPU' if on_cpu else ''} takes "
            f"at most {most}; send the text in parts",
            path=path,
        )
    wrong = next((token for token in tokens if token >= loaded.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            Code.TOKEN_OUT_OF_RANGE,
            f"the token id {wrong} is not in the vocabulary; use ids below {loaded.vocab_size}",
            path=path,
        )
