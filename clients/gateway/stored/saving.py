"""Generates a response for a connected client, and stores the response when it has ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from ..bodies.leniency import Ignored
from ..context import Gateway
from ..errors import ApiError
from ..openai.response_bodies import ResponseAnswer, ResponsesRequest
from ..openai.response_jobs import ResponseJob, ResponseQuestion
from .database import Item, Stored
from .inputs import ResponseInput, read_input

MAX_COPIED_BYTES = 256 * 1024
"""Maximum number of bytes that a stored response copies from its request."""


@dataclass
class SavedJob:
    """One request for a response that is not in the background."""

    gateway: Gateway
    input: ResponseInput
    job: ResponseJob

    @classmethod
    async def begin(cls, gateway: Gateway, body: ResponsesRequest, ignored: Ignored) -> SavedJob:
        """Begins the generation. Raises ApiError."""
        given = await read_input(gateway, body, ignored)
        question = ResponseQuestion(body, given.items, ignored)
        return cls(gateway, given, await ResponseJob.begin(gateway, question))

    async def whole(self) -> ResponseAnswer:
        """The response when it has ended."""
        async with aclosing(self.job.events()) as events:
            async for _ in events:
                pass
        await self._store()
        return self.job.answer(self.job.status)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the response."""
        async with aclosing(self.job.events()) as events:
            async for part in events:
                yield part
        await self._store()
        yield await self.job.last_event()

    async def _store(self) -> None:
        """Stores the response. If storing fails, the field ``store`` of the answer is false."""
        job = self.job
        if not job.stored:
            return
        stored, output = await job.composed(
            lambda: (stored_answer(job, job.answer(job.status)), output_items(job))
        )
        items = [*self.input.given_items(), *output]
        try:
            job.stored = await self.gateway.stored.call(
                lambda database, user: database.save(user, stored, items)
            )
        except ApiError:
            job.stored = False


def check_copied(body: ResponsesRequest, size: int, ignored: Ignored) -> None:
    """Bounds the bytes that a stored response copies from its request, whose body has ``size``
    bytes. Beyond the bound, the response is not stored. Raises ApiError 413 instead if the request
    has ``store`` or ``background``, or if the setting ``strict_fields`` is on."""
    if body.store is False or size <= MAX_COPIED_BYTES:
        return
    parts = (body.instructions, body.tools, body.tool_choice, body.text, body.metadata)
    copied = len(msgspec.json.encode(parts))
    if copied <= MAX_COPIED_BYTES:
        return
    if body.store or body.background or ignored.strict:
        raise ApiError(
            413,
            f"instructions, tools, tool_choice, text and metadata have {copied} bytes together; a "
            f"stored response copies at most {MAX_COPIED_BYTES} bytes of its request; send less, "
            "or send store=false and leave out background",
            code="too_large",
        )
    body.store = False
    ignored.add("store")


def stored_answer(job: ResponseJob, answer: ResponseAnswer, body: bytes | None = None) -> Stored:
    """A response for the database. ``body``: the request's body, if the response is generated in
    the background."""
    data = msgspec.json.encode(answer)
    previous, background = job.body.previous_response_id, bool(job.body.background)
    return Stored(job.id, answer.status, data, previous, background, body)


def output_items(job: ResponseJob) -> list[Item]:
    """The items of an answer for the database."""
    return [Item(one.id, msgspec.json.encode(one), False) for one in job.output.items]
