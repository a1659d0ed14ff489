"""``/v1/messages``: the assistant's next message, complete or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import TokenbusError
from ....protocol.messages import Token
from ... import AsyncStream, GenerateOptions
from ..bodies import ignored_header, read_body
from ..context import Gateway, gateway_of
from ..errors import from_tokenbus
from ..events import EventStream, event, unless_disconnected
from ..first_entries import first_entries
from ..json import json_response
from ..models import ServedModel
from .answers import Answer, AnswerBlock, CallAnswer, TextAnswer, ThinkingAnswer
from .bodies import Conversation, CountTokens, CreateMessage, TokenCount
from .conversation import Answering, answering, prompt_ids

PATH = "/v1/messages"
PING_S = 10.0
"""Seconds without new text after which a ``ping`` is sent, so that proxies do not close the
answer."""


@dataclass(frozen=True)
class Prepared:
    """A conversation that is ready to be answered."""

    model: ServedModel
    ids: list[int]
    """The token ids of the prompt."""
    how: Answering


async def create(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of events."""
    body = await read_body(request, CreateMessage)
    gateway = gateway_of(request)
    found = await unless_disconnected(request.receive, _prepared(gateway, body))
    how, model = found.how, found.model.name
    stream = gateway.client.generate(found.ids, **_options(body, how, model))
    first = await first_entries(request, stream)
    answer = Answer(how.form, how.constraint, body.max_tokens)
    headers = ignored_header(body.ignored())
    if body.stream:
        return EventStream(_events(answer, model, stream, first), headers)
    await unless_disconnected(request.receive, _read(answer, stream, first))
    return json_response(answer.message(model), headers=headers)


async def count_tokens(request: Request) -> Response:
    """Answers with the number of tokens of a conversation's prompt."""
    body = await read_body(request, CountTokens)
    found = await unless_disconnected(request.receive, _prepared(gateway_of(request), body))
    return json_response(TokenCount(len(found.ids)), headers=ignored_header(body.ignored()))


async def _prepared(gateway: Gateway, body: Conversation) -> Prepared:
    model = await gateway.models.get(body.model)
    ids = await prompt_ids(gateway, model, body)
    return Prepared(model, ids, answering(model, body, ids))


def _options(body: CreateMessage, how: Answering, model: str) -> GenerateOptions:
    options: GenerateOptions = {
        "model": model,
        "text": True,
        "max_tokens": body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "stop": body.stop_sequences or [],
    }
    if body.top_p is not None:
        options["top_p"] = body.top_p
    if body.top_k is not None:
        options["top_k"] = max(0, body.top_k)
    if how.constraint is not None:
        options["controller"] = how.controller
        options["controller_arg"] = how.controller_arg
    return options


async def _read(answer: Answer, stream: AsyncStream, entries: list[Token]) -> None:
    """Reads the answer to its end; raises TokenbusError."""
    try:
        while entries:
            answer.add(entries)
            entries = await stream.arrived()
    finally:
        stream.close()


async def _events(
    answer: Answer, model: str, stream: AsyncStream, first: list[Token]
) -> AsyncGenerator[bytes, None]:
    try:
        start = {"type": "message_start", "message": answer.started(model, first[0])}
        yield _event(start) + PING
        blocks = _Blocks(answer)
        entries: list[Token] | None = first
        while entries:
            if part := blocks.events(entries):
                yield part
            while (entries := await _arrived(stream)) is None:
                yield PING
        delta = {"type": "message_delta", "delta": answer.ended, "usage": answer.usage}
        if answer.receipt is not None:
            delta["tokenbus"] = answer.receipt
        yield blocks.end() + _event(delta) + _event({"type": "message_stop"})
    except TokenbusError as error:
        yield event(from_tokenbus(error).body(PATH), "error")
    finally:
        stream.close()


async def _arrived(stream: AsyncStream) -> list[Token] | None:
    """The next entries; None if no entry arrives for some seconds."""
    try:
        async with asyncio.timeout(PING_S):
            return await stream.arrived()
    except TimeoutError:
        return None


class _Blocks:
    """The events of an answer's blocks. At most one block is open at a time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._open = -1

    def events(self, entries: list[Token]) -> bytes:
        """The events of some entries; empty if the entries do not change a block."""
        parts = []
        for number, text in self._answer.add(entries):
            block = self._answer.blocks[number]
            if number != self._open:
                parts += [self.end(), _start(number, block)]
                self._open = number
            if text:
                parts.append(_delta(number, block, text))
        return b"".join(parts)

    def end(self) -> bytes:
        """The event that ends the open block; empty without an open block."""
        if self._open < 0:
            return b""
        return _event({"type": "content_block_stop", "index": self._open})


def _start(number: int, block: AnswerBlock) -> bytes:
    empty: AnswerBlock = TextAnswer("")
    if isinstance(block, ThinkingAnswer):
        empty = ThinkingAnswer("")
    elif isinstance(block, CallAnswer):
        empty = CallAnswer(block.name, block.id)
    return _event({"type": "content_block_start", "index": number, "content_block": empty})


def _delta(number: int, block: AnswerBlock, text: str) -> bytes:
    delta = {"type": "text_delta", "text": text}
    if isinstance(block, ThinkingAnswer):
        delta = {"type": "thinking_delta", "thinking": text}
    elif isinstance(block, CallAnswer):
        delta = {"type": "input_json_delta", "partial_json": text}
    return _event({"type": "content_block_delta", "index": number, "delta": delta})


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


PING = _event({"type": "ping"})
