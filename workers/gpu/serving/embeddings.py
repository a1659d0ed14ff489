"""Computes the vectors of EMBED requests. A batch may contain inputs of several requests.

Sessions take turns, and so do the users of a session. All streams of the worker wait while a batch
is computed. So the number of tokens of a batch is bounded, depending on the measured time of the
model's earlier batches.
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
from ..model.pooling import check_poolable, pooled, pooling_of
from .live_streams import LiveStreams
from .streams import Frames, Stream, message_frames

MAX_BATCH_TOKENS = 8192
"""Maximum number of tokens of a batch, with padding. A batch of one input may have more."""
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

    def measure(self, tokens: int, seconds: float) -> None:
        """Adapts the bounds to the time that a batch took."""
        self.busy = _adapted(self.busy, tokens, seconds, BATCH_S)
        self.idle = _adapted(self.idle, tokens, seconds, IDLE_BATCH_S)


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
        """Receives an EMBED. Raises RequestError if the model or an input is not suitable."""
        loaded = engine.loaded
        check_poolable(loaded)
        for number, tokens in enumerate(message.inputs):
            _check(loaded, number, tokens)
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
        return job.stream

    def restart(self, engine: Engine) -> None:
        """Computes the vectors of a model's EMBEDs from the first input again, because the weights
        have changed. All vectors of an EMBED come from one version of the weights."""
        for job in self._jobs.values():
            if job.engine is engine:
                job.vectors.clear()

    def cancel(self, request: int) -> bool:
        """Called when a request was cancelled or took too long. If the request is an EMBED, ends it
        with an ERROR ``timeout``. Returns whether the request was an EMBED."""
        stream = self.pop(request)
        if stream is not None:
            error = RequestError(Code.TIMEOUT, "the embeddings were not computed in time")
            self._streams.fail(stream, error, "cancelling an EMBED")
        return stream is not None

    def step(self, busy: bool) -> None:
        """Computes the vectors of one batch, and answers the EMBEDs that are complete. ``busy``:
        whether an engine has requests, which wait for the batch."""
        batch = self._batch(busy or self._clock() < self._idle_at)
        if not batch:
            return
        engine = batch[0][0].engine
        texts = [job.inputs[place] for job, place in batch]
        poolings = [job.pooling for job, _ in batch]
        jobs = list(dict.fromkeys(job for job, _ in batch))
        for job in jobs:
            self._turns.end_turn(job)
        try:
            vectors, seconds = engine.run(lambda: self._timed(engine.loaded, texts, poolings))
        except Exception as error:
            for job in jobs:
                self.pop(job.stream.request)
                self._streams.fail(job.stream, error, "computing embeddings")
            return
        tokens = len(texts) * max(map(len, texts))
        self._bounds.setdefault(engine, _Bounds()).measure(tokens, seconds)
        self._due_at = self._clock() + seconds
        for (job, _), vector in zip(batch, vectors, strict=True):
            job.vectors.append(vector)
        for job in jobs:
            if len(job.vectors) == len(job.inputs):
                self._answer(job)

    def _timed(
        self, loaded: LoadedModel, texts: list[list[int]], poolings: list[Pooling]
    ) -> tuple[torch.Tensor, float]:
        """The vectors of a batch, and the time in seconds to compute them. This time does not
        include the forwards that were launched before."""
        if loaded.device.type == "cuda":
            torch.cuda.current_stream(loaded.device).synchronize()
        began = self._clock()
        vectors = pooled(loaded, texts, poolings)
        return vectors, self._clock() - began

    def _batch(self, busy: bool) -> list[tuple[_Job, int]]:
        """The next inputs of one model, as pairs of a job and the input's index in the job. Each
        job, in the order of the turns, adds inputs until the batch is full."""
        batch: list[tuple[_Job, int]] = []
        width = bound = 0
        for job in self._turns:
            if not batch:
                bounds = self._bounds.get(job.engine, _Bounds())
                bound = bounds.busy if busy else bounds.idle
            elif batch[0][0].engine is not job.engine:
                continue
            for place in range(len(job.vectors), len(job.inputs)):
                width = max(width, len(job.inputs[place]))
                if batch and width * (len(batch) + 1) > bound:
                    return batch
                batch.append((job, place))
        return batch

    def _answer(self, job: _Job) -> None:
        vectors = torch.stack(job.vectors)
        content = vectors.numpy().astype("<f4").tobytes()
        found = Embedded(dimensions=vectors.shape[1], vectors=content, pooling=job.pooling)
        stream = job.stream
        self.pop(stream.request)
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
    wrong = next((token for token in tokens if token >= loaded.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            Code.TOKEN_OUT_OF_RANGE,
            f"the token id {wrong} is not in the vocabulary; use ids below {loaded.vocab_size}",
            path=path,
        )
