"""Collects the items of a response while it grows, and makes the events that report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET

from ....protocol.messages import Token
from ..conversation.answers import Answer, Piece, entry_text
from ..conversation.constraints import Receipt
from ..conversation.growing import GrowingChoices
from ..conversation.parts import Call, Text, Thinking
from ..conversation.planning import Prepared
from ..events import event
from ..new_ids import new_id
from .logprobs import Sampled, TokenLogprob, token_logprobs
from .response_bodies import (
    AnsweredText,
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

    def end(self, status: Status) -> bytes:
        """Finishes the last item. An answer without items receives an empty message."""
        parts = []
        parts += [part for piece in self._answer.end() for part in self._piece(piece)]
        if not self.items:
            parts += self._begin_message()
        return b"".join([*parts, *self._finish(status)])

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
                yield self._begin(self._called(piece.part))
            case Call() if isinstance(self.items[-1], OutputCustomCall):
                # ``_finish_custom`` decodes the input when all arguments have arrived.
                pass
            case Call():
                call = self._call
                call.arguments += piece.text
                yield self.event(
                    "response.function_call_arguments.delta",
                    item_id=call.id,
                    output_index=len(self.items) - 1,
                    delta=piece.text,
                )

    def _called(self, call: Call) -> OutputCall | OutputCustomCall:
        """The item of a call that begins."""
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
        place = {"item_id": item.id, "output_index": len(self.items) - 1}
        yield self.event("response.custom_tool_call_input.delta", **place, delta=item.input)
        yield self.event("response.custom_tool_call_input.done", **place, input=item.input)

    def _thought(self, text: str) -> Iterator[bytes]:
        if not self.growing or not isinstance(self.items[-1], OutputReasoning):
            yield from self._finish("completed")
            # The item's first event does not have content. Some clients would store an empty text
            # and send it in a later request.
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
        item.status = status
        if isinstance(item, OutputCall):
            yield self.event(
                "response.function_call_arguments.done",
                item_id=item.id,
                output_index=len(self.items) - 1,
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
    def _call(self) -> OutputCall:
        call = self.items[-1]
        assert isinstance(call, OutputCall)
        return call

    @property
    def _content(self) -> AnsweredText:
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        return message.content[0]

    @property
    def _place(self) -> dict[str, Any]:
        item = self.items[-1]
        return {"item_id": item.id, "output_index": len(self.items) - 1, "content_index": 0}
