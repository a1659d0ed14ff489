"""Answers a request for generated text with one object, or with a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ..bodies.leniency import Ignored
from ..events import OPENAI, EventStream, StreamForm, unless_disconnected
from ..json import json_response


class Job(Protocol):
    """One request whose answer has begun."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed answer; raises ApiError or TokenbusError."""

    async def whole(self) -> object:
        """The answer as one object. Raises ApiError or TokenbusError."""


async def respond(
    request: Request,
    begin: Coroutine[Any, Any, Job],
    ignored: Ignored,
    *,
    stream: bool | None,
    form: StreamForm = OPENAI,
) -> Response:
    """Waits until ``begin`` has begun the answer, and returns the answer as one object or as a
    stream. Ends the work when the client disconnects.

    The stream begins after its first event. An earlier error is raised, so that it determines the
    HTTP status. A later error becomes the last event.
    """
    return await unless_disconnected(request.receive, _answer(begin, ignored, stream, form))


async def _answer(
    begin: Coroutine[Any, Any, Job], ignored: Ignored, stream: bool | None, form: StreamForm
) -> Response:
    job = await begin
    if not stream:
        return json_response(await job.whole(), headers=ignored.headers)
    # The answer is made while the worker computes the first token.
    return await EventStream.begun(job.events(), ignored.headers, form)
