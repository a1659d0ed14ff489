"""``/v1/messages``: the assistant's next message, complete or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import Code, TokenbusError, error_for
from ....protocol.messages import Token
from ... import GenerateOptions
from ..bodies.field_types import kept_tokens, stops_of
from ..bodies.leniency import Ignored
from ..bodies.reading import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.answers import Piece
from ..conversation.bus_tools import described
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Call, Conversation, Thinking
from ..conversation.planning import Prepared, prepare
from ..conversation.tool_turns import Arrived, Loop, Made, ModelTurn, ToolTurns
from ..errors import ApiError, from_tokenbus
from ..events import EventStream, event, unless_disconnected
from ..json import json_response
from ..openai.generations import Generations, chat_generations
from ..openai.usage import Counter
from ..tokenization import num_items
from .answers import SIGNATURE, GrowingMessage
from .bodies import CountTokens, CreateMessage, Messages, TokenCount
from .conversation import to_conversation

PATH = "/v1/messages"
PING_S = 10.0
"""Seconds without a new entry after which a ``ping`` is sent, so that proxies do not close the
connection."""


class Planned(NamedTuple):
    """A conversation and its prepared form."""

    conversation: Conversation
    prepared: Prepared


@dataclass
class MessageJob:
    """One request for a message."""

    message: GrowingMessage
    turns: ToolTurns


async def create(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of events."""
    ignored = ignored_of(request)
    body = await read_body(request, CreateMessage, ignored)
    job = await unless_disconnected(request.receive, _begin(gateway_of(request), body, ignored))
    if body.stream:
        events = _events(job)
        # The answer begins after the first event, so that a refusal can have an error status.
        first = await unless_disconnected(request.receive, anext(events))
        return EventStream(_pinged(first, events), ignored.headers)
    await unless_disconnected(request.receive, _read(job))
    return json_response(job.message.message(), headers=ignored.headers)


async def count_tokens(request: Request) -> Response:
    """Answers with the number of tokens of a conversation's prompt."""
    ignored = ignored_of(request)
    body = await read_body(request, CountTokens, ignored)
    work = _prepared(gateway_of(request), body, ignored)
    planned = await unless_disconnected(request.receive, work)
    return json_response(TokenCount(len(planned.prepared.ids)), headers=ignored.headers)


async def _prepared(gateway: Gateway, body: Messages, ignored: Ignored) -> Planned:
    if body.thread is not None:
        raise ApiError(
            400,
            "thread: messages are not stored; send the whole conversation as messages",
            code="thread_unsupported_request",
            param="thread",
        )
    served = await described(gateway, body.bus_tools) if body.bus_tools else {}
    conversation = await gateway.models.tokenization.prepare(
        num_items(body.messages, body.tools), lambda: to_conversation(body, served)
    )
    return Planned(conversation, await prepare(gateway, body.model, conversation, ignored))


async def _begin(gateway: Gateway, body: CreateMessage, ignored: Ignored) -> MessageJob:
    planned = await _prepared(gateway, body, ignored)
    counter = Counter()

    def begin(prepared: Prepared, max_tokens: int | None) -> Generations:
        options = _options(body, prepared)
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        return chat_generations(gateway, prepared, options, counter, {"prompt": "messages"})

    bounds = body.max_tokens, body.max_tool_turns
    loop = Loop(frozenset(body.bus_tools), begin, lambda: counter.completion, *bounds)
    first = ModelTurn(planned.prepared, begin(planned.prepared, None))
    turns = ToolTurns(gateway, planned.conversation, first, loop)
    return MessageJob(GrowingMessage(planned.prepared.name, turns, body.max_tokens), turns)


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


async def _read(job: MessageJob) -> None:
    """Reads the answer to its end; raises ApiError or TokenbusError."""
    async with aclosing(changes_of(job)) as changes:
        async for _ in changes:
            pass


