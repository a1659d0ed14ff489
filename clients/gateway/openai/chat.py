"""``POST /v1/chat/completions``: the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ... import GeneratedSequence, GenerateOptions
from ..bodies import ignored_header, read_body
from ..context import Gateway, gateway_of
from ..events import unless_disconnected
from ..json import json_response
from ..models import ServedModel
from ..templates import template_of
from ..tool_calls import Arguments, CallBegin, CallForm, CallReader, Text
from .chat_bodies import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
)
from .chat_chunks import ChatChunks
from .choices import check_some_succeeded, finish_reason, receipt_of
from .constraints import Constraint
from .conversations import prompt_ids
from .fields import new_id
from .generations import Generations, begun
from .logprobs import ChatLogprobs, Sampled, token_logprobs
from .messages import for_template
from .tools import for_template as tools_for_template
from .usage import Counter


@dataclass
class ChatJob:
    """One request for a chat's next message."""

    body: ChatRequest
    model: ServedModel
    constraint: Constraint | None
    form: CallForm | None
    """How the answer calls functions, if it may."""
    generations: Generations
    counter: Counter
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))


async def chat_completions(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of chunks."""
    body = await read_body(request, ChatRequest)
    job = await unless_disconnected(request.receive, _begin(gateway_of(request), body))
    headers = ignored_header(body.ignored())
    if body.stream:
        return await begun(request, _events(job), headers)
    answer = await unless_disconnected(request.receive, _answer(job))
    return json_response(answer, headers=headers)


async def _begin(gateway: Gateway, body: ChatRequest) -> ChatJob:
    body.check()
    model = await gateway.models.get(body.model)
    calling = body.calling(template_of(model) if body.chat_template is None else body.chat_template)
    constraint = body.own_constraint if calling is None else calling.constraint
    options = body.options(constraint)
    messages = for_template(body.messages)
    tools = tools_for_template(body.functions)
    ids = await prompt_ids(gateway, model, messages, tools, body)
    counter = Counter()
    fields = {"prompt": "messages"}
    generations = chat_generations(gateway, model, ids, options, constraint, counter, fields)
    form = calling.form if calling is not None else None
    return ChatJob(body, model, constraint, form, generations, counter)


def chat_generations(
    gateway: Gateway,
    model: ServedModel,
    ids: list[int],
    options: GenerateOptions,
    constraint: Constraint | None,
    counter: Counter,
    fields: dict[str, str],
) -> Generations:
    """Begins the answer to a conversation, by default as long as the context has room for.

    ``fields`` are the names that the fields of the bus have in the request's body.
    """
    options.setdefault("max_tokens", max(1, model.info.context_length - len(ids)))
    return Generations(gateway.client, [ids], fields, constraint, counter, **options)


async def _answer(job: ChatJob) -> ChatCompletion:
    [sequences] = await job.generations.wait()
    check_some_succeeded(sequences)
    choices = [_choice(job, sequence) for sequence in sequences]
    return ChatCompletion(
        job.id,
        "chat.completion",
        job.created,
        job.model.name,
        choices,
        job.counter.usage(),
    )


def _choice(job: ChatJob, sequence: GeneratedSequence) -> ChatChoice:
    logprobs = None
    if job.body.logprobs:
        tops = job.body.top_logprobs or 0
        logprobs = ChatLogprobs(token_logprobs(job.model, Sampled.of(sequence), tops))
    text, calls = read_calls(job.form, sequence.text)
    answered = [
        AnsweredCall(new_id("call_"), "function", AnsweredFunction(name, arguments))
        for name, arguments in calls
    ]
    content = None if calls and not text else text
    return ChatChoice(
        sequence.seq,
        AnsweredMessage("assistant", content, None, answered or UNSET),
        logprobs,
        finish_reason(sequence.finish_reason, bool(calls)),
        receipt_of(job.constraint, sequence, None) or UNSET,
    )


def read_calls(form: CallForm | None, answer: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer outside calls, and the name and arguments of each call."""
    if form is None:
        return answer, []
    reader = CallReader(form)
    text = ""
    calls: list[tuple[str, str]] = []
    for part in (*reader.feed(answer), *reader.end()):
        match part:
            case Text(more):
                text += more
            case CallBegin(_, name):
                calls.append((name, ""))
            case Arguments(number, more):
                name, before = calls[number]
                calls[number] = name, before + more
    return text, calls


async def _events(job: ChatJob) -> AsyncGenerator[bytes, None]:
    chunks = ChatChunks(job.id, job.created, job.model, job.body, job.constraint, job.form)
    async for _, entries in job.generations.batches():
        if part := chunks.write(entries):
            yield part
    yield chunks.end(job.counter)
