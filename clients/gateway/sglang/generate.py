"""``POST /generate``: continues token ids or texts, in SGLang's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import TokenbusError
from ... import GeneratedSequence
from ..bodies.reading import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.endings import check_some_succeeded, receipt_of
from ..errors import from_tokenbus
from ..events import DONE, event
from ..generation.counter import Counter, check_alternatives, compose
from ..generation.generations import Generations
from ..generation.respond import respond
from ..models import ServedModel
from ..new_ids import new_id
from ..openai.choices import Indexes
from ..openai.logprobs import reported
from ..openai.token_fields import spans_of
from .answers import Generated, MetaInfo, PromptLogprobs, Reports, finish_of
from .bodies import GenerateRequest, Prompt, SamplingParams

GROWTH = 16
"""Bounds the size of a stream, because each event repeats the whole answer so far. An event is sent
only when the answer has ended, or has grown by more than 1 / ``GROWTH`` since the last event."""
FIELDS = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "top_logprobs": "top_logprobs_num",
} | {
    name: f"sampling_params.{name}"
    for name in ("temperature", "top_p", "top_k", "min_p", "n", "stop", "logit_bias")
}
"""The names that fields of the bus have in the body, for errors."""


T = TypeVar("T")


@dataclass
class Part:
    """One prompt of a request."""

    number: int
    prompt: Prompt
    params: SamplingParams
    id: str
    reports: Reports
    start: int
    """The position from which the prompt's log-probabilities are reported; -1 if they are not
    reported."""


@dataclass
class Job:
    """One request, and its streams at the bus."""

    gateway: Gateway
    body: GenerateRequest
    parts: list[Part]
    counter: Counter
    generations: list[Generations | None] = field(default_factory=list)
    """The streams of each part; None if the part does not ask for new tokens."""
    began: float = field(default_factory=time.monotonic)

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list of objects."""
        return self.body.is_list or any((part.params.n or 1) > 1 for part in self.parts)

    async def whole(self) -> list[Generated] | Generated:
        """The answers to all prompts, in the order of the prompts; one answer for each sequence."""
        try:
            found = await _together([_sequences(self, part) for part in self.parts])
        finally:
            self.close()
        answers = await compose(
            self.gateway.large_answers,
            self.counter.alternatives,
            lambda: [
                _answer(self, part, sequence)
                for part, sequences in zip(self.parts, found, strict=True)
                for sequence in sequences
            ],
        )
        return answers if self.is_list else answers[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields an event with the whole answer so far whenever an answer has grown enough."""
        queue: Growing = asyncio.Queue(1)
        reading = asyncio.ensure_future(_read_all(self, queue))
        sent: dict[tuple[int, int], int] = {}
        indexes = Indexes([part.params.n or 1 for part in self.parts])
        try:
            while (found := await queue.get()) is not None:
                if isinstance(found, Exception):
                    raise found
                part, sequences = found
                for sequence in sequences:
                    key = part.number, sequence.seq
                    if not _is_due(sequence, sent.get(key)):
                        continue
                    sent[key] = len(sequence.tokens) + (sequence.finish_reason is not None)
                    make = partial(_event, self, part, sequence, indexes.of(*key))
                    turns = self.gateway.large_answers
                    yield await compose(turns, self.counter.alternatives, make)
                queue.task_done()
            yield DONE
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Closes the streams."""
        for generations in self.generations:
            if generations is not None:
                generations.close()


Growing = asyncio.Queue[tuple[Part, list[GeneratedSequence]] | None | Exception]
"""A queue. Each element is a part whose sequences have grown, together with the part's sequences.
The last element is None, or the error that ended a part."""


async def generate(request: Request) -> Response:
    """Answers with an object, a list of objects, or a stream of objects."""
    ignored = ignored_of(request)
    body = await read_body(request, GenerateRequest, ignored)
    body.check()
    work = _begin(gateway_of(request), body)
    return await respond(request, work, ignored, stream=body.stream)


async def _begin(gateway: Gateway, body: GenerateRequest) -> Job:
    model = await gateway.models.get(body.model)
    counter = Counter()
    job = Job(gateway, body, _parts(body, model), counter)
    scored = [part for part in job.parts if part.reports.logprobs and part.start >= 0]
    for part in scored:
        part.prompt = await _ids(model, part.prompt)
        count = max(0, len(part.prompt) - part.start)
        # The answer for each sequence repeats the log-probabilities of the prompt.
        counter.alternatives += count * (1 + part.reports.tops) * (part.params.n or 1)
    check_alternatives(counter.alternatives)
    await _together([_score(gateway, body, part) for part in scored])
    try:
        for part in job.parts:
            job.generations.append(await _generation(gateway, model, job, part))
    except BaseException:
        job.close()
        raise
    return job


def _parts(body: GenerateRequest, model: ServedModel) -> list[Part]:
    """The prompts, each with its own value of each field."""
    prompts = body.prompts
    params = body.of_each(body.sampling_params, SamplingParams(), "sampling_params")
    logprobs = body.of_each(body.return_logprob, False, "return_logprob")
    starts = body.of_each(body.logprob_start_len, -1, "logprob_start_len")
    tops = body.of_each(body.top_logprobs_num, 0, "top_logprobs_num")
    named = body.rid if isinstance(body.rid, list) or not body.is_list else None
    ids = body.of_each(named, "", "rid")
    return [
        Part(
            number,
            prompt,
            params[number],
            ids[number] or new_id("gen-"),
            Reports(
                model,
                logprobs[number],
                tops[number],
                bool(body.return_text_in_logprobs),
                bool(body.processed_logprobs),
                bool(body.kept),
            ),
            starts[number],
        )
        for number, prompt in enumerate(prompts)
    ]


async def _ids(model: ServedModel, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return await model.tokenize(prompt)
    model.check_tokens(prompt, "$.input_ids")
    return prompt


async def _score(gateway: Gateway, body: GenerateRequest, part: Part) -> None:
    """Computes the reported log-probabilities of a prompt."""
    ids, tops = part.prompt, part.reports.tops
    assert isinstance(ids, list)
    first = max(1, part.start)
    found = PromptLogprobs(ids[:1], [None], [{}]) if part.start == 0 else PromptLogprobs()
    if first < len(ids):
        try:
            scores = await gateway.client.score(
                ids[:first], ids[first:], model=body.model, top_logprobs=tops
            )
        except TokenbusError as error:
            error.path = f"$.{body.field}"
            raise from_tokenbus(error) from None
        found = PromptLogprobs(
            [*found.tokens, *ids[first:]],
            [*found.logprobs, *reported(scores.logprobs)],
            [*found.tops, *scores.top_logprobs],
        )
    part.reports.prompt = found


async def _generation(
    gateway: Gateway, model: ServedModel, job: Job, part: Part
) -> Generations | None:
    """Begins the stream of a prompt; returns None if the request does not ask for new tokens."""
    body = job.body
    if not part.params.max_tokens:
        part.prompt = await _ids(model, part.prompt)
        return None
    options = part.params.options()
    options |= {"model": body.model, "text": True}
    if part.reports.logprobs and part.reports.tops:
        options["top_logprobs"] = part.reports.tops
    if part.reports.processed:
        options["processed_logprobs"] = True
    if part.reports.kept:
        options["kept"] = True
    fields = FIELDS | {"prompt": body.field}
    constraint = part.params.constraint
    return Generations(gateway.client, [part.prompt], fields, constraint, job.counter, **options)


async def _together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all ``works``. If one raises an exception, cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sequences(job: Job, part: Part) -> list[GeneratedSequence]:
    generations = job.generations[part.number]
    if generations is None:
        return [_without_tokens(part, seq) for seq in range(part.params.n or 1)]
    [sequences] = await generations.wait()
    check_some_succeeded(sequences)
    return sequences


def _without_tokens(part: Part, seq: int) -> GeneratedSequence:
    return GeneratedSequence(seq, finish_reason="length", prompt_tokens=len(part.prompt))


def _answer(job: Job, part: Part, sequence: GeneratedSequence) -> Generated:
    spans = spans_of(sequence)
    info = MetaInfo(
        id=part.id,
        finish_reason=finish_of(sequence),
        prompt_tokens=sequence.prompt_tokens,
        completion_tokens=len(sequence.tokens),
        cached_tokens=sequence.cached_tokens,
        weight_version=spans[-1].label if spans else "",
        spans=spans,
        e2e_latency=time.monotonic() - job.began,
    )
    part.reports.add_to(info, sequence)
    if sequence.finish_reason is not None:
        info.tokenbus = receipt_of(part.params.constraint, sequence, None) or UNSET
    return Generated(sequence.text, list(sequence.tokens), info)


def _event(job: Job, part: Part, sequence: GeneratedSequence, index: int) -> bytes:
    answer = _answer(job, part, sequence)
    if job.is_list:
        answer.index = index
    return event(answer)


def _is_due(sequence: GeneratedSequence, sent: int | None) -> bool:
    """Whether to send an event about a sequence now. ``sent``: the number of the sequence's tokens
    in the last event about it, plus 1 if that event reported the end."""
    count = len(sequence.tokens)
    if sequence.finish_reason is not None:
        return sent != count + 1
    return count - (sent or 0) > (sent or 0) // GROWTH


async def _read_all(job: Job, queue: Growing) -> None:
    """Puts the sequences of each part into the queue when they grow. At the end, puts None, or the
    error that ended a part."""
    try:
        await _together([_read(job, part, queue) for part in job.parts])
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def _read(job: Job, part: Part, queue: Growing) -> None:
    generations = job.generations[part.number]
    if generations is None:
        await queue.put((part, await _sequences(job, part)))
        return
    async for _ in generations.batches():
        await queue.put((part, generations.streams[0].sequences))
        # The sequences must not grow while a thread composes events from them.
        await queue.join()
