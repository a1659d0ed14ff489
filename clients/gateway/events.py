"""Sends server-sent events. If the HTTP client disconnects, the stream on the bus is cancelled.

There is one exception: while the gateway shuts down, the stream of a request with an idempotency
key is not cancelled. This stream continues at the broker, so that a repeated request can attach to
it (``idempotency.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol.errors import TokenbusError
from .errors import ApiError, as_api_error
from .json import encode
from .users.idempotency import NumberedEvents

T = TypeVar("T")

PING_S = 10.0
"""Seconds without a new event after which a stream with ``StreamForm.ping`` sends a ping, so that
proxies do not close the connection."""
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's and AICI's streams."""


def event(value: object, name: str | None = None) -> bytes:
    """An event with ``value`` as JSON. ``name`` is the type of the event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


class StreamForm(NamedTuple):
    """The form of an interface's streams."""

    failed: Callable[[ApiError], bytes] = lambda error: event(error.body())
    """Encodes the error that ends a stream."""
    ping: bytes = b""
    """The event after ``PING_S`` seconds without an event; empty if pings are not sent."""
    media_type: str = "text/event-stream"
    numbers: bool = True
    """If true, and the request has an idempotency key, each event gets an ``id:`` with its
    number."""


OPENAI = StreamForm()


class EventStream(Response):
    """An answer that sends the events of a generator. Each value of the generator is one or several
    whole events.

    An error of the generator becomes the last event. When the client disconnects, the generator is
    cancelled and closed. It then closes its stream on the bus. While the client does not read, the
    generator waits.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        form: StreamForm = OPENAI,
    ) -> None:
        # A proxy must neither cache nor buffer the events.
        own = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(None, 200, own, form.media_type)
        self._events = events
        self._form = form
        self._first = b""

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Sets the headers, without ``content-length``, because a stream's length is unknown."""
        super().init_headers(headers)
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    @classmethod
    async def begun(
        cls,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        form: StreamForm = OPENAI,
    ) -> EventStream:
        """An answer whose first event is ready. Raises an error that occurs before this event, so
        that the error can determine the HTTP status.

        A generator with a stream on the bus must begin here. A generator that has not begun cannot
        close its stream when the client disconnects.
        """
        answer = cls(events, headers, form)
        answer._first = await anext(events)
        return answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the generator ends or the client disconnects."""
        try:
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        numbered = NumberedEvents.of_task() if self._form.numbers else None
        part: bytes | None = self._first
        while part is not None:
            if numbered is not None:
                part = numbered.write(part)
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            part = await self._next(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, send: Send) -> bytes | None:
        """The next events, or the error that ends the stream; None at the end."""
        try:
            if not self._form.ping:
                return await anext(self._events, None)
            return await self._next_with_pings(send)
        except (ApiError, TokenbusError) as error:
            return self._form.failed(as_api_error(error))

    async def _next_with_pings(self, send: Send) -> bytes | None:
        ping = {"type": "http.response.body", "body": self._form.ping, "more_body": True}
        reading = asyncio.ensure_future(anext(self._events, None))
        try:
            while not (await asyncio.wait((reading,), timeout=PING_S))[0]:
                await send(ping)
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. If the client disconnects first, cancels ``work`` and raises
    ClientDisconnect.

    Answers that are sent as a whole use this function. So the bus does not generate tokens for a
    disconnected client.
    """
    # The current task runs ``work``, because a second task would delay the first token by two
    # passes of the event loop.
    task, gone = asyncio.current_task(), False
    assert task is not None

    def leave(done: asyncio.Task[None]) -> None:
        nonlocal gone
        if not done.cancelled():
            done.exception()  # A failed receive also means that the client has disconnected.
            gone = task.cancel()

    leaving = asyncio.ensure_future(_disconnected(receive))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == 1:
            raise ClientDisconnect from None
        raise
    finally:
        leaving.remove_done_callback(leave)
        leaving.cancel()
        if gone and task.cancelling():
            task.uncancel()
