"""Collects the items of a response while it grows, and makes the events that report them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from ....protocol.decoders import json_decoder
from ....protocol.messages import Token
from ..conversation.answers import Answer, Piece, entry_text
from ..conversation.constraints import Receipt
from ..conversation.growing import GrowingChoices
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Call, Text, Thinking
from ..conversation.planning import Prepared
from ..events import event
from ..json import encode
from ..new_ids import new_id
from .logprobs import Sampled, TokenLogprob, token_logprobs
from .response_bodies import (
    AnsweredText,
    OutputBusCall,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ReasoningText,
)
from .response_tools import OfferedTools, ToolPlace, text_input

Status = Literal["completed", "incomplete"]


class Output:
    """The items of one response. ``feed`` and ``end`` change the items, and return the events that
    report the changes."""

    def __init__(
        self, prepared: Prepared, logprobs: int | None, offered: OfferedTools | None = None
    ) -> None:
        """``logprobs``: number of alternatives that are reported with each token, or None if the
        request does not ask for log-probabilities. ``offered``: the tools of the request."""
        self._offered = offered or OfferedTools()
        self._turn = -1
        """The number of the turn whose entries are added; -1 in an answer without tools of the
        bus."""
        self._custom: Call | None = None
        """The last call of a tool whose input is a text."""
        self.items: list[OutputItem] = []
        self._model = prepared.model
        self._form = prepared.form
        self._answer = Answer(prepared.form)
        self._logprobs = logprobs
        self._plain = prepared.constraint is None and logprobs is None
        """Whether all entries of a sequence except its last entry have only text."""
        self._choices = GrowingChoices(prepared.form)
        self._number = 0
        self.growing = False
        """Whether the last item is unfinished."""
        self.receipt = Receipt()

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event with the next sequence number."""
        fields = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(fields, kind)

    @property
    def called(self) -> bool:
        """Whether the answer has a call. If the request has tools of the bus, only the last turn
        counts."""
        return self._answer.called

    def begin_turn(self, prepared: Prepared) -> Answer:
        """Begins the next turn of an answer with tools of the bus; returns the parts of the
        turn."""
        self._turn += 1
        self._form = prepared.form
        self._answer = Answer(prepared.form)
        self._choices = GrowingChoices(prepared.form)
        return self._answer

    def feed(self, entries: Sequence[Token]) -> bytes:
        """Adds entries of the stream. Only the entries of sequence 0 belong to the answer."""
        parts = []
        text = ""
        for entry in entries:
            if entry.seq != 0:
                continue
            if self._plain and entry.finish_reason is None:
                text += entry_text(self._form, entry)
                continue
            removed, more, choice = self._choices.take(entry)
            if removed:
                parts += [*self._text_parts(text), self._take_back(removed)]
                text = ""
            text += more
            if self._logprobs is not None and entry.token is not None:
                sampled = Sampled()
                sampled.add(entry, more)
                parts += self._text_parts(
                    text, token_logprobs(self._model, sampled, self._logprobs)
                )
                text = ""
            self.receipt.logs, self.receipt.storage = choice.logs, choice.storage
        return b"".join([*parts, *self._text_parts(text)])

    def end_turn(self, status: Status) -> bytes:
        """Finishes the last item of a turn."""
        parts = [part for piece in self._answer.end() for part in self._piece(piece)]
        return b"".join([*parts, *self._finish(status)])

    def made(self, calls: Sequence[MadeCall]) -> bytes:
        """Adds the results of the gateway's calls to their items, and finishes these items."""
        by_id = {call.id: call for call in calls}
        parts: list[bytes] = []
        for place, item in enumerate(self.items):
            if isinstance(item, OutputBusCall) and item.id in by_id:
                call = by_id[item.id]
                item.status = "failed" if call.error else "completed"
                item.error = call.error or None
                item.output = None if call.error else call.text
                parts += self._finish_bus_call(item, place)
        return b"".join(parts)

    def end(self, status: Status) -> bytes:
        """Finishes all items. An answer without items receives an empty message."""
        parts = [self.end_turn(status)]
        for place, item in enumerate(self.items):
            if isinstance(item, OutputBusCall) and item.status == "in_progress":
                item.status = "incomplete"
                parts += self._finish_bus_call(item, place)
        if not self.items:
            parts += [*self._begin_message(), *self._finish(status)]
        return b"".join(parts)

    def _text_parts(self, text: str, logprobs: list[TokenLogprob] | None = None) -> list[bytes]:
        if self._form is not None:
            return [part for one in self._answer.feed(text) for part in self._piece(one)]
        return list(self._message(text, logprobs)) if text or logprobs else []

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        match piece.part:
            case Text():
                yield from self._message(piece.text, None)
            case Thinking():
                yield from self._thought(piece.text)
            case Call() if piece.begins:
                yield from self._finish("completed")
                item = self._called(piece.part)
                yield self._begin(item)
                if isinstance(item, OutputBusCall):
                    yield self.event("response.mcp_call.in_progress", **self._item_place)
            case Call() if isinstance(self.items[-1], OutputCustomCall):
                # ``_finish_custom`` decodes the input when all arguments have arrived.
                pass
            case Call():
                call = self._call
                call.arguments += piece.text
                kind = "mcp_call" if isinstance(call, OutputBusCall) else "function_call"
                yield self.event(
                    f"response.{kind}_arguments.delta", **self._item_place, delta=piece.text
                )

    def _called(self, call: Call) -> OutputCall | OutputCustomCall | OutputBusCall:
        """Makes the item for a call that begins."""
        if call.name in self._offered.bus:
            return OutputBusCall(id=call.id, name=call.name, arguments="", turn=self._turn)
        place = self._offered.places.get(call.name, ToolPlace(None, call.name))
        namespace = UNSET if place.namespace is None else place.namespace
        if call.name in self._offered.custom:
            self._custom = call
            id = new_id("ctc_")
            return OutputCustomCall(id, call.id, place.name, "", "in_progress", namespace)
        return OutputCall(new_id("fc_"), call.id, place.name, "", "in_progress", namespace)

    def _finish_custom(self, item: OutputCustomCall) -> Iterator[bytes]:
        assert self._custom is not None
        item.input = text_input(self._custom)
        place = self._item_place
        yield self.event("response.custom_tool_call_input.delta", **place, delta=item.input)
        yield self.event("response.custom_tool_call_input.done", **place, input=item.input)

    def _finish_bus_call(self, item: OutputBusCall, place: int) -> Iterator[bytes]:
        """The events that report the result of a call that the gateway has made."""
        kind = "completed" if item.status == "completed" else "failed"
        yield self.event(f"response.mcp_call.{kind}", item_id=item.id, output_index=place)
        yield self.event("response.output_item.done", output_index=place, item=item)

    def _thought(self, text: str) -> Iterator[bytes]:
        if not self.growing or not isinstance(self.items[-1], OutputReasoning):
            yield from self._finish("completed")
            # The item's first event must not have content, because some clients would store an
            # empty text and send it in a later request.
            thought = OutputReasoning(new_id("rs_"), "in_progress", [])
            yield self._begin(thought)
            thought.content.append(ReasoningText(""))
        item = self.items[-1]
        assert isinstance(item, OutputReasoning)
        item.content[0].text += text
        yield self.event("response.reasoning_text.delta", **self._place, delta=text)

    def _message(self, text: str, logprobs: list[TokenLogprob] | None) -> Iterator[bytes]:
        if not self.growing or not isinstance(self.items[-1], OutputMessage):
            yield from self._begin_message()
        part = self._content
        part.text += text
        part.logprobs += logprobs or []
        yield self.event(
            "response.output_text.delta", **self._place, delta=text, logprobs=logprobs or []
        )

    def _take_back(self, removed: int) -> bytes:
        part = self._content
        part.text = part.text[: len(part.text) - removed]
        return self.event(
            "response.output_text.delta",
            **self._place,
            delta="",
            logprobs=[],
            tokenbus={"backtrack": removed},
        )

    def _begin_message(self) -> Iterator[bytes]:
        yield from self._finish("completed")
        message = OutputMessage(new_id("msg_"), "in_progress", [])
        yield self._begin(message)
        message.content.append(AnsweredText("", [], []))
        yield self.event("response.content_part.added", **self._place, part=message.content[0])

    def _begin(self, item: OutputItem) -> bytes:
        self.items.append(item)
        self.growing = True
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _finish(self, status: Status) -> Iterator[bytes]:
        if not self.growing:
            return
        self.growing = False
        item = self.items[-1]
        if isinstance(item, OutputBusCall):
            # ``made`` finishes the item when the gateway has made the call.
            yield self.event(
                "response.mcp_call_arguments.done", **self._item_place, arguments=item.arguments
            )
            return
        item.status = status
        if isinstance(item, OutputCall):
            yield self.event(
                "response.function_call_arguments.done",
                **self._item_place,
                name=item.name,
                arguments=item.arguments,
            )
        elif isinstance(item, OutputCustomCall):
            yield from self._finish_custom(item)
        elif isinstance(item, OutputReasoning):
            [thought] = item.content
            yield self.event("response.reasoning_text.done", **self._place, text=thought.text)
        else:
            [part] = item.content
            yield self.event(
                "response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs
            )
            yield self.event("response.content_part.done", **self._place, part=part)
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    @property
    def _call(self) -> OutputCall | OutputBusCall:
        call = self.items[-1]
        assert isinstance(call, OutputCall | OutputBusCall)
        return call

    @property
    def _content(self) -> AnsweredText:
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        return message.content[0]

    @property
    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._item_place, "content_index": 0}


_ENDED_EARLY = "the gateway ended during the call, which may or may not have been made"


class _CallEvent(Struct):
    """The part of an event that ``recorded_calls`` reads."""

    type: str
    item: OutputItem | UnsetType = UNSET
    item_id: str = ""
    arguments: str = ""


def recorded_calls(events: Iterable[bytes]) -> dict[str, MadeCall]:
    """The gateway's calls in the stored events of a response, by their ids. A call without a result
    has an error."""
    found: dict[str, MadeCall] = {}
    for data in events:
        if b"mcp_call" not in data:
            continue
        one = json_decoder(_CallEvent).decode(data.partition(b"data: ")[2])
        item = one.item
        if one.type == "response.mcp_call_arguments.done":
            call = MadeCall(id=one.item_id, name="", arguments=one.arguments)
            call.error, call.code = _ENDED_EARLY, "worker_lost"
            found[call.id] = call
        elif one.type == "response.output_item.done" and isinstance(item, OutputBusCall):
            call = MadeCall(id=item.id, name=item.name, arguments=item.arguments)
            if item.output is None:
                call.error = item.error or _ENDED_EARLY
            else:
                call.result = Raw(encode(item.output))
            found[item.id] = call
    return found
