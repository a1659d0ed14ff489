"""One request for a response, while the gateway answers it: the conversation, the events and the
answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from ....protocol.messages import Token
from ..bodies.leniency import Ignored, declared_fields
from ..context import Gateway
from ..conversation.bus_tools import described
from ..conversation.constraints import Receipt
from ..conversation.endings import is_cut
from ..conversation.made_calls import MadeCall
from ..conversation.planning import Prepared, prepare
from ..conversation.tool_turns import Arrived, Loop, Made, Making, ModelTurn, ToolTurns
from ..errors import ApiError
from ..new_ids import new_id
from ..stored.database import Item, Stored
from ..stored.references import context_of, resolved
from .fields import OPENAI_TEMPERATURE
from .generations import Generations, chat_generations
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
from .response_input import InputItem, InputItems, read_items
from .response_output import Output
from .response_tools import OfferedTools
from .usage import Counter


@dataclass
class ResponseInput:
    """The input of one request for a response."""

    given: list[dict[str, Any]]
    """The items of the request, with ids."""
    items: InputItems
    """All items, decoded: first the items of the earlier responses (``previous_response_id``), then
    the items of the request."""

    @classmethod
    def of(
        cls, given: list[dict[str, Any]], context: list[dict[str, Any]], ignored: Ignored
    ) -> ResponseInput:
        """Decodes the items. Raises ApiError 400."""
        own = read_items(given, ignored)
        # Earlier answers have reported the fields of these items that have no effect.
        earlier = read_items(context, Ignored()).input if context else []
        items = InputItems([*earlier, *own.input])
        return cls([_identified(item) for item in given], items)


@dataclass
class ResponseJob:
    """One request for a response."""

    body: ResponsesRequest
    input: ResponseInput
    prepared: Prepared
    generations: Generations
    counter: Counter
    output: Output
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    last: Token | None = None
    """The last entry of the answer's sequence, after it has arrived."""
    stored: bool = True
    """Whether the response is stored."""
    tool_turns: ToolTurns | None = None
    """The turns of the answer if the request has tools of the bus, otherwise None."""
    before_calls: Callable[[], Awaitable[None]] | None = None
    """Called after the events of a turn and before its calls are made."""

    @classmethod
    async def begin(
        cls,
        gateway: Gateway,
        body: ResponsesRequest,
        given: ResponseInput,
        ignored: Ignored,
        id: str = "",
        recorded: Mapping[str, MadeCall] | None = None,
    ) -> ResponseJob:
        """Begins the generation. ``recorded``: the calls that an earlier gateway made for the
        response, by id; None if the response is not in the background. Raises ApiError."""
        names = body.bus_tools(given.items)
        served = {}
        if names:
            served = await described(gateway, names, recorded=recorded is not None)
        elif body.max_tool_calls is not None:
            ignored.add("max_tool_calls")
        offered = OfferedTools.of(body.given_tools(given.items), ignored, served)
        conversation = await gateway.models.tokenization.prepare(
            len(given.items.input), lambda: body.to_conversation(given.items, offered)
        )
        prepared = await prepare(gateway, body.model, conversation, ignored)
        counter = Counter()
        generations = _begun(gateway, body, counter, prepared)
        logprobs = (body.top_logprobs or 0) if body.with_logprobs else None
        output = Output(prepared, logprobs, offered)
        job = cls(body, given, prepared, generations, counter, output, id or new_id("resp_"))
        job.stored = body.store is not False
        if served:
            begin = partial(_begun, gateway, body, counter)
            bounds = body.limit, body.max_tool_turns, body.max_tool_calls
            loop = Loop(frozenset(served), begin, lambda: counter.completion, *bounds)
            loop.recorded = recorded or {}
            first = ModelTurn(prepared, generations)
            job.tool_turns = ToolTurns(gateway, conversation, first, loop)
        return job

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events up to the end of the last item. Each entry of a response in the background has
        its own events, even if several entries arrive together. Another gateway therefore generates
        the same events, and can continue them."""
        head = self._first_events()
        if self.body.background:
            yield head
            head = b""
        parts = self._parts() if self.tool_turns is None else self._parts_of(self.tool_turns)
        async with aclosing(parts):
            async for feeding in parts:
                if part := head + feeding:
                    yield part
                head = b""
        yield self.output.end("completed" if self.status == "completed" else "incomplete")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        """The events of an answer of one turn."""
        async with aclosing(self.generations.batches()) as batches:
            async for _, entries in batches:
                await self.prepared.checks.read(entries)
                yield self._feed(entries)
                if self.last is not None:
                    _check(self.last)

    async def _parts_of(self, turns: ToolTurns) -> AsyncGenerator[bytes, None]:
        """The events of an answer whose tools the gateway calls."""
        async with aclosing(turns.events()) as events:
            async for one in events:
                match one:
                    case Arrived(turn, entries):
                        if turn.answer is None:
                            turn.answer = self.output.begin_turn(turn.prepared)
                            self.last = None
                        fed = self._feed(entries)
                        if self.last is not None:
                            if not turns.made:
                                _check(self.last)
                            fed += self.output.end_turn(self._status_of_turn(turn))
                        yield fed
                    case Making():
                        if self.before_calls is not None:
                            await self.before_calls()
                    case Made(calls=calls):
                        yield self.output.made(calls)

    def _feed(self, entries: Sequence[Token]) -> bytes:
        ends = [e for e in entries if e.seq == 0 and e.finish_reason is not None]
        self.last = ends[0] if ends else self.last
        if self.body.background:
            return b"".join(self.output.feed([entry]) for entry in entries)
        return self.output.feed(entries)

    def _status_of_turn(self, turn: ModelTurn) -> Literal["completed", "incomplete"]:
        called = turn.answer is not None and turn.answer.called
        return "incomplete" if self._is_cut(called) else "completed"

    def _is_cut(self, called: bool) -> bool:
        last = self.last
        return last is not None and is_cut(last.finish_reason, called, last.constraint)

    def last_event(self) -> bytes:
        """The event with the whole answer."""
        return self.output.event(f"response.{self.status}", response=self.answer(self.status))

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
        if self.tool_turns is None:
            return "incomplete" if self._is_cut(self.output.called) else "completed"
        match self.tool_turns.end:
            case "error":
                return "failed"
            case "length" | "max_tool_turns":
                return "incomplete"
        return "completed"

    def answer(self, status: ResponseStatus, error: Failure | None = None) -> ResponseAnswer:
        """The response with the output that has been generated so far."""
        body = self.body
        choice = body.tool_choice
        ended = status in ("completed", "incomplete", "failed")
        receipt = _receipt(self) if ended else Receipt()
        if status == "failed" and error is None:
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
            error=error,
            incomplete_details=incomplete if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.prepared.name,
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
            usage=_usage(self.counter) if ended else None,
            metadata=body.metadata or {},
            tokenbus=receipt if receipt != Receipt() else UNSET,
        )

    def stored_answer(self, answer: ResponseAnswer, body: bytes | None = None) -> Stored:
        """The response for the database. ``body``: the request's body, if the response is generated
        in the background."""
        return Stored(
            self.id,
            answer.status,
            msgspec.json.encode(answer),
            self.body.previous_response_id,
            bool(self.body.background),
            body,
        )

    def given_items(self) -> list[Item]:
        """The items of the request's input for the database."""
        return [Item(item["id"], msgspec.json.encode(item), True) for item in self.input.given]

    def output_items(self) -> list[Item]:
        """The items of the answer for the database."""
        return [Item(one.id, msgspec.json.encode(one), False) for one in self.output.items]


