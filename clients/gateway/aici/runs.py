"""``POST /v1/run``: runs a controller, and answers with server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import Name
from ....protocol.sampling import TokenId
from ... import GenerateOptions
from ..bodies.field_types import MaxTokens, Seed, Temperature, TopK, TopP, seed_of
from ..bodies.reading import Body, read_body
from ..context import gateway_of
from ..events import DONE, EventStream, event, unless_disconnected
from ..new_ids import new_id
from .streams import NO_CONTROLLER, Fork, Run, controller_options, prompt_for


class RunRequest(Body):
    """The body of a run. An optional field that is null has its default value."""

    controller: Name
    controller_arg: Any = ""
    prompt: str | list[TokenId] | None = ""
    model: str | None = ""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    """Number of most likely tokens that may be sampled; 0 and -1: all tokens."""
    max_tokens: MaxTokens | None = None
    """Maximum number of tokens of each sequence. Default: the context length."""
    seed: Seed | None = None


class InitialRun(Struct):
    """The first object of a run."""

    id: str
    object: Literal["initial-run"]
    created: int
    """Seconds since 1970."""
    model: str


class RunUsage(Struct):
    """The cost of a run so far, with the names of AICI's later form."""

    sampled_tokens: int
    ff_tokens: int
    """Number of tokens that the model computed."""
    cost: int


class RunPart(Struct):
    """Each further object of a run. It has the new part of a sequence."""

    object: Literal["run"]
    forks: list[Fork]
    usage: RunUsage


async def run(request: Request) -> Response:
    """Runs a controller. Answers with the events ``initial-run``, ``run`` for each entry of the
    stream, and ``[DONE]``."""
    body = await read_body(request, RunRequest)
    gateway = gateway_of(request)
    model = await unless_disconnected(request.receive, gateway.models.get(body.model or ""))
    prompt = body.prompt or ""
    if body.controller == NO_CONTROLLER and isinstance(body.controller_arg, str):
        prompt = body.controller_arg or prompt
    options: GenerateOptions = {
        "model": model.name,
        **controller_options(body.controller, body.controller_arg),
        "max_tokens": model.info.context_length if body.max_tokens is None else body.max_tokens,
        "temperature": body.temperature or 0.0,
        # The controller decides when the run ends.
        "ignore_eos": body.controller != NO_CONTROLLER,
    }
    if body.top_p is not None:
        options["top_p"] = body.top_p
    if body.top_k is not None:
        options["top_k"] = max(0, body.top_k)
    if body.seed is not None:
        options["seed"] = seed_of(body.seed)
    begun = await Run.begin(request, gateway, prompt_for(model, prompt), options)
    return await EventStream.begun(_events(begun, model.name))


async def _events(run: Run, model: str) -> AsyncGenerator[bytes, None]:
    with closing(run):
        yield event(InitialRun(new_id("run-"), "initial-run", int(time.time()), model))
        async with aclosing(run.forks()) as forks:
            async for fork in forks:
                usage = RunUsage(run.usage.sampled, run.usage.processed, run.usage.cost)
                yield event(RunPart("run", [fork], usage))
        yield DONE
