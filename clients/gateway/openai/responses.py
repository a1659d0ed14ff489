"""``POST /v1/responses``: answers a conversation, and stores the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from ..bodies.leniency import Ignored
from ..bodies.reading import check_json, decode_in_turn, ignored_of, read_bytes
from ..context import Gateway, gateway_of
from ..errors import ApiError
from ..events import unless_disconnected
from ..json import json_response
from .background import background_response
from .generations import begun
from .response_bodies import ResponseAnswer, ResponsesRequest
from .response_jobs import ResponseJob, read_input


async def responses(request: Request) -> Response:
    """Answers with a response, as one object or as a stream of events."""
    ignored = ignored_of(request)
    check_json(request)
    data = await read_bytes(request)
    gateway = gateway_of(request)
    body = await decode_in_turn(gateway, data, ResponsesRequest, ignored)
    body.check()
    body.check_include(ignored)
    body.check_copied(len(data), ignored)
    if body.background:
        return await background_response(request, data, body, ignored)
    job = await unless_disconnected(request.receive, _begin(gateway, body, ignored))
    if body.stream:
        return await begun(request, _events(gateway, job), ignored.headers)
    answer = await unless_disconnected(request.receive, _whole(gateway, job))
    return json_response(answer, headers=ignored.headers)


async def _begin(gateway: Gateway, body: ResponsesRequest, ignored: Ignored) -> ResponseJob:
    given = await read_input(gateway, body, ignored)
    return await ResponseJob.begin(gateway, body, given, ignored)


async def _whole(gateway: Gateway, job: ResponseJob) -> ResponseAnswer:
    async with aclosing(job.events()) as events:
        async for _ in events:
            pass
    await _store(gateway, job)
    return job.answer(job.status)


async def _events(gateway: Gateway, job: ResponseJob) -> AsyncGenerator[bytes, None]:
    async with aclosing(job.events()) as events:
        async for part in events:
            yield part
    await _store(gateway, job)
    yield job.last_event()


async def _store(gateway: Gateway, job: ResponseJob) -> None:
    """Stores a finished response. If storing fails, the field ``store`` of the answer is false."""
    if not job.stored:
        return
    stored = job.stored_answer(job.answer(job.status))
    items = [*job.given_items(), *job.output_items()]
    try:
        job.stored = await gateway.stored.call(
            lambda database, user: database.save(user, stored, items)
        )
    except ApiError:
        job.stored = False
