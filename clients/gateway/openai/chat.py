"""``POST /v1/chat/completions``: the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ... import GeneratedSequence, GenerateOptions
from ..bodies import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.answers import Answer
from ..conversation.parts import Call, of_kind, text_of, thinking_of
from ..conversation.planning import Prepared, prepare
from ..events import unless_disconnected
from ..json import json_response
from ..leniency import Ignored
from ..new_ids import new_id
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
from .generations import Generations, begun
from .logprobs import ChatLogprobs, Sampled, check_alternatives, compose, token_logprobs
from .prompt_logprobs import PromptLogprobs, prompt_logprobs
from .token_fields import TokenReports, set_fields
from .usage import Counter


@dataclass
class ChatJob:
    """One request for a chat's next message."""

    body: ChatRequest
    prepared: Prepared
    generations: Generations
    counter: Counter
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))


async def chat_completions(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of chunks."""
    ignored = ignored_of(request)
    body = await read_body(request, ChatRequest, ignored)
    work = _begin(gateway_of(request), body, ignored)
    job = await unless_disconnected(request.receive, work)
    if body.stream:
        return await begun(request, _events(job), ignored.headers)
    answer = await unless_disconnected(request.receive, _answer(job))
    return json_response(answer, headers=ignored.headers)


async def _begin(gateway: Gateway, body: ChatRequest, ignored: Ignored) -> ChatJob:
    body.check()
    prepared = await prepare(gateway, body.model, body.to_conversation(), ignored)
    counter = Counter()
    if body.prompt_logprobs is not None:
        counter.alternatives = len(prepared.ids) * (1 + body.prompt_logprobs)
        check_alternatives(counter.alternatives)
    options = body.options(prepared.constraint)
    generations = chat_generations(gateway, prepared, options, counter, {"prompt": "messages"})
    # The names of special tokens inside an answer with parts would be read as tags.
    generations.shown = body.shown_text(prepared.model, special=prepared.form is None)
    job = ChatJob(body, prepared, generations, counter)
    if body.prompt_logprobs is not None:
        try:
            job.prompt_logprobs = await prompt_logprobs(
                gateway.client, prepared.model, prepared.ids, body.prompt_logprobs
            )
        except BaseException:
            generations.close()
            raise
    return job


def chat_generations(
    gateway: Gateway,
    prepared: Prepared,
    options: GenerateOptions,
    counter: Counter,
    fields: dict[str, str],
) -> Generations:
    """Begins the answer to a conversation. Without ``max_tokens``, the answer may take the rest of
    the context.

    ``fields`` maps the bus's field names to the names in the request's body.
    """
    ids, constraint = prepared.ids, prepared.constraint
    options["model"] = prepared.model.name
    options.setdefault("max_tokens", rest_of_context(prepared))
    return Generations(gateway.client, [ids], fields, constraint, counter, **options)


def rest_of_context(prepared: Prepared) -> int:
    """Number of tokens for which the context has room after the prompt; at least 1."""
    return max(1, prepared.model.info.context_length - len(prepared.ids))


async def _answer(job: ChatJob) -> ChatCompletion:
    [sequences] = await job.generations.wait()
    check_some_succeeded(sequences)
    for sequence in sequences:
        await _check(job.prepared, sequence)
    choices = await compose(
        job.counter.alternatives, lambda: [_choice(job, sequence) for sequence in sequences]
    )
    ids = job.prepared.ids if job.body.return_token_ids else UNSET
    return ChatCompletion(
        job.id,
        "chat.completion",
        job.created,
        job.prepared.model.name,
        choices,
        job.counter.usage(),
        ids,
        job.prompt_logprobs,
    )


async def _check(prepared: Prepared, sequence: GeneratedSequence) -> None:
    await prepared.checks.check(sequence.seq, _whole_text(prepared, sequence))


def _whole_text(prepared: Prepared, sequence: GeneratedSequence) -> str:
    form = prepared.form
    return sequence.text if form is None else form.whole_text(prepared.model, sequence)


def _choice(job: ChatJob, sequence: GeneratedSequence) -> ChatChoice:
    logprobs = None
    if job.body.logprobs:
        tops = job.body.top_logprobs or 0
        logprobs = ChatLogprobs(token_logprobs(job.prepared.model, Sampled.of(sequence), tops))
    message = message_of(job.prepared, sequence)
    called = message.tool_calls is not UNSET
    if job.body.functions and message.tool_calls is not UNSET:
        message.function_call = message.tool_calls[0].function
        message.tool_calls = UNSET
    receipt = receipt_of(job.prepared.constraint, sequence, None)
    if receipt is not None:
        receipt.keywords = job.prepared.checks.outcomes.get(sequence.seq, {})
    choice = ChatChoice(
        sequence.seq,
        message,
        logprobs,
        finish_reason(sequence.finish_reason, called, older=bool(job.body.functions)),
        receipt or UNSET,
    )
    fields = TokenReports(job.body).of_sequence(sequence, [])
    fields.prompt_token_ids = UNSET
    set_fields(choice, fields)
    return choice


def message_of(prepared: Prepared, sequence: GeneratedSequence) -> AnsweredMessage:
    """The message of a whole sequence."""
    answer = Answer(prepared.form)
    answer.feed(_whole_text(prepared, sequence))
    answer.end()
    calls = [
        AnsweredCall(call.id, "function", AnsweredFunction(call.name, str(call.arguments)))
        for call in of_kind(answer.parts, Call)
    ]
    return AnsweredMessage(
        "assistant",
        text_of(answer.parts) or (None if calls else ""),
        None,
        thinking_of(answer.parts) or UNSET,
        calls or UNSET,
    )


async def _events(job: ChatJob) -> AsyncGenerator[bytes, None]:
    chunks = ChatChunks(job.id, job.created, job.body, job.prepared, job.counter)
    async for _, entries in job.generations.batches():
        await job.prepared.checks.read(entries)
        if part := chunks.write(entries):
            yield part
    yield chunks.end()
