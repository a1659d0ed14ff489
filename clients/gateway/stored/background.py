"""Responses in the background: a task generates a response and stores its events, which any
gateway with the same run directory can read.

The task has a lease on the response, and renews the lease in the database. If the task's gateway
ends, the lease expires. The next gateway that receives a request for the response then takes over
the lease. That gateway generates the response with the same idempotency key (``idempotency.py``),
so it gets the same events, and skips the events that are already stored. Stored calls of the bus's
tools are not made again. A call whose result is not stored gets an error, because the call may have
been made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.decoders import json_decoder
from ....protocol.errors import TokenbusError
from ..bodies.leniency import Ignored
from ..bodies.reading import decode_in_turn, take_decoded
from ..context import Gateway, gateway_of
from ..conversation.made_calls import MadeCall
from ..errors import ApiError, as_api_error, from_tokenbus
from ..events import EventStream, event
from ..json import json_response
from ..new_ids import new_id
from ..openai.response_bodies import Failure, ResponsesRequest
from ..openai.response_jobs import ResponseJob, ResponseQuestion
from ..users.idempotency import current_named
from ..users.turns import current_user
from .database import MAX_RESPONSE_BYTES, Database, Item, Stored
from .inputs import ResponseInput, read_input, stored_input
from .recorded import recorded_calls
from .saving import output_items, stored_answer

log = logging.getLogger(__name__)

PATH = "/v1/responses"
RENEW_S = 1.0
"""Time in seconds after which a task without new events renews its lease."""
SAVE_S = 0.1
"""Minimum time in seconds between two writes of one response's events."""
GROUP_BYTES = 1024 * 1024
"""Maximum number of bytes of a group of several events. One transaction writes a group, and other
users wait for its end."""
POLL_S = 0.25
"""Interval in seconds at which this gateway reads new events of a response that another gateway
generates."""


async def background_response(
    request: Request, data: bytes, body: ResponsesRequest, ignored: Ignored
) -> Response:
    """Begins a response in the background, and answers with the response or, in a stream, with its
    events. If a request with an idempotency key is repeated, it receives the existing response."""
    gateway = gateway_of(request)
    id = new_id("resp_")
    found = await gateway.stored.call(lambda database, user: database.find(user, id))
    if found is None:
        given = await read_input(gateway, body, ignored)
        begun = gateway.stored.running.begun(current_user.get(), id)
        if begun is None:
            task = BackgroundTask(gateway, id, data)
            begun = task.start(body, given, ignored)
        # The response is generated even if this client closes its connection now.
        answer = await asyncio.shield(begun)
    else:
        answer = found.answer
    if body.stream:
        return EventStream(stored_events(gateway, id, -1), ignored.headers)
    return json_response(msgspec.Raw(answer), headers=ignored.headers)


async def adopt(gateway: Gateway, found: Stored) -> None:
    """Continues a response whose lease has expired, unless this gateway drains."""
    if not found.expired or gateway.draining:
        return
    owner = gateway.stored.owner
    taken = await gateway.stored.call(lambda database, user: database.adopt(user, found.id, owner))
    if taken is None or taken.body is None:
        return
    log.info("continuing the response %s, which has %d stored events", taken.id, taken.events)
    ignored = Ignored()
    body = await decode_in_turn(gateway, taken.body, ResponsesRequest, ignored)
    given = await stored_input(gateway, taken, ignored)
    BackgroundTask(gateway, taken.id, taken.body, taken).start(body, given, ignored)


async def stored_events(gateway: Gateway, id: str, after: int) -> AsyncGenerator[bytes, None]:
    """The events of a background response from number ``after`` + 1 to the response's end."""
    stored = gateway.stored
    user = current_user.get()
    held = 0
    while True:
        changes = stored.running.changes(user, id)
        found = await stored.call(lambda database, user: database.find(user, id, contents=False))
        if found is None:
            return
        groups = await stored.call(partial(_groups, id, after))
        size = sum(len(data) for _, data in groups)
        try:
            # Events stay in memory until the client has read them, so they count towards the user's
            # share of the memory.
            gateway.shares.take_bytes(max(0, size - held))
        except TokenbusError as error:
            yield event(from_tokenbus(error).body())
            return
        held = max(held, size)
        for first, data in groups:
            events = data.split(b"\n\n")[:-1]
            if rest := events[max(0, after + 1 - first) :]:
                yield b"".join(one + b"\n\n" for one in rest)
            after = first + len(events) - 1
        if groups:
            continue
        if not found.active:
            return
        await adopt(gateway, found)
        if changes is None:
            await asyncio.sleep(POLL_S)
        else:
            await changes.wait()