async def changes_of(
    job: MessageJob,
) -> AsyncGenerator[tuple[list[Token], list[Piece]] | list[MadeCall], None]:
    """Adds the entries and calls of all turns to the message. Yields entries with the changes that
    they make, and the calls of each turn. Raises TokenbusError if the first entry is an error."""
    first = True
    async with aclosing(job.turns.events()) as events:
        async for one in events:
            match one:
                case Arrived(turn, entries):
                    if turn.answer is None:
                        job.message.begin_turn(turn)
                    begin = entries[0]
                    if first and begin.finish_reason == "error":
                        raise error_for(
                            begin.code or Code.INTERNAL, begin.error or "the sequence failed"
                        )
                    first = False
                    yield list(entries), job.message.add(entries)
                case Made(calls=calls):
                    job.message.add_made(calls)
                    yield calls


async def _events(job: MessageJob) -> AsyncGenerator[bytes, None]:
    message = job.message
    blocks = _Blocks(message)
    started = False
    async with aclosing(changes_of(job)) as changes:
        async for change in changes:
            parts = []
            if isinstance(change, list):
                parts.append(blocks.made(change))
            else:
                entries, pieces = change
                if not started:
                    start = {"type": "message_start", "message": message.started(entries[0])}
                    parts.append(_event(start) + PING)
                    started = True
                parts.append(blocks.events(pieces))
            if part := b"".join(parts):
                yield part
    delta = {"type": "message_delta", "delta": message.ended, "usage": message.usage}
    if message.receipt is not None:
        delta["tokenbus"] = message.receipt
    yield blocks.end() + _event(delta) + _event({"type": "message_stop"})


async def _pinged(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yields ``first`` and then ``events``, and a ping after each ``PING_S`` seconds without an
    event. If ``events`` raises an error, the last event reports this error."""
    reading: asyncio.Task[bytes | None] | None = None
    try:
        part: bytes | None = first
        while part is not None:
            yield part
            reading = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait((reading,), timeout=PING_S))[0]:
                yield PING
            part = reading.result()
    except ApiError as error:
        yield event(error.body(PATH), "error")
    except TokenbusError as error:
        yield event(from_tokenbus(error).body(PATH), "error")
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await events.aclose()


class _Blocks:
    """Makes the events of an answer's blocks. At most one block is open at a time."""

    def __init__(self, message: GrowingMessage) -> None:
        self._message = message
        self._open = -1

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """The events that report changes of blocks; empty if no block changes."""
        parts = []
        for piece in pieces:
            place = self._message.offset + piece.place
            if piece.begins:
                parts += [self.end(), self._start(place)]
            if piece.text:
                parts.append(_delta(piece, place))
        return b"".join(parts)

    def made(self, calls: Sequence[MadeCall]) -> bytes:
        """The events that report the results of a turn's calls. The results are the last blocks."""
        parts = []
        for place in range(self._message.offset - len(calls), self._message.offset):
            parts += [self.end(), self._start(place)]
        return b"".join(parts)

    def end(self) -> bytes:
        """The events that end the open block; empty if no block is open."""
        if self._open < 0:
            return b""
        place, self._open = self._open, -1
        stop = _event({"type": "content_block_stop", "index": place})
        if isinstance(self._message.parts[place], Thinking):
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            change = {"type": "content_block_delta", "index": place, "delta": delta}
            return _event(change) + stop
        return stop

    def _start(self, place: int) -> bytes:
        self._open = place
        block = self._message.block(self._message.parts[place], empty=True)
        return _event({"type": "content_block_start", "index": place, "content_block": block})


def _delta(piece: Piece, place: int) -> bytes:
    delta = {"type": "text_delta", "text": piece.text}
    if isinstance(piece.part, Thinking):
        delta = {"type": "thinking_delta", "thinking": piece.text}
    elif isinstance(piece.part, Call):
        delta = {"type": "input_json_delta", "partial_json": piece.text}
    return _event({"type": "content_block_delta", "index": place, "delta": delta})


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


PING = _event({"type": "ping"})
