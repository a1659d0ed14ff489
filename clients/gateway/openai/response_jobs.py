"""One request for a response, while the gateway answers it: the conversation, the events and the
answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from ....protocol.messages import Token
from ..context import Gateway
from ..conversation.constraints import Receipt
from ..conversation.planning import Prepared, prepare
from ..errors import ApiError
from ..leniency import Ignored
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
from .response_input import InputItems, read_items
from .response_output import Output, Status
from .usage import Counter


@dataclass
class ResponseInput:
    """The input of one request for a response."""

    given: list[dict[str, Any]]
    """The items of the request, with ids."""
    items: InputItems
    """All items, decoded: first those of the response ``previous_response_id`` and of the responses
    before it, then those of the request."""

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

    @classmethod
    async def begin(
        cls,
        gateway: Gateway,
        body: ResponsesRequest,
        given: ResponseInput,
        ignored: Ignored,
        id: str = "",
    ) -> ResponseJob:
        """Begins the generation. Raises ApiError."""
        offered = body.offered(given.items, ignored)
        conversation = body.to_conversation(given.items, offered)
        prepared = await prepare(gateway, body.model, conversation, ignored)
        counter = Counter()
        fields = {"prompt": "input", "max_tokens": "max_output_tokens"}
        options = body.options(prepared.constraint)
        generations = chat_generations(gateway, prepared, options, counter, fields)
        logprobs = (body.top_logprobs or 0) if body.with_logprobs else None
        output = Output(prepared, logprobs, offered)
        job = cls(body, given, prepared, generations, counter, output, id or new_id("resp_"))
        job.stored = body.store is not False
        return job

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events up to the end of the last item. Each entry of a response in the background has
        its own events, even if several entries arrive together. Another gateway therefore generates
        the same events, and can continue them."""
        output = self.output
        head = self._first_events()
        if self.body.background:
            yield head
            head = b""
        async for _, entries in self.generations.batches():
            await self.prepared.checks.read(entries)
            if self.body.background:
                feeding = b"".join(output.feed([entry]) for entry in entries)
            else:
                feeding = output.feed(entries)
            if part := head + feeding:
                yield part
            head = b""
            ends = [e for e in entries if e.seq == 0 and e.finish_reason is not None]
            if ends:
                self.last = ends[0]
                _check(self.last)
        yield output.end(self.status)

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
    def status(self) -> Status:
        """The status of the finished response."""
        cut = self.last is not None and self.last.finish_reason == "length"
        return "incomplete" if cut else "completed"

    def answer(self, status: ResponseStatus, error: Failure | None = None) -> ResponseAnswer:
        """The response, as far as it is generated."""
        body = self.body
        choice = body.tool_choice
        ended = status in ("completed", "incomplete")
        return ResponseAnswer(
            id=self.id,
            created_at=self.created,
            status=status,
            background=bool(body.background),
            error=error,
            incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.prepared.model.name,
            output=list(self.output.items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
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
            tokenbus=_receipt(self) if ended else UNSET,
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
    return ResponseInput.of(given, context, ignored)


async def stored_input(gateway: Gateway, response: Stored, ignored: Ignored) -> ResponseInput:
    """The input of a stored response. Raises ApiError, for example if an earlier response is not
    stored any more."""
    found = await gateway.stored.call(lambda database, user: database.given(user, response.id))
    given = [msgspec.json.decode(data) for data in found]
    context: list[dict[str, Any]] = []
    if response.previous is not None:
        context = await context_of(gateway.stored, response.previous)
    return ResponseInput.of(given, context, ignored)


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
    parts."""
    kind = item.get("type") or "message"
    id = item.get("id")
    found = {"type": kind, "status": "completed", **item}
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


def _receipt(job: ResponseJob) -> Receipt | msgspec.UnsetType:
    receipt, constraint = job.output.receipt, job.prepared.constraint
    if job.last is not None:
        receipt.exact = job.last.exact
    if constraint is not None and job.last is not None and job.last.constraint is not None:
        receipt.constraint = constraint.label
        receipt.ended = job.last.constraint
        receipt.keywords = job.prepared.checks.outcomes.get(0, {})
    return receipt if receipt != Receipt() else UNSET
