"""``POST /v1/chat/completions``: the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ... import GeneratedSequence
from ..bodies.leniency import Ignored
from ..bodies.reading import ignored_of, read_body
from ..context import Gateway, gateway_of
from ..conversation.answers import Answer, AnswerPart
from ..conversation.bus_tools import described
from ..conversation.constraints import Receipt
from ..conversation.endings import receipt_of
from ..conversation.made_calls import as_messages
from ..conversation.parts import Call, of_kind, text_of, thinking_of
from ..conversation.planning import Prepared, prepare
from ..conversation.tool_turns import Arrived, Loop, ModelTurn, ToolTurns
from ..events import unless_disconnected
from ..json import json_response
from ..new_ids import new_id
from ..tokenization import num_items
from .chat_bodies import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
)
from .chat_chunks import ChatChunks
from .choices import check_some_succeeded, finish_reason
from .generations import Generations, begun, chat_generations
from .logprobs import ChatLogprobs, Sampled, check_alternatives, compose, token_logprobs
from .prompt_logprobs import PromptLogprobs, prompt_logprobs
from .token_fields import TokenReports, set_fields
from .turn_chunks import TurnChunks
from .usage import Counter


@dataclass
class ChatJob:
    """One request for a chat's next message."""

    body: ChatRequest
    prepared: Prepared
    generations: Generations
    counter: Counter
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    tool_turns: ToolTurns | None = None
    """The turns of the answer if the request has tools of the bus, otherwise None."""
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))