def _groups(id: str, after: int, database: Database, user: str) -> list[tuple[int, bytes]]:
    return database.events(user, id, after)


class LeaseLostError(Exception):
    """The response was cancelled or deleted, or another gateway generates it."""


@dataclass
class _Unsaved:
    """The events of a response that are not stored yet."""

    first: int = 0
    """The number that the first event of ``events`` has within the response."""
    skipped: int = 0
    """Number of events that are still to be skipped, because an earlier gateway stored them."""
    events: list[bytes] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, part: bytes) -> None:
        """Adds the events of ``part`` that are not stored. Raises ApiError 413 at an event that is
        too large to be stored."""
        events = part.split(b"\n\n")[:-1]
        new = events[self.skipped :]
        self.skipped -= len(events) - len(new)
        self.arrived.set()
        for one in new:
            if len(one) > MAX_RESPONSE_BYTES:
                raise _too_large(len(one), "an event")
            self.events.append(one)

    def add_failure(self, answer: dict[str, Any]) -> None:
        """Adds the event ``response.failed``. ``answer``: the failed response."""
        number = self.first + len(self.events)
        self.skipped = 0
        fields = {"type": "response.failed", "sequence_number": number, "response": answer}
        self.add(event(fields, "response.failed"))

    def take(self) -> tuple[int, bytes, int]:
        """Removes the next event, and further events within ``GROUP_BYTES``. Returns the number of
        the first event within the response, the events, and their count."""
        first, count, size = self.first, 0, 0
        for one in self.events:
            size += len(one) + 2
            if count and size > GROUP_BYTES:
                break
            count += 1
        events, self.events = self.events[:count], self.events[count:]
        self.first += count
        if not self.events:
            self.arrived.clear()
        return first, b"".join(one + b"\n\n" for one in events), count


