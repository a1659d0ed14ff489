"""``POST /v1/completions`` with ``aici_module``: the earlier form of a run.

The path is OpenAI's. OpenAI's handler calls ``complete`` for bodies that ``handles`` recognizes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.decoders import json_decoder
from ....protocol.errors import TokenbusError
from ....protocol.messages import Name
from ....protocol.sampling import StopString, TokenId
from ... import GenerateOptions
from ..bodies.field_types import (
    Choices,
    MaxTokens,
    Penalty,
    Seed,
    Stops,
    Temperature,
    TopK,
    TopP,
    seed_of,
)
from ..bodies.leniency import Ignored
from ..bodies.reading import Body, body_turn, decode_in_turn
from ..context import Gateway, gateway_of
from ..errors import ApiError, from_tokenbus, invalid_field
from ..events import DONE, EventStream, event, unless_disconnected
from ..json import json_response
from ..new_ids import new_id
from .streams import Fork, Run, Usage, controller_options, finish_reason, prompt_for

PATH = "/v1/aici_modules"
"""The path by which ``errors.py`` selects AICI's form of errors."""


class Marked(Struct):
    """Decodes the field that only AICI's bodies have. The field may be null."""

    aici_module: Any = UNSET


class AiciCompletion(Body):
    """The body of a request. An optional field that is null has its default value."""

    prompt: str | list[TokenId | str | list[TokenId]]
    """A text or a list of token ids, or a list whose only element is a text or a list of token
    ids."""
    aici_module: Name | None
    """The name of the controller; null or ``none`` if the request does not have a controller."""
    aici_arg: Any = None
    model: str | None = ""
    """The name of the model; empty or ``*`` for the default model."""
    max_tokens: MaxTokens | None = None
    """Maximum number of tokens of each sequence. Default: 16."""
    n: Choices | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    """Default: 1."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopString | Stops | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    user: Any | UnsetType = UNSET


class Choice(Fork):
    """The new part of a sequence; the whole sequence if the answer is not streamed."""

    logprobs: None = None


class CompletionUsage(Struct):
    """The cost of a request so far. The fields have OpenAI's names and AICI's meaning:
    ``completion_tokens`` counts sampled tokens. ``prompt_tokens`` counts the tokens that the model
    computed (``Usage``).
    """

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    fuel_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> CompletionUsage:
        """Converts the costs of a request to AICI's form."""
        total = usage.sampled + usage.processed
        return cls(usage.sampled, usage.processed, total, usage.cost)


class Completion(Struct):
    """The answer, or a part of a streamed answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[Choice]
    usage: CompletionUsage


_marked = json_decoder(Marked)


async def handles(gateway: Gateway, body: bytes) -> bool:
    """Whether this interface handles a body sent to ``/v1/completions``."""
    if b'"aici_module"' not in body:
        return False
    try:
        async with body_turn(gateway, body):
            return _marked.decode(body).aici_module is not UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # OpenAI's handler reports the error.


async def complete(request: Request, body: bytes) -> Response:
    """The answer to a body that ``handles`` recognized."""
    try:
        decoded = await decode_in_turn(gateway_of(request), body, AiciCompletion)
        return await _complete(request, decoded)
    except ApiError as error:
        return error.response(PATH)
    except TokenbusError as error:
        return from_tokenbus(error).response(PATH)


async def _complete(request: Request, body: AiciCompletion) -> Response:
    gateway = gateway_of(request)
    name = "" if body.model == "*" else body.model or ""
    model = await unless_disconnected(request.receive, gateway.models.get(name))
    prompt = prompt_for(model, _one_prompt(body.prompt))
    run = await Run.begin(request, gateway, prompt, {**_options(body), "model": model.name})
    answer = Completion(
        new_id("cmpl-"),
        "text_completion",
        int(time.time()),
        model.name,
        [],
        CompletionUsage.of(run.usage),
    )
    ignored = Ignored()
    if body.user is not UNSET:
        ignored.add("user")
    headers = ignored.headers
    if body.stream:
        return await EventStream.begun(_events(run, answer), headers)
    for sequence in await run.finished(request):
        answer.choices.append(
            Choice(
                run.index_of(sequence.seq),
                sequence.text,
                sequence.logs,
                sequence.storage,
                sequence.error or "",
                finish_reason(sequence),
                sequence.messages or UNSET,
                UNSET if sequence.exact is None else sequence.exact,
            )
        )
    answer.usage = CompletionUsage.of(run.usage)
    return json_response(answer, headers=headers)


def _options(body: AiciCompletion) -> GenerateOptions:
    options: GenerateOptions = {
        **controller_options(body.aici_module, body.aici_arg),
        "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": max(0, body.top_k or 0),
        "n": 1 if body.n is None else body.n,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "ignore_eos": bool(body.ignore_eos),
    }
    if body.seed is not None:
        options["seed"] = seed_of(body.seed)
    return options


def _one_prompt(prompt: str | list[TokenId | str | list[TokenId]]) -> str | list[int]:
    """The prompt of a body; raises ApiError 400 unless the body has exactly one prompt."""
    if isinstance(prompt, str):
        return prompt
    ids = [token for token in prompt if isinstance(token, int)]
    if ids and len(ids) == len(prompt):
        return ids
    match prompt:
        case [str() | list() as only]:
            return only
    raise invalid_field(
        "prompt",
        f"prompt is a list of {len(prompt)} elements; it must be one text or one list of token ids",
    )


async def _events(run: Run, answer: Completion) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.forks()) as forks:
        async for fork in forks:
            answer.choices = [Choice(*msgspec.structs.astuple(fork))]
            answer.usage = CompletionUsage.of(run.usage)
            yield event(answer)
    yield DONE
