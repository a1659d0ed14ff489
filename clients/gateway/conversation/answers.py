"""Assembles the parts of an answer while its text arrives."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET

from ....protocol.messages import Token
from ..answer_parts import AnswerForm, Part, PartReader
from ..new_ids import new_id
from .parts import Call, Text, Thinking

AnswerPart = Text | Thinking | Call


class Piece(NamedTuple):
    """A change of an answer: a new part, or more text of a part."""

    place: int
    """The index of the part in the answer."""
    part: AnswerPart
    """The part, which may have received more text since this change."""
    text: str
    """The new text of the part. The piece that begins a call has no text, and further pieces have
    the text of the call's arguments."""
    begins: bool
    """Whether the part is new."""


def entry_text(form: AnswerForm | None, entry: Token) -> str:
    """The text of an entry, as ``Answer.feed`` expects it."""
    text = "" if entry.text is UNSET else entry.text
    return text if form is None else form.text_of(entry, text)


class Answer:
    """The parts of one sequence. ``feed`` and ``end`` return the changes that they make."""

    def __init__(self, form: AnswerForm | None, call_prefix: str = "call_") -> None:
        """``form``: the form of the answer, or None if the answer is one text. ``call_prefix``: the
        beginning of the ids of calls."""
        self.form = form
        self.parts: list[AnswerPart] = []
        self._reader = PartReader(form) if form is not None else None
        self._call_prefix = call_prefix

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return any(isinstance(part, Call) for part in self.parts)

    def feed(self, text: str) -> list[Piece]:
        """Adds text of the sequence, in the form that ``entry_text`` returns."""
        if self._reader is None:
            return [self._write(Text, text)] if text else []
        return [self._take(part) for part in self._reader.feed(text)]

    def end(self) -> list[Piece]:
        """Adds the rest of the text when the sequence has ended."""
        rest = self._reader.end() if self._reader is not None else []
        return [self._take(part) for part in rest]

    def read(self, entry: Token) -> list[Piece]:
        """Adds the text of an entry, and the rest of the text if the entry is the last one."""
        pieces = self.feed(entry_text(self.form, entry))
        return pieces if entry.finish_reason is None else pieces + self.end()

    def _take(self, part: Part) -> Piece:
        if part.kind != "call":
            return self._write(Thinking if part.kind == "reasoning" else Text, part.text)
        if part.called is not None:
            self.parts.append(Call(new_id(self._call_prefix), part.called, ""))
        call = self.parts[-1]
        assert isinstance(call, Call)
        call.arguments = f"{call.arguments}{part.text}"
        return Piece(len(self.parts) - 1, call, part.text, part.called is not None)

    def _write(self, kind: type[Text | Thinking], text: str) -> Piece:
        last = self.parts[-1] if self.parts else None
        begins = not isinstance(last, kind)
        if not isinstance(last, kind):
            last = kind("")
            self.parts.append(last)
        last.text += text
        return Piece(len(self.parts) - 1, last, text, begins)