class BackgroundTask:
    """Generates one response, for the user of the HTTP request that begins or continues it."""

    def __init__(self, gateway: Gateway, id: str, data: bytes, taken: Stored | None = None) -> None:
        """``data``: the body of the request. ``taken``: the response, if another gateway has begun
        it."""
        self.user = current_user.get()
        self.begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """Receives the response as it is first stored (status ``queued``), or the error if the
        response cannot begin."""
        self._gateway = gateway
        self._stored = gateway.stored
        self._id = id
        self._data = data
        self._taken = taken
        events = 0 if taken is None else taken.events
        self._unsaved = _Unsaved(events, events)
        self._saving = asyncio.Lock()
        """Held while events are stored, so that they are stored in their order."""

    def start(
        self, body: ResponsesRequest, given: ResponseInput, ignored: Ignored
    ) -> asyncio.Future[bytes]:
        """Begins to generate the response; returns ``begun``."""
        work = self._run(body, given, ignored)
        self._stored.running.start(self.user, self._id, work, self.begun)
        return self.begun

    async def _run(self, body: ResponsesRequest, given: ResponseInput, ignored: Ignored) -> None:
        """Generates the response until it is finished, has failed or is cancelled."""
        named = self._gateway.named.of_background(self._id, self._unsaved.first)
        named.read(PATH, self._data)
        current_named.set(named)
        try:
            with self._gateway.shares.request():
                self._gateway.shares.take_bytes(given.size)
                await take_decoded(self._gateway, self._data)
                recorded = await self._recorded()
                question = ResponseQuestion(body, given.items, ignored)
                job = await ResponseJob.begin(self._gateway, question, self._id, recorded)
                job.before_calls = self._save
                with closing(job.turns):
                    await self._begin(job, given)
                    await self._generate(job)
        except LeaseLostError:
            log.info("the response %s was cancelled, deleted or taken over", self._id)
        except Exception as error:
            await self._fail(error)
        except asyncio.CancelledError:
            await self._stored.call(self._release)
            raise
        finally:
            self.begun.cancel()
            await named.close(self._gateway.shares.leaving)

    async def _begin(self, job: ResponseJob, given: ResponseInput) -> None:
        if self._taken is not None:
            job.created = json_decoder(_Head).decode(self._taken.answer).created_at
            return
        stored = stored_answer(job, job.answer("queued"), self._data)
        items = given.given_items()
        owner = self._stored.owner
        if not await self._stored.call(lambda db, user: db.save(user, stored, items, owner)):
            raise ApiError(
                413,
                f"the request and its items have more than {MAX_RESPONSE_BYTES} bytes together; "
                "send less, or leave out background",
                code="too_large",
            )
        self.begun.set_result(stored.answer)

    async def _generate(self, job: ResponseJob) -> None:
        unsaved = self._unsaved
        reading = asyncio.ensure_future(self._read(job))
        try:
            while not reading.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(unsaved.arrived.wait(), RENEW_S)
                await self._save()
                await asyncio.wait((reading,), timeout=SAVE_S)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        last = await job.last_event()
        stored, items = await job.composed(
            lambda: (stored_answer(job, job.answer(job.status)), output_items(job))
        )
        size = len(stored.answer) + sum(len(one.data) for one in items)
        if size > MAX_RESPONSE_BYTES:
            raise _too_large(size, "an answer")
        if unsaved.events:
            await self._save()
        unsaved.add(last)
        await self._finish(stored, items)

    async def _read(self, job: ResponseJob) -> None:
        try:
            async for part in job.events():
                self._unsaved.add(part)
        finally:
            self._unsaved.arrived.set()

    async def _recorded(self) -> dict[str, MadeCall]:
        """The calls that an earlier gateway began for this response, by their ids."""
        found: dict[str, MadeCall] = {}
        read = 0
        while self._taken is not None and read < self._taken.events:
            groups = await self._stored.call(partial(_groups, self._id, read - 1))
            if not groups:
                break
            for first, data in groups:
                events = data.split(b"\n\n")[:-1]
                found |= recorded_calls(events)
                read = first + len(events)
        return found

    async def _save(self) -> None:
        """Stores the events that have arrived, in groups. Renews the lease even if no event has
        arrived."""
        async with self._saving:
            end = self._unsaved.first + len(self._unsaved.events)
            more = True
            while more:
                await self._save_group(*self._unsaved.take())
                more = self._unsaved.first < end

    async def _save_group(self, first: int, events: bytes, count: int) -> None:
        owner = self._stored.owner
        kept = await self._stored.call(
            lambda db, user: db.append(user, self._id, owner, first, events, count)
        )
        self._check_kept(kept)

    async def _finish(self, response: Stored, items: list[Item]) -> None:
        first, events, count = self._unsaved.take()
        owner = self._stored.owner
        kept = await self._stored.call(
            lambda db, user: db.finish(user, response, owner, items, first, events, count)
        )
        self._check_kept(kept)

    def _check_kept(self, kept: bool) -> None:
        self._stored.running.notify(self.user, self._id)
        if not kept:
            raise LeaseLostError

    async def _fail(self, error: Exception) -> None:
        """Reports an error to the HTTP request, or in the response if the request was answered."""
        if self._taken is None and not self.begun.done():
            self.begun.set_exception(error)
            return
        if isinstance(error, ApiError | TokenbusError):
            error = as_api_error(error)
        else:
            log.error("the response %s failed", self._id, exc_info=error)
            error = ApiError(500, "an internal error of the gateway", code="internal")
        failure = Failure(error.code or error.type, error.message)
        try:
            found = await self._stored.call(lambda db, user: db.find(user, self._id))
            if found is None:
                return
            answer = msgspec.json.decode(found.answer)
            answer |= {"status": "failed", "error": failure}
            found.status, found.answer = "failed", msgspec.json.encode(answer)
            if self._unsaved.events:
                await self._save()
            self._unsaved.add_failure(answer)
            await self._finish(found, [])
        except (ApiError, LeaseLostError) as second:
            log.warning("the failure of the response %s is not stored: %s", self._id, second)

    def _release(self, database: Database, user: str) -> None:
        database.release(user, self._id, self._stored.owner)


def _too_large(size: int, what: str) -> ApiError:
    return ApiError(
        413,
        f"the response has {what} with {size} bytes; at most {MAX_RESPONSE_BYTES} are allowed in "
        "the background; ask for fewer logprobs or tokens, or leave out background",
        code="too_large",
    )


class _Head(Struct):
    """The part of a stored response that a gateway needs to continue the response."""

    created_at: int
