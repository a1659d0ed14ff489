"""``POST /v1/completions``: continues prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import Code, TokenbusError
from ....protocol.messages import MAX_BODY_BYTES
from ... import GeneratedSequence
from ..aici import completions as aici
from ..bodies.reading import check_json, decode_in_turn, ignored_of, read_bytes
from ..context import Gateway, gateway_of
from ..conversation.endings import check_some_succeeded, end_of, receipt_of
from ..conversation.truncation import last_tokens
from ..errors import ApiError, from_tokenbus
from ..generation.counter import Counter, check_alternatives, compose
from ..generation.generations import Generations, Prompt
from ..generation.respond import respond
from ..json import encode
from ..models import ServedModel
from ..new_ids import new_id
from .choices import Indexes
from .completion_bodies import Completion, CompletionChoice, CompletionRequest
from .completion_chunks import CompletionChunks, Stamp
from .fill_in import ends_of, filled
from .logprobs import Sampled, completion_logprobs, cumulative, reported
from .prompt_logprobs import PromptLogprobs, prompt_logprobs
from .token_fields import TokenReports, ids_of, set_fields
from .usage import Usage


@dataclass
class Echo:
    """The parts of a prompt that its completions repeat."""

    text: str = ""
    sampled: Sampled | None = None
    """The prompt's tokens and log-probabilities, if requested."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """The field ``prompt_logprobs`` of the choices."""


