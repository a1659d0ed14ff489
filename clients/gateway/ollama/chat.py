"""``POST /api/chat`` and ``POST /api/generate``: an answer, complete or as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import Token
from ..bodies.leniency import Ignored
from ..bodies.reading import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.answers import Answer, AnswerPart, entry_text
from ..conversation.parts import Call, Text, Thinking
from ..conversation.planning import Prepared, prepare
from ..conversation.schemas import Checks
from ..errors import ApiError
from ..events import StreamForm
from ..generation.counter import Counter
from ..generation.generations import Generations, chat_generations
from ..generation.respond import respond
from ..json import encode
from ..tokenization import num_items
from .bodies import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    ChatRequest,
    GenerateRequest,
    OllamaAnswer,
    Options,
)
from .names import served_name

LINES = StreamForm(
    lambda error: encode({"error": error.message}) + b"\n",
    media_type="application/x-ndjson",
    numbers=False,
)
"""One JSON value on each line."""


@dataclass
class Job:
    """One request to ``/api/chat`` or ``/api/generate``."""

    name: str
    """The name of the model in the request."""
    chat: bool
    prepared: Prepared
    generations: Generations
    counter: Counter
    began: int = field(default_factory=time.monotonic_ns)
    first: int = 0
    """The time of the first token, in nanoseconds of ``time.monotonic_ns``; 0 before the first
    token."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the lines of a streamed answer."""
        async for pieces, end in _pieces(self):
            for part, text in pieces:
                yield encode(_line(self, [(part, text)])) + b"\n"
            if end.finish_reason is not None:
                yield encode(_ended(self, _line(self, []), end)) + b"\n"

    async def whole(self) -> OllamaAnswer:
        """The answer as one object."""
        found = [(pieces, end) async for pieces, end in _pieces(self)]
        parts = [piece for pieces, _ in found for piece in pieces]
        return _ended(self, _line(self, parts), found[-1][1])


async def chat(request: Request) -> Response:
    """Answers a conversation."""
    ignored = ignored_of(request)
    body = await read_body(request, ChatRequest, ignored)
    work = _begin(gateway_of(request), body, ignored)
    return await respond(request, work, ignored, stream=body.stream is not False, form=LINES)


async def generate(request: Request) -> Response:
    """Answers a prompt."""
    ignored = ignored_of(request)
    body = await read_body(request, GenerateRequest, ignored)
    work = _begin(gateway_of(request), body, ignored)
    return await respond(request, work, ignored, stream=body.stream is not False, form=LINES)


async def _begin(gateway: Gateway, body: ChatRequest | GenerateRequest, ignored: Ignored) -> Job:
    name = await served_name(gateway, body.model)
    if isinstance(body, GenerateRequest) and body.raw:
        model = await gateway.models.get(name)
        ids = await model.tokenize(body.prompt)
        checks = Checks(gateway.templates, None)
        prepared = Prepared(model, name, ids, None, body.constraint, checks)
    else:
        messages = body.messages if isinstance(body, ChatRequest) else []
        conversation = await gateway.models.tokenization.prepare(
            num_items(messages), lambda: body.to_conversation(ignored)
        )
        prepared = await prepare(gateway, name, conversation, ignored)
    counter = Counter()
    options = (body.options or Options()).generate(prepared.model.name, prepared.constraint)
    is_chat = isinstance(body, ChatRequest)
    fields = {"prompt": "messages" if is_chat else "prompt"}
    generations = chat_generations(gateway, prepared, options, counter, fields)
    return Job(body.model, is_chat, prepared, generations, counter)


async def _pieces(job: Job) -> AsyncGenerator[tuple[list[tuple[AnswerPart, str]], Token], None]:
    """Yields the new texts of the answer's parts, and the last entry so far. Calls are yielded when
    the answer has ended, because Ollama's clients expect the whole arguments as an object."""
    answer = Answer(job.prepared.form)
    async for _, entries in job.generations.batches():
        job.first = job.first or time.monotonic_ns()
        await job.prepared.checks.read(entries)
        text = "".join(entry_text(answer.form, entry) for entry in entries)
        pieces = answer.feed(text)
        end = entries[-1]
        if end.finish_reason is not None:
            pieces += answer.end()
            if end.finish_reason == "error":
                raise ApiError(400, end.error or "the answer failed", code=end.code)
        shown: list[tuple[AnswerPart, str]] = [
            (p.part, p.text) for p in pieces if not isinstance(p.part, Call)
        ]
        if end.finish_reason is not None:
            shown += [(part, "") for part in answer.parts if isinstance(part, Call)]
        yield shown, end


def _line(job: Job, pieces: list[tuple[AnswerPart, str]]) -> OllamaAnswer:
    """A line with consecutive pieces of the answer."""
    text = "".join(text for part, text in pieces if isinstance(part, Text))
    thinking = "".join(text for part, text in pieces if isinstance(part, Thinking)) or UNSET
    created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line = OllamaAnswer(model=job.name, created_at=created, done=False)
    if not job.chat:
        line.response, line.thinking = text, thinking
        return line
    calls = list(_calls(part for part, _ in pieces))
    line.message = AnsweredMessage(text, thinking=thinking, tool_calls=calls or UNSET)
    return line


def _calls(parts: Iterator[AnswerPart]) -> Iterator[AnsweredCall]:
    for part in parts:
        if isinstance(part, Call):
            yield AnsweredCall(AnsweredFunction(part.name, _arguments(part.arguments)))


def _arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as an object; empty if the answer was cut off inside them."""
    if isinstance(given, dict):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ended(job: Job, line: OllamaAnswer, end: Token) -> OllamaAnswer:
    """The last line: the reason for the end, the counts and the durations."""
    now = time.monotonic_ns()
    line.done = True
    line.done_reason = "length" if end.finish_reason == "length" else "stop"
    line.total_duration, line.load_duration = now - job.began, 0
    line.prompt_eval_count, line.eval_count = job.counter.prompt, job.counter.completion
    line.prompt_eval_duration = job.first - job.began
    line.eval_duration = now - job.first
    return line
