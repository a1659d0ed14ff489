"""Splits an answer into text, thinking and tool calls while it arrives.

``protocol.structure`` parses the text. The controller worker computes the masks of the answer with
the same code.
"""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.messages import Token
from ...protocol.structure import Automaton, Kind, Piece, Reader, Structure, special
from .. import GeneratedSequence
from .models import ServedModel


class AnswerForm:
    """The structure of the answers to one request, and the model's special tokens."""

    def __init__(self, structure: Structure, special_tokens: dict[int, str]) -> None:
        """``special_tokens``: the names of the model's special tokens, by id. The text of an entry
        does not contain special tokens."""
        self.automaton = Automaton(structure, special_tokens.values())
        self._marks = {
            number: special(name).decode("utf-8", "surrogateescape")
            for number, name in special_tokens.items()
            if name in self.automaton.special
        }

    @classmethod
    def of(cls, model: ServedModel, structure: Structure) -> AnswerForm:
        """The form that consists of ``structure`` and the special tokens of ``model``."""
        return cls(structure, model.special_names)

    def text_of(self, entry: Token, text: str) -> str:
        """The text of an entry, as ``PartReader.feed`` expects it. ``text``: the entry's own text.
        If the entry's token is a special token that the structure uses, the marked name of the
        token (``structure.special``) is appended."""
        return text + self._marks.get(entry.token, "") if entry.token is not None else text

    def whole_text(self, model: ServedModel, sequence: GeneratedSequence) -> str:
        """The text of a sequence for ``PartReader.feed``, including the special tokens that the
        structure uses."""
        if not self._marks:
            return sequence.text
        data = b"".join(
            self._marks.get(token, "").encode("utf-8", "surrogateescape")
            if token in model.special_ids
            else model.bytes_of(token)
            for token in sequence.tokens
        )
        return data.decode("utf-8", "surrogateescape")


class Part(NamedTuple):
    """New text of one part of an answer."""

    kind: Kind
    text: str
    """The new text; in a call, the new part of the arguments' JSON text."""
    called: str | None = None
    """The name of the function whose call begins; the text is then empty."""


class PartReader:
    """Splits one answer into its parts."""

    def __init__(self, form: AnswerForm) -> None:
        self._structure = form.automaton.structure
        self._reader = Reader(form.automaton)
        self._called = False
        """Whether a call has begun."""
        self._space = ""
        """White space at the present end of a text or thinking part. If more text of this part
        follows, the white space is reported with it. If another part follows, the white space is
        dropped."""
        self._spoke = False
        """Whether the current part contains more than white space."""
        self._kind: Kind = "text"
        self._after_tag = self._structure.inside is not None
        """Whether another part or a tag precedes the current part. If so, white space at the
        beginning of the current part is dropped."""

    def feed(self, text: str) -> list[Part]:
        """Adds ``text`` to the answer; returns the new texts of its parts."""
        return self._parts(self._reader.feed(text.encode("utf-8", "surrogateescape")))

    def end(self) -> list[Part]:
        """Ends the answer; returns the remaining texts of its parts. An incomplete beginning of a
        tag becomes text."""
        parts = self._parts(self._reader.end())
        begun = self._spoke or not self._after_tag
        if self._space and begun and not self._called and self._kind == "text":
            parts.append(Part("text", self._space))
        self._space = ""
        return parts

    def _parts(self, pieces: list[Piece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            self._take(piece, parts)
        return parts

    def _take(self, piece: Piece, parts: list[Part]) -> None:
        text = piece.data.decode("utf-8", "replace")
        if piece.kind != self._kind or piece.begins:
            self._kind, self._space, self._spoke = piece.kind, "", False
            self._after_tag = True
        if piece.kind == "call":
            assert piece.tag is not None
            if piece.begins:
                self._called = True
                parts.append(Part("call", "", self._structure.tags[piece.tag].name))
            elif text:
                parts.append(Part("call", text))
            return
        text = self._space + text
        kept = text.rstrip()
        if not kept:
            self._space = text
            return
        self._space = text[len(kept) :]
        if not self._spoke and self._after_tag:
            kept = kept.lstrip()
        self._spoke = True
        parts.append(Part(piece.kind, kept))
