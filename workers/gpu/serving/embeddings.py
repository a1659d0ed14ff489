"""Computes the vectors of EMBEDs. A batch may contain inputs of several requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class _Job:
    """An EMBED whose vectors are being computed."""

    stream: Stream
    engine: Engine
    inputs: list[list[int]]
    pooling: Pooling
    vectors: list[torch.Tensor] = field(default_factory=list)
    """The vectors that have been computed, in the order of ``inputs``."""


class Embeddings:
    """The EMBEDs of a worker. ``post`` sends frames over a link.

    Each ``step`` computes one batch of one model, so that EMBEDs and the steps of engines take
    turns.
    """

    def __init__(self, streams: LiveStreams, post: Callable[[Frames, int], None]) -> None:
        self._streams = streams
        self._post = post
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        """The jobs by request, in the order of their turns."""

    @property
    def has_work(self) -> bool:
        """Whether an EMBED waits for its vectors."""
        return bool(self._jobs)

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
        self._jobs[stream.request] = _Job(stream, engine, message.inputs, pooling)

    def pop(self, request: int) -> Stream | None:
        """Removes an EMBED without answering it. Returns its stream; None if the request is not an
        EMBED."""
        job = self._jobs.pop(request, None)
        return job.stream if job is not None else None

    def restart(self, engine: Engine) -> None:
        """Computes the vectors of a model's EMBEDs from the first input again, because the weights
        have changed. All vectors of an EMBED come from one version of the weights."""
        for job in self._jobs.values():
            if job.engine is engine:
                job.vectors.clear()

    def cancel(self, request: int) -> bool:
        """Ends an EMBED that was cancelled or took too long. Returns whether the request was an
        EMBED."""
        stream = self.pop(request)
        if stream is not None:
            error = RequestError(Code.TIMEOUT, "the embeddings were not computed in time")
            self._streams.fail(stream, error, "cancelling an EMBED")
        return stream is not None

    def step(self) -> None:
        """Computes the vectors of one batch, and answers the EMBEDs that are complete."""
        batch = self._batch()
        if not batch:
            return
        engine = batch[0][0].engine
        texts = [job.inputs[place] for job, place in batch]
        poolings = [job.pooling for job, _ in batch]
        try:
            vectors = engine.run(lambda: pooled(engine.loaded, texts, poolings))
        except Exception as error:
            for job in dict.fromkeys(job for job, _ in batch):
                self.pop(job.stream.request)
                self._streams.fail(job.stream, error, "computing embeddings")
            return
        for (job, _), vector in zip(batch, vectors, strict=True):
            job.vectors.append(vector)
        for job in dict.fromkeys(job for job, _ in batch):
            if len(job.vectors) == len(job.inputs):
                self._answer(job)

    def _batch(self) -> list[tuple[_Job, int]]:
        """The next inputs of one model, each as its job and its index in the job. If the batch is
        full, its last job moves to the end of the order of turns."""
        batch: list[tuple[_Job, int]] = []
        width = 0
        for job in self._jobs.values():
            if batch and batch[0][0].engine is not job.engine:
                continue
            for place in range(len(job.vectors), len(job.inputs)):
                width = max(width, len(job.inputs[place]))
                if batch and width * (len(batch) + 1) > MAX_BATCH_TOKENS:
                    self._jobs.move_to_end(batch[-1][0].stream.request)
                    return batch
                batch.append((job, place))
        return batch

    def _answer(self, job: _Job) -> None:
        vectors = torch.stack(job.vectors)
        content = vectors.numpy().astype("<f4").tobytes()
        found = Embedded(dimensions=vectors.shape[1], vectors=content, pooling=job.pooling)
        stream = job.stream
        del self._jobs[stream.request]
        answer = Msg(stream_id=stream.stream_id, embedded=found)
        self._post(message_frames(stream, b"MSG", answer, final=True), stream.link)
        logs.end(stream.request)


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