async def chat_completions(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of chunks."""
    ignored = ignored_of(request)
    body = await read_body(request, ChatRequest, ignored)
    work = _begin(gateway_of(request), body, ignored)
    job = await unless_disconnected(request.receive, work)
    if body.stream:
        turns = job.tool_turns
        events = _events(job) if turns is None else _events_of_turns(job, turns)
        return await begun(request, events, ignored.headers)
    answer = await unless_disconnected(request.receive, _answer(job))
    return json_response(answer, headers=ignored.headers)


async def _begin(gateway: Gateway, body: ChatRequest, ignored: Ignored) -> ChatJob:
    body.check()
    served = await described(gateway, body.bus_tools) if body.bus_tools else {}
    if not served and body.max_tool_calls is not None:
        ignored.add("max_tool_calls")
    conversation = await gateway.models.tokenization.prepare(
        num_items(body.messages, body.tools), lambda: body.to_conversation(served)
    )
    prepared = await prepare(gateway, body.model, conversation, ignored)
    counter = Counter()
    if body.prompt_logprobs is not None:
        counter.alternatives = len(prepared.ids) * (1 + body.prompt_logprobs)
        check_alternatives(counter.alternatives)
    options = body.options(prepared.constraint)
    generations = chat_generations(gateway, prepared, options, counter, {"prompt": "messages"})
    # The names of special tokens are added only to an answer without parts. In an answer with
    # parts, ``PartReader`` would read the added names as beginnings of parts.
    generations.shown = body.shown_text(prepared.model, special=prepared.form is None)
    job = ChatJob(body, prepared, generations, counter)
    if served:
        first = ModelTurn(prepared, generations)
        loop = _loop(gateway, body, job)
        job.tool_turns = ToolTurns(gateway, conversation, first, loop)
    if body.prompt_logprobs is not None:
        try:
            job.prompt_logprobs = await prompt_logprobs(
                gateway.client, prepared.model, prepared.ids, body.prompt_logprobs
            )
        except BaseException:
            generations.close()
            raise
    return job


def _loop(gateway: Gateway, body: ChatRequest, job: ChatJob) -> Loop:
    def begin(prepared: Prepared, max_tokens: int | None) -> Generations:
        options = body.options(prepared.constraint)
        options.pop("min_tokens", None)
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        fields = {"prompt": "messages"}
        generations = chat_generations(gateway, prepared, options, job.counter, fields)
        generations.shown = job.generations.shown
        return generations

    bounds = body.limit, body.max_tool_turns, body.max_tool_calls
    return Loop(frozenset(body.bus_tools), begin, lambda: job.counter.completion, *bounds)


async def _answer(job: ChatJob) -> ChatCompletion:
    if (turns := job.tool_turns) is not None:
        async with aclosing(turns.events()) as events:
            async for _ in events:
                pass
        choices = await compose(job.counter.alternatives, lambda: [_choice_of_turns(job, turns)])
    else:
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
        job.prepared.name,
        choices,
        job.counter.usage(),
        ids,
        job.prompt_logprobs,
    )


async def _check(prepared: Prepared, sequence: GeneratedSequence) -> None:
    await prepared.checks.check(sequence.seq, prepared.whole_text(sequence))


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
        finish_reason(
            sequence.finish_reason, called, bool(job.body.functions), sequence.constraint
        ),
        receipt or UNSET,
    )
    fields = TokenReports(job.body).of_sequence(sequence, [])
    fields.prompt_token_ids = UNSET
    set_fields(choice, fields)
    return choice


def _choice_of_turns(job: ChatJob, turns: ToolTurns) -> ChatChoice:
    """The choice of an answer with several turns. Its message has the texts and the thinking of all
    turns, and the calls of the client's functions."""
    parts = [
        part
        for turn in turns.turns
        for part in turn.parts
        if not isinstance(part, Call) or not turns.is_served(part.name)
    ]
    logprobs = None
    if job.body.logprobs:
        tops = job.body.top_logprobs or 0
        found = [turn.sequence for turn in turns.turns if turn.sequence is not None]
        tokens = [token_logprobs(job.prepared.model, Sampled.of(one), tops) for one in found]
        logprobs = ChatLogprobs([each for of_turn in tokens for each in of_turn])
    reason, receipt = _end_of_turns(turns)
    return ChatChoice(0, message_of_parts(parts), logprobs, reason, receipt)


def _end_of_turns(turns: ToolTurns) -> tuple[str, Receipt]:
    """The finish reason and the receipt of an answer with several turns."""
    receipt = turns.receipt()
    if turns.end == "tool_calls":
        receipt.tool_messages = as_messages(turns.made)
    return "length" if turns.end == "max_tool_turns" else turns.end, receipt


def message_of(prepared: Prepared, sequence: GeneratedSequence) -> AnsweredMessage:
    """The message that a finished sequence contains."""
    answer = Answer(prepared.form)
    answer.feed(prepared.whole_text(sequence))
    answer.end()
    return message_of_parts(answer.parts)


def message_of_parts(parts: Sequence[AnswerPart]) -> AnsweredMessage:
    """The message with the parts of an answer."""
    calls = [
        AnsweredCall(call.id, "function", AnsweredFunction(call.name, str(call.arguments)))
        for call in of_kind(parts, Call)
    ]
    return AnsweredMessage(
        "assistant",
        text_of(parts) or (None if calls else ""),
        None,
        thinking_of(parts) or UNSET,
        calls or UNSET,
    )


async def _events_of_turns(job: ChatJob, turns: ToolTurns) -> AsyncGenerator[bytes, None]:
    chunks: TurnChunks | None = None
    async with aclosing(turns.events()) as events:
        async for one in events:
            if not isinstance(one, Arrived):
                continue
            if chunks is None or chunks.turn is not one.turn:
                chunks = TurnChunks(
                    job.id, job.created, job.body, one.turn, job.counter, turns.is_served, chunks
                )
            if part := chunks.write(one.entries):
                yield part
    assert chunks is not None
    yield chunks.last(*_end_of_turns(turns)) + chunks.end()


async def _events(job: ChatJob) -> AsyncGenerator[bytes, None]:
    chunks = ChatChunks(job.id, job.created, job.body, job.prepared, job.counter)
    async for _, entries in job.generations.batches():
        await job.prepared.checks.read(entries)
        if part := chunks.write(entries):
            yield part
    yield chunks.end()
