"""Answers a request for generated text with one object, or with a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import TokenbusError
from ..bodies.leniency import Ignored
from ..errors import ApiError, as_api_error
from ..events import EventStream, event, unless_disconnected
from ..json import json_response

PING_S = 10.0
"""Seconds without a new event after which a stream with ``StreamForm.ping`` sends a ping, so that
proxies do not close the connection."""


class Job(Protocol):
    """One request whose answer has begun."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed answer; raises ApiError or TokenbusError."""

    async def whole(self) -> object:
        """The answer as one object. Raises ApiError or TokenbusError."""


class StreamForm(NamedTuple):
    """The form of an interface's streams."""

    failed: Callable[[ApiError], bytes] = lambda error: event(error.body())
    """Encodes the error that ends a stream."""
    ping: bytes = b""
    """The event after ``PING_S`` seconds without an event; empty if pings are not sent."""
    response: type[EventStream] = EventStream


OPENAI = StreamForm()


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
    job = await unless_disconnected(request.receive, begin)
    if not stream:
        answer = await unless_disconnected(request.receive, job.whole())
        return json_response(answer, headers=ignored.headers)
    events = job.events()
    first = await unless_disconnected(request.receive, anext(events))
    later = _pinged(events, form.ping) if form.ping else events
    return form.response(_until_error(first, later, form), ignored.headers)


async def _until_error(
    first: bytes, events: AsyncGenerator[bytes, None], form: StreamForm
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            yield first
            async for part in events:
                yield part
        except (ApiError, TokenbusError) as error:
            yield form.failed(as_api_error(error))


async def _pinged(events: AsyncGenerator[bytes, None], ping: bytes) -> AsyncGenerator[bytes, None]:
    """Yields ``events``, and a ping after each ``PING_S`` seconds without an event."""
    reading: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            reading = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait((reading,), timeout=PING_S))[0]:
                yield ping
            part = reading.result()
            if part is None:
                return
            yield part
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await events.aclose()
