"""``/v1/messages``: the assistant's next message, complete or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import TokenbusError
from ....protocol.messages import Token
from ... import AsyncStream, GenerateOptions
from ..bodies import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.answers import Piece
from ..conversation.parts import Call, Thinking
from ..conversation.planning import Prepared, prepare
from ..errors import ApiError, from_tokenbus
from ..events import EventStream, event, unless_disconnected
from ..field_types import kept_tokens, stops_of
from ..first_entries import first_entries
from ..json import json_response
from ..leniency import Ignored
from .answers import SIGNATURE, GrowingMessage, block_of
from .bodies import CountTokens, CreateMessage, Messages, TokenCount
from .conversation import to_conversation

PATH = "/v1/messages"
PING_S = 10.0
"""Seconds without a new entry after which a ``ping`` is sent, so that proxies do not close the
connection."""


async def create(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of events."""
    ignored = ignored_of(request)
    body = await read_body(request, CreateMessage, ignored)
    gateway = gateway_of(request)
    prepared = await unless_disconnected(request.receive, _prepared(gateway, body, ignored))
    stream = gateway.client.generate(prepared.ids, **_options(body, prepared))
    first = await first_entries(request, stream)
    message = GrowingMessage(prepared, body.max_tokens)
    if body.stream:
        return EventStream(_events(message, stream, first), ignored.headers)
    await unless_disconnected(request.receive, _read(message, stream, first))
    return json_response(message.message(), headers=ignored.headers)


async def count_tokens(request: Request) -> Response:
    """Answers with the number of tokens of a conversation's prompt."""
    ignored = ignored_of(request)
    body = await read_body(request, CountTokens, ignored)
    work = _prepared(gateway_of(request), body, ignored)
    prepared = await unless_disconnected(request.receive, work)
    return json_response(TokenCount(len(prepared.ids)), headers=ignored.headers)


async def _prepared(gateway: Gateway, body: Messages, ignored: Ignored) -> Prepared:
    if body.thread is not None:
        raise ApiError(
            400,
            "thread: messages are not stored; send the whole conversation as messages",
            code="thread_unsupported_request",
            param="thread",
        )
    return await prepare(gateway, body.model, to_conversation(body), ignored)


def _options(body: CreateMessage, prepared: Prepared) -> GenerateOptions:
    options: GenerateOptions = {
        "model": prepared.model.name,
        "text": True,
        "max_tokens": body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "stop": stops_of(body.stop_sequences),
        **kept_tokens(body.top_p, body.top_k),
    }
    return options if prepared.constraint is None else {**options, **prepared.constraint.options}


async def _read(message: GrowingMessage, stream: AsyncStream, entries: list[Token]) -> None:
    """Reads the answer to its end; raises TokenbusError."""
    try:
        while entries:
            await message.checks.read(entries)
            message.add(entries)
            entries = await stream.arrived()
    finally:
        stream.close()


async def _events(
    message: GrowingMessage, stream: AsyncStream, first: list[Token]
) -> AsyncGenerator[bytes, None]:
    try:
        start = {"type": "message_start", "message": message.started(first[0])}
        yield _event(start) + PING
        blocks = _Blocks(message)
        entries: list[Token] | None = first
        while entries:
            await message.checks.read(entries)
            if part := blocks.events(entries):
                yield part
            while (entries := await _arrived(stream)) is None:
                yield PING
        delta = {"type": "message_delta", "delta": message.ended, "usage": message.usage}
        if message.receipt is not None:
            delta["tokenbus"] = message.receipt
        yield blocks.end() + _event(delta) + _event({"type": "message_stop"})
    except TokenbusError as error:
        yield event(from_tokenbus(error).body(PATH), "error")
    finally:
        stream.close()


async def _arrived(stream: AsyncStream) -> list[Token] | None:
    """The next entries of a stream; None if no entry arrives within ``PING_S`` seconds."""
    try:
        async with asyncio.timeout(PING_S):
            return await stream.arrived()
    except TimeoutError:
        return None


class _Blocks:
    """The events of an answer's blocks. At most one block is open at a time."""

    def __init__(self, message: GrowingMessage) -> None:
        self._message = message
        self._open = -1

    def events(self, entries: list[Token]) -> bytes:
        """The events of some entries; empty if the entries do not change a block."""
        parts = []
        for piece in self._message.add(entries):
            if piece.begins:
                parts += [self.end(), _start(piece)]
                self._open = piece.place
            if piece.text:
                parts.append(_delta(piece))
        return b"".join(parts)

    def end(self) -> bytes:
        """The events that end the open block; empty if no block is open."""
        if self._open < 0:
            return b""
        stop = _event({"type": "content_block_stop", "index": self._open})
        if isinstance(self._message.answer.parts[self._open], Thinking):
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            change = {"type": "content_block_delta", "index": self._open, "delta": delta}
            return _event(change) + stop
        return stop


def _start(piece: Piece) -> bytes:
    block = block_of(piece.part, empty=True)
    return _event({"type": "content_block_start", "index": piece.place, "content_block": block})


def _delta(piece: Piece) -> bytes:
    delta = {"type": "text_delta", "text": piece.text}
    if isinstance(piece.part, Thinking):
        delta = {"type": "thinking_delta", "thinking": piece.text}
    elif isinstance(piece.part, Call):
        delta = {"type": "input_json_delta", "partial_json": piece.text}
    return _event({"type": "content_block_delta", "index": piece.place, "delta": delta})


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


PING = _event({"type": "ping"})