@dataclass
class Job:
    """One request for completions."""

    gateway: Gateway
    body: CompletionRequest
    model: ServedModel
    echoes: list[Echo]
    generations: Generations | None
    """The streams of the request; None if ``max_tokens`` is 0, so that the answer has only the
    prompts."""
    counter: Counter
    prompts: list[Prompt]
    """The prompts, as token ids if the answer repeats them."""
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The model's name in the answer."""
        return self.model.name_for(self.body.model)

    async def whole(self) -> Completion:
        """The answer as one object."""
        found = None if self.generations is None else await self.generations.wait()
        choices = await compose(
            self.gateway.large_answers,
            self.counter.alternatives,
            lambda: _choices(self, found),
        )
        choices.sort(key=lambda choice: choice.index)
        usage = Usage.of(self.counter)
        return Completion(self.id, "text_completion", self.created, self.name, choices, usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed answer."""
        body = self.body
        stamp = Stamp(self.id, self.created, self.name)
        chunks = CompletionChunks(stamp, self.model, body, self.prompts, self.counter)
        if self.generations is None:
            yield b"".join(
                chunks.echo(place, echo.text, echo.sampled, "length")
                for place, echo in enumerate(self.echoes)
            )
        else:
            head = b""
            if body.echo:
                head = b"".join(
                    chunks.echo(place, echo.text, echo.sampled, None)
                    for place, echo in enumerate(self.echoes)
                )
            async for place, entries in self.generations.batches():
                if part := head + chunks.write(place, entries):
                    yield part
                    head = b""
        yield chunks.end()


async def completions(request: Request) -> Response:
    """Answers with completions, as one object or as a stream of chunks.

    Requests in AICI's earlier form use the same path.
    """
    check_json(request)
    raw = await read_bytes(request)
    if await aici.handles(gateway_of(request), raw):
        return await aici.complete(request, raw)
    ignored = ignored_of(request)
    body = await decode_in_turn(gateway_of(request), raw, CompletionRequest, ignored)
    work = _begin(gateway_of(request), body)
    return await respond(request, work, ignored, stream=body.stream)


async def _begin(gateway: Gateway, body: CompletionRequest) -> Job:
    body.check()
    constraint = body.own_constraint
    model = await gateway.models.get(body.model)
    counter = Counter()
    prompts, echoes = await _prompts(gateway, body, model, counter)
    generations = None
    if body.max_tokens != 0:
        options = body.options(constraint)
        options["model"] = model.name
        if body.suffix:
            prompts = [await filled(model, prompt, body.suffix) for prompt in prompts]
            options["stop"] = [*options.get("stop", ()), *ends_of(model)]
        generations = Generations(gateway.client, prompts, {}, constraint, counter, **options)
        generations.shown = body.shown_text(model, special=True)
    else:
        counter.prompt = sum(len(ids) for ids in prompts)
    return Job(gateway, body, model, echoes, generations, counter, prompts)


async def _prompts(
    gateway: Gateway, body: CompletionRequest, model: ServedModel, counter: Counter
) -> tuple[list[Prompt], list[Echo]]:
    """The prompts, and the parts of each prompt that its completions repeat."""
    prompts = body.prompts
    if body.truncate_prompt_tokens is not None:
        # Each prompt is shortened to its last tokens.
        kept, context = body.truncate_prompt_tokens, model.info.context_length
        prompts = [last_tokens(one, kept, context) for one in await _tokenized(model, prompts)]
    echoes = [Echo() for _ in prompts]
    if body.echo:
        prompts, echoes = await _echoes(gateway, body, model, prompts, counter)
    if not body.return_token_ids and body.prompt_logprobs is None:
        return prompts, echoes
    tokenized = await _tokenized(model, prompts)
    # The answer contains each prompt once for each choice.
    num_repeated = sum(map(len, tokenized)) * (body.n or 1)
    if body.return_token_ids:
        counter.add_ids(num_repeated)
    if body.prompt_logprobs is not None:
        counter.alternatives += num_repeated * (1 + body.prompt_logprobs)
    check_alternatives(counter.alternatives)
    if body.prompt_logprobs is not None:
        for echo, ids in zip(echoes, tokenized, strict=True):
            echo.prompt_logprobs = await prompt_logprobs(gateway, model, ids, body.prompt_logprobs)
    return [*tokenized], echoes


async def _tokenized(model: ServedModel, prompts: list[Prompt]) -> list[list[int]]:
    return [one if isinstance(one, list) else await model.tokenize(one) for one in prompts]


async def _echoes(
    gateway: Gateway,
    body: CompletionRequest,
    model: ServedModel,
    prompts: list[Prompt],
    counter: Counter,
) -> tuple[list[Prompt], list[Echo]]:
    """The prompts as token ids, and the parts of each prompt that its completions repeat."""
    for prompt in prompts:
        if isinstance(prompt, list):
            model.check_tokens(prompt, "$.prompt")
    texts = [p if isinstance(p, str) else await model.detokenize(p) for p in prompts]
    _count_echoes(gateway, texts, body.n or 1)
    ids = await _tokenized(model, prompts)
    if body.logprobs is None:
        return [*ids], [Echo(text) for text in texts]
    # The answer contains each prompt once for each choice.
    counter.alternatives = sum(map(len, ids)) * (body.n or 1) * (1 + body.logprobs)
    check_alternatives(counter.alternatives)
    sampled = await asyncio.gather(*(_scored(gateway, body, model, one) for one in ids))
    return [*ids], [Echo(text, one) for text, one in zip(texts, sampled, strict=True)]


def _count_echoes(gateway: Gateway, texts: list[str], n: int) -> None:
    """Counts the prompts in an answer, which has each prompt ``n`` times, towards the user's share
    of the memory. Raises ApiError 413 if they are too large, and UnavailableError if they do not
    fit the share."""
    size = n * sum(len(encode(text)) for text in texts)
    if size > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"with echo, the answer would have {size} bytes of prompts; at most {MAX_BODY_BYTES} "
            "are allowed; ask for fewer choices, or leave echo out",
            code=Code.TOO_LARGE,
            param="echo",
        )
    gateway.shares.take_bytes(size)


async def _scored(
    gateway: Gateway, body: CompletionRequest, model: ServedModel, ids: list[int]
) -> Sampled:
    """The tokens of a prompt with their log-probabilities. The first token does not have a
    log-probability."""
    logprobs: list[float | None] = [None] * len(ids)
    tops: list[dict[int, float]] = [{}] * len(ids)
    if len(ids) > 1:
        try:
            tops_asked = body.logprobs or 0
            scores = await gateway.client.score(
                ids[:1], ids[1:], model=model.name, top_logprobs=tops_asked
            )
        except TokenbusError as error:
            error.path = "$.prompt" if error.path == "$.scored" else error.path
            raise from_tokenbus(error) from None
        logprobs[1:] = reported(scores.logprobs)
        tops[1:] = scores.top_logprobs
    return Sampled(ids, logprobs, tops, await model.texts_of(ids))


def _choices(job: Job, found: list[list[GeneratedSequence]] | None) -> list[CompletionChoice]:
    """The choices of all prompts. ``found``: the sequences of each prompt; None if the answer has
    only the prompts."""
    body = job.body
    n = body.n or 1
    indexes = Indexes([n] * len(job.echoes))
    choices = []
    for place, echo in enumerate(job.echoes):
        if found is None:
            sequences = [GeneratedSequence(seq, finish_reason="length") for seq in range(n)]
        else:
            sequences = found[place]
            check_some_succeeded(sequences)
        if found is not None and body.best_of is not None:
            best = sorted(sequences, key=cumulative, reverse=True)[:n]
            numbered = list(enumerate(best))
        else:
            numbered = [(s.seq, s) for s in sequences]
        reports, prompt = TokenReports(body), ids_of(job.prompts[place])
        for seq, sequence in numbered:
            choice = _choice(job, echo, sequence, indexes.of(place, seq))
            set_fields(choice, reports.of_sequence(sequence, prompt))
            choices.append(choice)
    return choices


def _choice(job: Job, echo: Echo, sequence: GeneratedSequence, index: int) -> CompletionChoice:
    logprobs = None
    if job.body.logprobs is not None:
        sampled = Sampled.of(sequence)
        sampled = echo.sampled + sampled if echo.sampled is not None else sampled
        start = 0 if echo.sampled is not None else len(echo.text)
        logprobs = completion_logprobs(job.model, sampled, job.body.logprobs, start)
    return CompletionChoice(
        index,
        echo.text + sequence.text,
        logprobs,
        end_of(sequence.finish_reason),
        receipt_of(job.body.own_constraint, sequence, None) or UNSET,
        echo.prompt_logprobs,
    )
