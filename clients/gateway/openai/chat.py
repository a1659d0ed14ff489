"""``POST /v1/chat/completions``: the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ... import GeneratedSequence, GenerateOptions
from ..answer_parts import AnswerForm, read_answer
from ..bodies import ignored_header, read_body
from ..context import Gateway, gateway_of
from ..events import unless_disconnected
from ..json import json_response
from ..models import ServedModel
from ..new_ids import new_id
from ..templates import template_of
from .answering import answering
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
from .generations import Generations, begun
from .logprobs import ChatLogprobs, Sampled, compose, token_logprobs
from .messages import for_template
from .tools import for_template as tools_for_template
from .usage import Counter


@dataclass
class ChatJob:
    """One request for a chat's next message."""

    body: ChatRequest
    model: ServedModel
    constraint: Constraint | None
    form: AnswerForm | None
    """The form of the answer; None: the answer is one text."""
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
    template = template_of(model) if body.chat_template is None else body.chat_template
    calling, own = body.calling, body.own_constraint
    messages = for_template(body.messages)
    tools = tools_for_template(body.functions)
    ids = await prompt_ids(gateway, model, messages, tools, body)
    how = answering(
        model,
        template,
        ids,
        calling,
        own,
        max_thinking_tokens=body.max_thinking_tokens,
        separate_reasoning=body.separate_reasoning is not False,
    )
    counter = Counter()
    fields = {"prompt": "messages"}
    options = body.options(how.constraint)
    generations = chat_generations(gateway, model, ids, options, how.constraint, counter, fields)
    return ChatJob(body, model, how.constraint, how.form, generations, counter)


def chat_generations(
    gateway: Gateway,
    model: ServedModel,
    ids: list[int],
    options: GenerateOptions,
    constraint: Constraint | None,
    counter: Counter,
    fields: dict[str, str],
) -> Generations:
    """Begins the answer to a conversation. The default maximum is the rest of the context.

    ``fields`` maps the bus's field names to the names in the request's body.
    """
    options.setdefault("max_tokens", max(1, model.info.context_length - len(ids)))
    return Generations(gateway.client, [ids], fields, constraint, counter, **options)


async def _answer(job: ChatJob) -> ChatCompletion:
    [sequences] = await job.generations.wait()
    check_some_succeeded(sequences)
    choices = await compose(
        job.counter.alternatives, lambda: [_choice(job, sequence) for sequence in sequences]
    )
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
    message = _message(job, sequence)
    return ChatChoice(
        sequence.seq,
        message,
        logprobs,
        finish_reason(sequence.finish_reason, message.tool_calls is not UNSET),
        receipt_of(job.constraint, sequence, None) or UNSET,
    )


def _message(job: ChatJob, sequence: GeneratedSequence) -> AnsweredMessage:
    if job.form is None:
        return AnsweredMessage("assistant", sequence.text)
    read = read_answer(job.form, job.form.whole_text(job.model, sequence))
    calls = [
        AnsweredCall(new_id("call_"), "function", AnsweredFunction(name, arguments))
        for name, arguments in read.calls
    ]
    return AnsweredMessage(
        "assistant",
        None if calls and not read.text else read.text,
        None,
        read.reasoning or UNSET,
        calls or UNSET,
    )


async def _events(job: ChatJob) -> AsyncGenerator[bytes, None]:
    chunks = ChatChunks(job.id, job.created, job.model, job.body, job.constraint, job.form)
    async for _, entries in job.generations.batches():
        if part := chunks.write(entries):
            yield part
    yield chunks.end(job.counter)
