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
from ..conversation.answer_turns import AnswerTurns, Arrived
from ..conversation.answers import AnswerPart
from ..conversation.endings import check_some_succeeded
from ..conversation.parts import Call, of_kind, text_of, thinking_of
from ..conversation.planning import Prepared
from ..conversation.requests import plan
from ..generation.counter import check_alternatives, compose
from ..generation.respond import respond
from ..new_ids import new_id
from .chat_bodies import AnsweredMessage, ChatChoice, ChatCompletion, ChatRequest
from .chat_chunks import ChatChunks, reason_of
from .logprobs import ChatLogprobs, Sampled
from .messages import CalledFunction, MessageCall
from .prompt_logprobs import PromptLogprobs, prompt_logprobs
from .token_fields import TokenReports, set_fields
from .usage import Usage


async def chat_completions(request: Request) -> Response:
    """Answers with a message, as one object or as a stream of chunks."""
    ignored = ignored_of(request)
    body = await read_body(request, ChatRequest, ignored)
    work = _begin(gateway_of(request), body, ignored)
    return await respond(request, work, ignored, stream=body.stream)


async def _begin(gateway: Gateway, body: ChatRequest, ignored: Ignored) -> ChatJob:
    body.check()
    planned = await plan(gateway, body, ignored)
    prepared = planned.prepared
    if body.prompt_logprobs is not None:
        planned.counter.alternatives = len(prepared.ids) * (1 + body.prompt_logprobs)
        check_alternatives(planned.counter.alternatives)
    # The names of special tokens are added only to an answer without parts. In an answer with
    # parts, ``PartReader`` would read the added names as beginnings of parts.
    planned.shown = body.shown_text(prepared.model, special=prepared.form is None)
    job = ChatJob(body, AnswerTurns.begin(planned))
    if body.prompt_logprobs is not None:
        try:
            job.prompt_logprobs = await prompt_logprobs(
                gateway, prepared.model, prepared.ids, body.prompt_logprobs
            )
        except BaseException:
            job.turns.close()
            raise
    return job


@dataclass
class ChatJob:
    """One request for a chat's next message."""

    body: ChatRequest
    turns: AnswerTurns
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> ChatCompletion:
        """The answer as one object."""
        turns, prepared = self.turns, self.turns.plan.prepared
        await turns.read()
        sequences = [*turns.turns[0].sequences.values()]
        if not turns.made:
            check_some_succeeded(sequences)
        choices = await compose(
            turns.plan.gateway.large_answers,
            turns.counter.alternatives,
            lambda: [self._choice(one) for one in sequences],
        )
        return ChatCompletion(
            self.id,
            "chat.completion",
            self.created,
            prepared.name,
            choices,
            Usage.of(turns.counter),
            prepared.ids if self.body.return_token_ids else UNSET,
            self.prompt_logprobs,
        )

    def _choice(self, first: GeneratedSequence) -> ChatChoice:
        """A choice. Its message has the texts and the thinking of all turns, and the calls of the
        client's functions. ``first``: the sequence of the first turn."""
        body, turns, seq = self.body, self.turns.turns, first.seq
        parts = [part for turn in turns for part in turn.answer(seq).parts]
        message = message_of_parts([part for part in parts if not self.turns.is_served(part)])
        if body.functions and message.tool_calls is not UNSET:
            message.function_call = message.tool_calls[0].function
            message.tool_calls = UNSET
        logprobs = None
        if body.logprobs:
            tops, model = body.top_logprobs or 0, self.turns.plan.prepared.model
            ended = [turn.sequences[seq] for turn in turns if seq in turn.sequences]
            logprobs = ChatLogprobs.of(model, [Sampled.of(one) for one in ended], tops)
        reason = reason_of(self.turns.end_of(seq), bool(body.functions))
        choice = ChatChoice(seq, message, logprobs, reason, self.turns.receipt(seq) or UNSET)
        set_fields(choice, TokenReports(body).of_sequence(first))
        return choice

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the chunks of a streamed answer."""
        chunks = ChatChunks(self.id, self.created, self.body, self.turns)
        async with aclosing(self.turns.events()) as events:
            async for one in events:
                if isinstance(one, Arrived) and (part := chunks.write(one.turn, one.entries)):
                    yield part
        yield chunks.end()


def message_of(prepared: Prepared, sequence: GeneratedSequence) -> AnsweredMessage:
    """The message that a finished sequence contains."""
    return message_of_parts(prepared.answer_of(sequence).parts)


def message_of_parts(parts: Sequence[AnswerPart]) -> AnsweredMessage:
    """The message with the parts of an answer."""
    calls = [
        MessageCall(
            id=call.id, function=CalledFunction(name=call.name, arguments=str(call.arguments))
        )
        for call in of_kind(parts, Call)
    ]
    return AnsweredMessage(
        "assistant",
        text_of(parts) or (None if calls else ""),
        None,
        thinking_of(parts) or UNSET,
        calls or UNSET,
    )
