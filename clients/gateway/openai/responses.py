"""``POST /v1/responses``: answers a whole conversation. Only the items of responses are stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import Token
from ..bodies import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.constraints import Receipt
from ..conversation.planning import Prepared, prepare
from ..errors import ApiError
from ..events import unless_disconnected
from ..json import json_response
from ..leniency import Ignored
from ..new_ids import new_id
from ..stored_items import StoredItems
from ..turns import current_user
from .chat import chat_generations
from .fields import OPENAI_TEMPERATURE
from .generations import Generations, begun
from .response_bodies import (
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseAnswer,
    ResponsesRequest,
    ResponseUsage,
)
from .response_input import InputItems, read_items
from .response_output import Output
from .usage import Counter


@dataclass
class ResponseJob:
    """One request for a response."""

    body: ResponsesRequest
    prepared: Prepared
    generations: Generations
    counter: Counter
    output: Output
    stored: StoredItems | None
    """Where the items are stored for later references."""
    last: Token | None = None
    """The last entry of the answer."""
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))


async def responses(request: Request) -> Response:
    """Answers with a response, as one object or as a stream of events."""
    ignored = ignored_of(request)
    body = await read_body(request, ResponsesRequest, ignored)
    body.check()
    body.check_include(ignored)
    gateway = gateway_of(request)
    given = gateway.stored_items.resolved(current_user.get(), body.input)
    items = read_items(given, ignored)
    work = _begin(gateway, body, items, ignored)
    job = await unless_disconnected(request.receive, work)
    if body.stream:
        return await begun(request, _events(job), ignored.headers)
    answer = await unless_disconnected(request.receive, _whole(job))
    return json_response(answer, headers=ignored.headers)


async def _begin(
    gateway: Gateway, body: ResponsesRequest, items: InputItems, ignored: Ignored
) -> ResponseJob:
    offered = body.offered(items, ignored)
    conversation = body.to_conversation(items, offered)
    prepared = await prepare(gateway, body.model, conversation, ignored)
    counter = Counter()
    fields = {"prompt": "input", "max_tokens": "max_output_tokens"}
    options = body.options(prepared.constraint)
    generations = chat_generations(gateway, prepared, options, counter, fields)
    stored = gateway.stored_items if body.store is not False else None
    logprobs = (body.top_logprobs or 0) if body.with_logprobs else None
    output = Output(prepared, logprobs, offered)
    return ResponseJob(body, prepared, generations, counter, output, stored)


async def _whole(job: ResponseJob) -> ResponseAnswer:
    async for _ in _events(job):
        pass
    return _answer(job, _status(job))


async def _events(job: ResponseJob) -> AsyncGenerator[bytes, None]:
    output = job.output
    begun = _answer(job, "in_progress")
    head = output.event("response.created", response=begun)
    head += output.event("response.in_progress", response=begun)
    async for _, entries in job.generations.batches():
        await job.prepared.checks.read(entries)
        if part := head + output.feed(entries):
            yield part
        head = b""
        ends = [e for e in entries if e.seq == 0 and e.finish_reason is not None]
        if ends:
            job.last = ends[0]
            _check(job.last)
    status = _status(job)
    parts = output.end(status)
    if job.stored is not None:
        items = {item.id: msgspec.json.encode(item) for item in output.items}
        job.stored.store(current_user.get(), items)
    yield parts + output.event(f"response.{status}", response=_answer(job, status))


def _check(last: Token) -> None:
    """Raises ApiError if the answer's sequence failed, even if other sequences did not fail."""
    if last.finish_reason == "error":
        raise ApiError(
            400, last.error or "the sequence failed", code=last.code or "controller_failed"
        )


def _status(job: ResponseJob) -> Literal["completed", "incomplete"]:
    cut = job.last is not None and job.last.finish_reason == "length"
    return "incomplete" if cut else "completed"


def _answer(
    job: ResponseJob, status: Literal["in_progress", "completed", "incomplete"]
) -> ResponseAnswer:
    body = job.body
    choice = body.tool_choice
    return ResponseAnswer(
        id=job.id,
        created_at=job.created,
        status=status,
        incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=job.prepared.model.name,
        output=list(job.output.items),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=OPENAI_TEMPERATURE if body.temperature is None else body.temperature,
        text={"format": _plain(body.text.format if body.text else None) or {"type": "text"}},
        tool_choice="auto" if choice is None else _plain(choice),
        tools=[_plain(tool) for tool in body.tools or ()],
        top_p=1.0 if body.top_p is None else body.top_p,
        store=job.stored is not None,
        truncation=body.truncation or "disabled",
        usage=None if status == "in_progress" else _usage(job.counter),
        tokenbus=UNSET if status == "in_progress" else _receipt(job),
    )


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _usage(counter: Counter) -> ResponseUsage:
    return ResponseUsage(
        counter.prompt,
        InputDetails(counter.cached),
        counter.completion,
        OutputDetails(),
        counter.prompt + counter.completion,
    )


def _receipt(job: ResponseJob) -> Receipt | msgspec.UnsetType:
    receipt, constraint = job.output.receipt, job.prepared.constraint
    if job.last is not None:
        receipt.exact = job.last.exact
    if constraint is not None and job.last is not None and job.last.constraint is not None:
        receipt.constraint = constraint.label
        receipt.ended = job.last.constraint
        receipt.keywords = job.prepared.checks.outcomes.get(0, {})
    return receipt if receipt != Receipt() else UNSET
