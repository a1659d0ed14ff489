"""``POST /completion``: llama.cpp's own interface, for its clients."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...protocol.messages import Token
from ...protocol.sampling import TokenId
from .. import GenerateOptions
from .bodies.field_types import (
    MaybeStops,
    Penalty,
    RepetitionPenalty,
    RestOfContext,
    Seed,
    Temperature,
    TopK,
    TopPOrZero,
    kept_tokens,
    sampling_of,
    stops_of,
)
from .bodies.reading import Body, ignored_of, read_body
from .context import Gateway, gateway_of
from .conversation.constraints import Constraint, Schema, json_schema
from .conversation.growing import GrowingChoices
from .errors import ApiError, invalid_field
from .events import event
from .generation.counter import Counter
from .generation.generations import Generations
from .generation.respond import respond
from .models import ServedModel
from .openapi import Operation

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05
"""The default sampling parameters of llama.cpp."""

PromptPart = str | TokenId


class LlamaRequest(Body, kw_only=True):
    """The body of ``POST /completion``. Further fields of llama.cpp have no effect."""

    prompt: str | Annotated[list[PromptPart], Meta(min_length=1)]
    """A text, token ids, or a mixture of texts and ids."""
    model: str = ""
    stream: bool | None = None
    n_predict: RestOfContext | None = None
    """Maximum number of tokens; -1, the default: the rest of the context."""
    temperature: Temperature = TEMPERATURE
    top_k: TopK = TOP_K
    top_p: TopPOrZero = TOP_P
    min_p: TopPOrZero = MIN_P
    seed: Seed | None = None
    """-1, the default: a random seed."""
    stop: MaybeStops | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: list[tuple[TokenId, float | bool]] | None = None
    """Pairs of a token id and its bias; ``false`` forbids the token."""
    ignore_eos: bool | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    """Refused unless it is empty, because GBNF is not supported."""

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the text. Raises ApiError 400."""
        if self.grammar:
            what = "grammar: GBNF is not supported; use json_schema, or /v1/completions with a yacc"
            raise invalid_field("grammar", f"{what} or lark grammar as controller")
        return json_schema(self.json_schema, "json_schema", None) if self.json_schema else None

    def options(self, model: ServedModel, num_tokens: int) -> GenerateOptions:
        """The options of ``generate`` for a prompt of ``num_tokens`` tokens."""
        rest = max(1, model.info.context_length - num_tokens)
        limit = -1 if self.n_predict is None else self.n_predict
        options: GenerateOptions = {
            "model": model.name,
            "text": True,
            "max_tokens": rest if limit < 0 else max(1, limit),
            "temperature": self.temperature,
            **kept_tokens(self.top_p, self.top_k),
            **sampling_of(
                min_p=self.min_p,
                repetition_penalty=self.repeat_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias={token: _bias(value) for token, value in self.logit_bias or ()},
                seed=None if self.seed is None or self.seed < 0 else self.seed,
            ),
        }
        if strings := stops_of(self.stop):
            options["stop"] = strings
        if self.ignore_eos:
            options["ignore_eos"] = True
        constraint = self.constraint
        return options if constraint is None else {**options, **constraint.options}


def _bias(value: float | bool) -> float:
    """A bias; ``false`` forbids the token, and ``true`` has no effect."""
    if isinstance(value, bool):
        return 0.0 if value else -100.0
    return value


class Timings(Struct):
    """The tokens and durations of an answer."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class LlamaPiece(Struct):
    """Any event of a streamed answer except the last event."""

    content: str
    stop: bool = False


class LlamaAnswer(Struct, kw_only=True):
    """An answer, or the last event of a streamed answer. That event has an empty ``content``."""

    content: str
    stop: bool = True
    stop_type: str
    """``eos``, ``limit``, or ``word`` if the text ended at a stop string or with its constraint."""
    stopping_word: str = ""
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = False
    timings: Timings


@dataclass
class Job:
    """A request with its model, its streams on the bus, and its counts of tokens."""

    body: LlamaRequest
    model: ServedModel
    generations: Generations
    counter: Counter
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    """The time of the first token, in seconds of ``time.monotonic``; 0 before the first token."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed answer."""
        async for text, end in _texts(self):
            parts = [event(LlamaPiece(text))] if text else []
            if end.finish_reason is not None:
                parts.append(event(_ended(self, "", end)))
            if parts:
                yield b"".join(parts)

    async def whole(self) -> LlamaAnswer:
        """The answer as one object."""
        found = [(text, end) async for text, end in _texts(self)]
        return _ended(self, "".join(text for text, _ in found), found[-1][1])


def routes() -> list[BaseRoute]:
    """The routes of the two paths that llama.cpp uses for completions."""
    paths = ("/completion", "/completions")
    return [Route(path, completion, methods=["POST"]) for path in paths]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    return [
        Operation(
            "post", path, "Continues a prompt", "llama.cpp", LlamaRequest, LlamaAnswer, stream=True
        )
        for path in ("/completion", "/completions")
    ]


async def completion(request: Request) -> Response:
    """Answers with the continuation of a prompt, as one object or as events."""
    ignored = ignored_of(request)
    body = await read_body(request, LlamaRequest, ignored)
    work = _begin(gateway_of(request), body)
    return await respond(request, work, ignored, stream=body.stream)


async def _begin(gateway: Gateway, body: LlamaRequest) -> Job:
    constraint = body.constraint
    model = await gateway.models.get(body.model)
    ids: list[int] = []
    for part in [body.prompt] if isinstance(body.prompt, str) else body.prompt:
        ids += [part] if isinstance(part, int) else await model.tokenize(part, special=not ids)
        model.check_tokens(ids, "$.prompt")
    options, counter = body.options(model, len(ids)), Counter()
    generations = Generations(gateway.client, [ids], {}, constraint, counter, **options)
    return Job(body, model, generations, counter)


async def _texts(job: Job) -> AsyncGenerator[tuple[str, Token], None]:
    """Yields the new text of the answer and the last entry, for each batch of entries. Raises
    ApiError if the stream fails."""
    choices = GrowingChoices()
    async for _, entries in job.generations.batches():
        job.first = job.first or time.monotonic()
        taken = [choices.take(entry) for entry in entries]
        end = entries[-1]
        if end.finish_reason == "error":
            raise ApiError(400, end.error or "the answer failed", code=end.code)
        yield "".join(text for _, text, _ in taken), end


def _ended(job: Job, content: str, end: Token) -> LlamaAnswer:
    counter, now = job.counter, time.monotonic()
    seconds = max(1e-9, now - job.first)
    stops = end.token in job.model.info.eos_token_ids
    kind = {"length": "limit"}.get(end.finish_reason or "", "eos" if stops else "word")
    timings = Timings(
        counter.prompt,
        1000 * (job.first - job.began),
        counter.completion,
        1000 * seconds,
        counter.completion / seconds,
    )
    return LlamaAnswer(
        content=content,
        stop_type=kind,
        model=job.model.name_for(job.body.model),
        tokens_predicted=counter.completion,
        tokens_evaluated=counter.prompt,
        tokens_cached=counter.cached,
        timings=timings,
    )
