"""``/v1/messages``: the assistant's next message, complete or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..bodies.leniency import Ignored
from ..bodies.reading import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.answer_turns import AnswerTurns, Arrived, Made
from ..conversation.answers import Piece
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Call, Text, Thinking
from ..conversation.requests import plan, prepared_of
from ..events import StreamForm, event, unless_disconnected
from ..generation.respond import respond
from ..json import json_response
from .answers import SIGNATURE, MessageAnswer, MessageAnswers
from .bodies import CountTokens, CreateMessage, TokenCount

PATH = "/v1/messages"
Change = tuple[int, Piece | MadeCall]
"""A change of a block: the index of the block, and the change of its part, or its call."""


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


PING = _event("ping")
STREAM = StreamForm(lambda error: event(error.body(PATH), "error"), PING)


async def create(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of events."""
    ignored = ignored_of(request)
    body = await read_body(request, CreateMessage, ignored)
    work = _begin(gateway_of(request), body, ignored)
    return await respond(request, work, ignored, stream=body.stream, form=STREAM)


async def count_tokens(request: Request) -> Response:
    """Answers with the number of tokens of a conversation's prompt."""
    ignored = ignored_of(request)
    body = await read_body(request, CountTokens, ignored)
    body.check()
    work = prepared_of(gateway_of(request), body, ignored)
    _, prepared = await unless_disconnected(request.receive, work)
    return json_response(TokenCount(len(prepared.ids)), headers=ignored.headers)


async def _begin(gateway: Gateway, body: CreateMessage, ignored: Ignored) -> MessageJob:
    body.check()
    turns = AnswerTurns.begin(await plan(gateway, body, ignored))
    return MessageJob(turns)


@dataclass
class MessageJob:
    """One request for a message."""

    turns: AnswerTurns
    _open: int | None = None
    """The index of the block that is open. At most one block is open at a time."""

    def __post_init__(self) -> None:
        self.answers = MessageAnswers(self.turns)

    async def whole(self) -> MessageAnswer:
        """The message when it has ended."""
        async with aclosing(self.changes()) as changes:
            async for _ in changes:
                pass
        return self.answers.message()

    async def changes(self) -> AsyncGenerator[list[Change], None]:
        """Yields the changes of blocks."""
        offset = 0
        async with aclosing(self.turns.events()) as events:
            async for one in events:
                match one:
                    case Arrived(turn, entries):
                        answer = turn.answer()
                        pieces = [piece for entry in entries for piece in answer.read(entry)]
                        yield [(offset + piece.place, piece) for piece in pieces]
                    case Made(turn):
                        offset += len(turn.parts)
                        yield list(enumerate(turn.made, offset))
                        offset += len(turn.made)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed message."""
        answers = self.answers
        started = False
        async with aclosing(self.changes()) as changes:
            async for batch in changes:
                parts = [part for change in batch for part in self._of(*change)]
                if not started:
                    parts = [_event("message_start", message=answers.started()), PING, *parts]
                    started = True
                if parts:
                    yield b"".join(parts)
        receipt = answers.receipt
        fields = {} if receipt is None else {"tokenbus": receipt}
        last = _event("message_delta", delta=answers.ended, usage=answers.usage, **fields)
        yield b"".join(self._end()) + last + _event("message_stop")

    def _of(self, place: int, change: Piece | MadeCall) -> Iterator[bytes]:
        """The events that report a change of the block with the index ``place``."""
        if isinstance(change, MadeCall) or change.begins:
            yield from self._end()
            self._open = place
            part = change if isinstance(change, MadeCall) else change.part
            block = self.answers.block(part, empty=True)
            yield _event("content_block_start", index=place, content_block=block)
        if isinstance(change, Piece) and change.text:
            yield _event("content_block_delta", index=place, delta=_delta(change))

    def _end(self) -> Iterator[bytes]:
        """The events that end the open block, if a block is open."""
        place, self._open = self._open, None
        if place is None:
            return
        if isinstance(self.turns.parts[place], Thinking):
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event("content_block_delta", index=place, delta=delta)
        yield _event("content_block_stop", index=place)


def _delta(piece: Piece) -> dict[str, str]:
    match piece.part:
        case Text():
            return {"type": "text_delta", "text": piece.text}
        case Thinking():
            return {"type": "thinking_delta", "thinking": piece.text}
        case Call():
            return {"type": "input_json_delta", "partial_json": piece.text}
