"""Collects the items of a response while it grows, and makes the events that report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET

from ....protocol.messages import Token
from ..conversation.answer_turns import ModelTurn
from ..conversation.answers import AnswerPart, Piece
from ..conversation.growing import EntryStep, Step, Steps
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Call, Text, Thinking
from ..events import event
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
)
from .response_input import ReasoningText
from .response_tools import OfferedTools, ToolPlace, text_input

Status = Literal["completed", "incomplete"]


class Output:
    """The items of one response. The methods change the items, and return the events that report
    the changes."""

    def __init__(self, logprobs: int | None = None, offered: OfferedTools | None = None) -> None:
        """``logprobs``: number of alternatives that are reported with each token, or None if the
        request does not ask for log-probabilities. ``offered``: the tools of the request."""
        self.items: list[OutputItem] = []
        self._logprobs = logprobs
        self._offered = offered or OfferedTools()
        self._number = 0
        self._turn: ModelTurn | None = None
        """The turn whose entries are added."""
        self._num_turns = 0
        self._custom: Call | None = None
        """The last call of a tool whose input is a text."""
        self._growing = False
        """Whether the last item is unfinished."""

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event with the next sequence number."""
        fields = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(fields, kind)

    def feed(self, turn: ModelTurn, entries: Sequence[Token]) -> bytes:
        """Adds entries of a turn. Only the entries of sequence 0 belong to the answer."""
        if turn is not self._turn:
            self._turn, form = turn, turn.prepared.form
            self._num_turns += 1
            constrained = turn.prepared.constraint is not None
            self._steps = Steps(form, constrained=constrained, single=self._logprobs is not None)
        steps = self._steps.take([entry for entry in entries if entry.seq == 0])
        return b"".join(part for step in steps for part in self._step(turn, step))

    def end_turn(self, status: Status) -> bytes:
        """Finishes the last item of a turn."""
        return b"".join(self._finish(status))

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
        # If the last turn has failed, the rest of its text is still to be added.
        rest = self._turn.answer().end() if self._turn is not None else []
        parts = [part for piece in rest for part in self._piece(piece)]
        parts += self._finish(status)
        for place, item in enumerate(self.items):
            if isinstance(item, OutputBusCall) and item.status == "in_progress":
                item.status = "incomplete"
                parts += self._finish_bus_call(item, place)
        if not self.items:
            parts += [*self._begin(Text("")), *self._finish(status)]
        return b"".join(parts)

    def _step(self, turn: ModelTurn, step: Step) -> Iterator[bytes]:
        entry = step.entry if isinstance(step, EntryStep) else None
        if isinstance(step, EntryStep) and step.removed:
            yield self._take_back(step.removed)
        if turn.prepared.form is not None:
            pieces = turn.answer().feed(step.text)
            if entry is not None and entry.finish_reason is not None:
                pieces += turn.answer().end()
            for piece in pieces:
                yield from self._piece(piece)
            return
        logprobs: list[TokenLogprob] = []
        if self._logprobs is not None and entry is not None:
            sampled = Sampled.of_entry(entry, step.text)
            logprobs = token_logprobs(turn.prepared.model, sampled, self._logprobs)
        if step.text or logprobs:
            if not self._growing:
                yield from self._begin(Text(""))
            yield self._grow(step.text, logprobs)

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.begins:
            yield from self._begin(piece.part)
        if piece.text:
            yield self._grow(piece.text, [])

    def _begin(self, part: AnswerPart) -> Iterator[bytes]:
        """Finishes the last item, and begins the item for a part."""
        yield from self._finish("completed")
        self._growing = True
        # The first event of an item must not have content, because some clients would store an
        # empty text and send it in a later request.
        match part:
            case Text():
                text = AnsweredText("", [], [])
                message = OutputMessage(new_id("msg_"), "in_progress", [])
                yield self._added(message)
                message.content.append(text)
                yield self._of_content("content_part.added", part=text)
            case Thinking():
                thought = OutputReasoning(new_id("rs_"), "in_progress", [])
                yield self._added(thought)
                thought.content.append(ReasoningText(text=""))
            case Call():
                item = self._called(part)
                yield self._added(item)
                if isinstance(item, OutputBusCall):
                    yield self._of_item("mcp_call.in_progress")

    def _grow(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        """Adds text to the last item."""
        match self.items[-1]:
            case OutputMessage(content=[part]):
                part.text += text
                part.logprobs += logprobs
                return self._of_content("output_text.delta", delta=text, logprobs=logprobs)
            case OutputReasoning(content=[thought]):
                thought.text += text
                return self._of_content("reasoning_text.delta", delta=text)
            case OutputCall() | OutputBusCall() as call:
                call.arguments += text
                kind = "mcp_call" if isinstance(call, OutputBusCall) else "function_call"
                return self._of_item(f"{kind}_arguments.delta", delta=text)
        # ``_finish`` decodes the input of a custom tool when all arguments have arrived.
        return b""

    def _called(self, call: Call) -> OutputCall | OutputCustomCall | OutputBusCall:
        """Makes the item for a call that begins."""
        if call.name in self._offered.bus:
            return OutputBusCall(id=call.id, name=call.name, arguments="", turn=self._num_turns - 1)
        place = self._offered.places.get(call.name, ToolPlace(None, call.name))
        namespace = UNSET if place.namespace is None else place.namespace
        if call.name in self._offered.custom:
            self._custom = call
            id = new_id("ctc_")
            return OutputCustomCall(id, call.id, place.name, "", "in_progress", namespace)
        return OutputCall(new_id("fc_"), call.id, place.name, "", "in_progress", namespace)

    def _finish(self, status: Status) -> Iterator[bytes]:
        """Finishes the last item, unless it is finished."""
        if not self._growing:
            return
        self._growing = False
        item = self.items[-1]
        match item:
            case OutputBusCall():
                # ``made`` finishes the item when the gateway has made the call.
                yield self._of_item("mcp_call_arguments.done", arguments=item.arguments)
                return
            case OutputCall(name=name, arguments=arguments):
                yield self._of_item("function_call_arguments.done", name=name, arguments=arguments)
            case OutputCustomCall():
                assert self._custom is not None
                item.input = text_input(self._custom)
                yield self._of_item("custom_tool_call_input.delta", delta=item.input)
                yield self._of_item("custom_tool_call_input.done", input=item.input)
            case OutputReasoning(content=[thought]):
                yield self._of_content("reasoning_text.done", text=thought.text)
            case OutputMessage(content=[part]):
                yield self._of_content("output_text.done", text=part.text, logprobs=part.logprobs)
                yield self._of_content("content_part.done", part=part)
        item.status = status
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _finish_bus_call(self, item: OutputBusCall, place: int) -> Iterator[bytes]:
        """The events that report the result of a call that the gateway has made."""
        kind = "completed" if item.status == "completed" else "failed"
        yield self.event(f"response.mcp_call.{kind}", item_id=item.id, output_index=place)
        yield self.event("response.output_item.done", output_index=place, item=item)

    def _take_back(self, removed: int) -> bytes:
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        [part] = message.content
        part.text = part.text[: len(part.text) - removed]
        receipt = {"backtrack": removed}
        return self._of_content("output_text.delta", delta="", logprobs=[], tokenbus=receipt)

    def _added(self, item: OutputItem) -> bytes:
        self.items.append(item)
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event about the last item."""
        place = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}
        return self.event(f"response.{kind}", **place, **fields)

    def _of_content(self, kind: str, **fields: Any) -> bytes:
        """An event about the content of the last item."""
        return self._of_item(kind, content_index=0, **fields)
