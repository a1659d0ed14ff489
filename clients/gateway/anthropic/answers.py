"""An answer while it grows: its blocks, why it ended, and both as objects of this door."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from ....protocol.messages import Token
from ..openai.fields import new_id
from ..tool_calls import Arguments, CallBegin, CallForm, CallReader, Part, Text


@dataclass
class TextAnswer:
    """A block of text."""

    text: str = ""


@dataclass
class CallAnswer:
    """A block that calls a tool; ``arguments`` is JSON text, as far as it was generated."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: new_id("toolu_"))

    @property
    def input(self) -> dict[str, Any]:
        """The arguments; empty where the answer was cut inside them."""
        try:
            found = json.loads(self.arguments)
        except json.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}


AnswerBlock = TextAnswer | CallAnswer


class Answer:
    """The blocks of a message, from the entries of its stream."""

    def __init__(self, form: CallForm | None, constraint: str | None, max_tokens: int) -> None:
        """``form``: how it calls tools, None if it cannot; ``constraint``: its name in receipts."""
        self._reader = CallReader(form) if form is not None else None
        self._constraint = constraint
        self._max_tokens = max_tokens
        self.blocks: list[AnswerBlock] = []
        self._space = ""
        """White space at the end so far; dropped where a call follows it."""
        self._prompt: Token | None = None
        """The entry that says what the prompt cost: the first one."""
        self._output = 0
        self._end: Token | None = None

    def add(self, entries: Iterable[Token]) -> list[tuple[int, str]]:
        """Adds entries; which blocks got what: the number of a block and its new text.

        A block is new if it was not named before; a call begins with an empty text.
        """
        changes: list[tuple[int, str]] = []
        for entry in entries:
            self._prompt = self._prompt or entry
            self._output += (entry.token is not None) - entry.backtrack
            self._read("" if entry.text is UNSET else entry.text, changes)
            if entry.finish_reason is not None:
                self._end = entry
                self._finish(changes)
        return changes

    def _read(self, text: str, changes: list[tuple[int, str]]) -> None:
        if self._reader is None:
            self._write(text, changes)
            return
        for part in self._reader.feed(text):
            self._take(part, changes)

    def _finish(self, changes: list[tuple[int, str]]) -> None:
        for part in self._reader.end() if self._reader is not None else ():
            self._take(part, changes)
        if not self.called:
            self._write(self._space, changes)

    def _take(self, part: Part, changes: list[tuple[int, str]]) -> None:
        """One part of an answer that may call tools."""
        match part:
            case Text(text):
                text = self._space + text
                kept = text.rstrip()
                self._space = text[len(kept) :]
                self._write(kept, changes)
            case CallBegin(_, name):
                self._space = ""
                self.blocks.append(CallAnswer(name))
                changes.append((len(self.blocks) - 1, ""))
            case Arguments(_, text):
                block = self.blocks[-1]
                assert isinstance(block, CallAnswer)
                block.arguments += text
                changes.append((len(self.blocks) - 1, text))

    def _write(self, text: str, changes: list[tuple[int, str]]) -> None:
        if not text:
            return
        block = self.blocks[-1] if self.blocks else None
        if not isinstance(block, TextAnswer):
            block = TextAnswer()
            self.blocks.append(block)
        block.text += text
        changes.append((len(self.blocks) - 1, text))

    # --- what has come of it --------------------------------------------------------------------

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._reader is not None and self._reader.called

    @property
    def content(self) -> list[dict[str, Any]]:
        """The blocks as objects."""
        return [
            {"type": "text", "text": block.text}
            if isinstance(block, TextAnswer)
            else {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
            for block in self.blocks
        ]

    @property
    def ended(self) -> dict[str, str | None]:
        """Why it ended; both fields are None before."""
        end = self._end
        if end is None:
            return {"stop_reason": None, "stop_sequence": None}
        if isinstance(end.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        return {"stop_reason": self._reason(end), "stop_sequence": None}

    def _reason(self, end: Token) -> str:
        if end.finish_reason == "length":
            full = self._output < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return "tool_use" if self.called else "end_turn"

    @property
    def usage(self) -> dict[str, int]:
        """What it cost, in tokens."""
        assert self._prompt is not None
        return prompt_usage(self._prompt) | {"output_tokens": self._output}

    @property
    def receipt(self) -> dict[str, Any]:
        """What constrained the answer and how that ended; nothing where nothing did."""
        if self._constraint is None or self._end is None or self._end.constraint is None:
            return {}
        return {"tokenbus": {"constraint": self._constraint, "ended": self._end.constraint}}


def prompt_usage(first: Token) -> dict[str, int]:
    """What the prompt cost, of which the first entry says it: tokens that were read from the cache
    are not among the others."""
    return {
        "input_tokens": first.prompt_tokens - first.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": first.cached_tokens,
        "output_tokens": 0,
    }