async def read_input(gateway: Gateway, body: ResponsesRequest, ignored: Ignored) -> ResponseInput:
    """The input of a request, with stored items in place of references. Raises ApiError."""
    given = await resolved(gateway.stored, _listed(body.input))
    context: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        context = await context_of(gateway.stored, body.previous_response_id)
    return await gateway.models.tokenization.prepare(
        len(given) + len(context), lambda: ResponseInput.of(given, context, ignored)
    )


async def stored_input(gateway: Gateway, response: Stored, ignored: Ignored) -> ResponseInput:
    """The input of a stored response. Raises ApiError, for example if an earlier response is not
    stored any more."""
    found = await gateway.stored.call(lambda database, user: database.given(user, response.id))
    given = [msgspec.json.decode(data) for data in found]
    context: list[dict[str, Any]] = []
    if response.previous is not None:
        context = await context_of(gateway.stored, response.previous)
    return await gateway.models.tokenization.prepare(
        len(given) + len(context), lambda: ResponseInput.of(given, context, ignored)
    )


def _listed(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An input as a list of items. A text becomes a message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


_PREFIXES = {
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


def _identified(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input in the form in which OpenAI lists it: with a type, an id and a list of
    parts. Fields that have no effect are left out."""
    kind = item.get("type", "message")
    id = item.get("id")
    fields = declared_fields({"type": kind, **item}, InputItem)
    found = {"type": kind, "status": item.get("status", "completed"), **fields}
    found["id"] = id if isinstance(id, str) and id else new_id(_PREFIXES.get(kind, "msg_"))
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": content}]
    return found


def _check(last: Token) -> None:
    """Raises ApiError if the answer's sequence failed. ``last``: the last entry of this sequence.
    Other sequences of the stream, which are forks, are not part of the answer."""
    if last.finish_reason == "error":
        raise ApiError(
            400, last.error or "the sequence failed", code=last.code or "controller_failed"
        )


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _usage(counter: Counter) -> ResponseUsage:
    return ResponseUsage(
        counter.prompt,
        InputDetails(counter.cached),
        counter.completion,
        OutputDetails(),
        counter.prompt + counter.completion,
    )


def _receipt(job: ResponseJob) -> Receipt:
    if job.tool_turns is not None and job.last is not None:
        receipt = job.tool_turns.receipt()
        # The items of the answer report the calls, so the receipt does not.
        receipt.tool_calls = []
        return receipt
    receipt, constraint = job.output.receipt, job.prepared.constraint
    if job.last is not None:
        receipt.exact = job.last.exact
    if constraint is not None and job.last is not None and job.last.constraint is not None:
        receipt.constraint = constraint.label
        receipt.ended = job.last.constraint
        receipt.keywords = job.prepared.checks.outcomes.get(0, {})
    return receipt


def _begun(
    gateway: Gateway,
    body: ResponsesRequest,
    counter: Counter,
    prepared: Prepared,
    max_tokens: int | None = None,
) -> Generations:
    """Begins a turn with at most ``max_tokens`` tokens. The default is the request's limit."""
    options = body.options(prepared.constraint)
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    fields = {"prompt": "input", "max_tokens": "max_output_tokens"}
    return chat_generations(gateway, prepared, options, counter, fields)
