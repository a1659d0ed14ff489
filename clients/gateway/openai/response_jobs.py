"""One request for a response, while the gateway answers it: the events and the answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET

from ..bodies.leniency import Ignored
from ..context import Gateway
from ..conversation.answer_turns import AnswerTurns, Arrived, Ended, Made
from ..conversation.constraints import Receipt
from ..conversation.endings import check_some_succeeded
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Conversation, Fitting, Rendering
from ..conversation.requests import plan
from ..conversation.tools import Tool
from ..generation.counter import compose
from ..new_ids import new_id
from ..tokenization import num_items
from .chat_bodies import BusTool
from .fields import OPENAI_TEMPERATURE
from .response_bodies import (
    Failure,
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseAnswer,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
)
from .response_input import AdditionalTools, InputItems, to_turns
from .response_output import Output
from .response_tools import OfferedTools

T = TypeVar("T")


@dataclass
class ResponseQuestion:
    """A request for a response with its whole input (``AnswerRequest``)."""

    body: ResponsesRequest
    items: InputItems
    ignored: Ignored
    offered: OfferedTools = field(default_factory=OfferedTools)
    """The tools of the request, after ``to_conversation`` has been called."""

    bus_fields: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "max_tokens": "max_output_tokens",
    }
    call_prefix: ClassVar[str] = "call_"

    def __post_init__(self) -> None:
        self.model, self.limit, self.options = self.body.model, self.body.limit, self.body.options
        self.max_tool_turns = self.body.max_tool_turns
        self.max_tool_calls = self.body.max_tool_calls
        self._tools = [*(self.body.tools or ())]
        for item in self.items.input:
            self._tools += item.tools if isinstance(item, AdditionalTools) else ()
        self.num_items = num_items(self.items.input, self._tools)

    @property
    def bus_tools(self) -> list[str]:
        """The names of the tools of the bus that the model may call."""
        if self.body.tool_choice == "none":
            return []
        return [tool.name for tool in self._tools if isinstance(tool, BusTool)]

    def to_conversation(self, served: Mapping[str, Tool]) -> Conversation:
        """The conversation to continue. Raises ApiError 400."""
        body, choice = self.body, self.body.tool_choice
        self.offered = OfferedTools.of(self._tools, self.ignored, served)
        named = choice if choice is None or isinstance(choice, str) else f":{choice.name}"
        rules = body.answer_rules(named, body.parallel_tool_calls, bool(self.offered.tools))
        rules.max_thinking_tokens = body.max_thinking_tokens
        rendering = Rendering(effort_field="reasoning.effort")
        rendering.effort = body.reasoning.effort if body.reasoning is not None else None
        fitting = Fitting(body.max_output_tokens or 1 if body.truncation == "auto" else None)
        turns = to_turns(self.items.input, body.instructions, self.offered)
        return Conversation(turns, self.offered.tools, rules, rendering, fitting)


@dataclass
class ResponseJob:
    """One request for a response."""

    body: ResponsesRequest
    turns: AnswerTurns
    output: Output
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    stored: bool = True
    """Whether the response is stored."""
    before_calls: Callable[[], Awaitable[None]] | None = None
    """Called after the events of a turn and before its calls are made."""

    @classmethod
    async def begin(
        cls,
        gateway: Gateway,
        question: ResponseQuestion,
        id: str = "",
        recorded: Mapping[str, MadeCall] | None = None,
    ) -> ResponseJob:
        """Begins the generation. ``recorded``: the calls that an earlier gateway made for the
        response, by id; None if the response is not in the background. Raises ApiError."""
        body = question.body
        turns = AnswerTurns.begin(await plan(gateway, question, question.ignored, recorded))
        logprobs = (body.top_logprobs or 0) if body.with_logprobs else None
        job = cls(body, turns, Output(logprobs, question.offered), id or new_id("resp_"))
        job.stored = body.store is not False
        return job

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events up to the end of the last item. Each entry of a response in the background has
        its own events, even if several entries arrive together. Another gateway therefore generates
        the same events, and can continue them."""
        head = self._first_events()
        if self.body.background:
            yield head
            head = b""
        async with aclosing(self.turns.events()) as events:
            async for one in events:
                part = b""
                match one:
                    case Arrived(turn, entries):
                        groups = [[e] for e in entries] if self.body.background else [entries]
                        part = b"".join(self.output.feed(turn, group) for group in groups)
                    case Ended(turn):
                        if not self.turns.made:
                            # Other sequences, which are forks, are not part of the answer.
                            check_some_succeeded([turn.sequences[0]])
                        cut = self.turns.end == "length"
                        end = partial(self.output.end_turn, "incomplete" if cut else "completed")
                        part = await self.composed(end)
                    case Made(turn):
                        part = self.output.made(turn.made)
                if head + part:
                    yield head + part
                head = b""
                if isinstance(one, Ended) and one.calls and self.before_calls is not None:
                    await self.before_calls()
        status: Literal["completed", "incomplete"]
        status = "completed" if self.status == "completed" else "incomplete"
        yield await self.composed(lambda: self.output.end(status))

    async def last_event(self) -> bytes:
        """The event with the whole answer."""
        kind, answer = f"response.{self.status}", self.answer(self.status)
        return await self.composed(lambda: self.output.event(kind, response=answer))

    async def composed(self, make: Callable[[], T]) -> T:
        """The result of ``make``, which composes a part of the answer (``counter.compose``)."""
        turns = self.turns
        return await compose(turns.plan.gateway.large_answers, turns.counter.alternatives, make)

    def _first_events(self) -> bytes:
        event = self.output.event
        status: ResponseStatus = "queued" if self.body.background else "in_progress"
        parts = [event("response.created", response=self.answer(status))]
        if self.body.background:
            parts.append(event("response.queued", response=self.answer(status)))
        parts.append(event("response.in_progress", response=self.answer("in_progress")))
        return b"".join(parts)

    @property
    def status(self) -> Literal["completed", "incomplete", "failed"]:
        """The status of the finished response."""
        match self.turns.end:
            case "error":
                return "failed"
            case "length" | "max_tool_turns":
                return "incomplete"
        return "completed"

    def answer(self, status: ResponseStatus) -> ResponseAnswer:
        """The response with the output that has been generated so far."""
        body = self.body
        choice = body.tool_choice
        ended = status in ("completed", "incomplete", "failed")
        # The items of the answer report the calls, so the receipt does not.
        receipt = (self.turns.receipt(calls=False) if ended else None) or Receipt()
        error = Failure(receipt.code or "internal", receipt.error)
        incomplete = Incomplete("max_output_tokens")
        match receipt.code:
            case "max_tool_turns" | "context_length_exceeded" as reason:
                incomplete = Incomplete(reason)
        return ResponseAnswer(
            id=self.id,
            created_at=self.created,
            status=status,
            background=bool(body.background),
            error=error if status == "failed" else None,
            incomplete_details=incomplete if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.turns.plan.prepared.name,
            output=list(self.output.items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            max_tool_calls=body.max_tool_calls,
            previous_response_id=body.previous_response_id,
            temperature=OPENAI_TEMPERATURE if body.temperature is None else body.temperature,
            text={"format": _plain(body.text.format if body.text else None) or {"type": "text"}},
            tool_choice="auto" if choice is None else _plain(choice),
            tools=[_plain(tool) for tool in body.tools or ()],
            top_p=1.0 if body.top_p is None else body.top_p,
            store=self.stored,
            truncation=body.truncation or "disabled",
            usage=self._usage if ended else None,
            metadata=body.metadata or {},
            tokenbus=receipt if receipt != Receipt() else UNSET,
        )

    @property
    def _usage(self) -> ResponseUsage:
        counter = self.turns.counter
        return ResponseUsage(
            counter.prompt,
            InputDetails(counter.cached),
            counter.completion,
            OutputDetails(),
            counter.prompt + counter.completion,
        )


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)
