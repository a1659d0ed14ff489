"""Adds to an answer the text that the bus leaves out: the stop string that ended the answer, and
special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET

from ....protocol.messages import Token
from ... import GeneratedSequence


@dataclass(frozen=True)
class ShownText:
    """The text to add to an answer."""

    with_stop: bool
    """Whether the stop string or the special token that ended the answer is added to the text."""
    special: Mapping[int, str]
    """The names of special tokens that are added to the text, by their ids."""

    def add(self, entry: Token) -> None:
        """Adds the entry's special token or stop string to the text of the entry."""
        ended = entry.finish_reason == "stop"
        shown = self._name(entry.token, ended and not isinstance(entry.stop, str))
        shown += self._stop(entry.stop) if ended else ""
        if shown:
            entry.text = ("" if entry.text is UNSET else entry.text) + shown

    def add_all(self, sequence: GeneratedSequence) -> None:
        """Adds the special tokens and the stop string of a finished sequence to its text."""
        ended = sequence.finish_reason == "stop"
        last = len(sequence.tokens) - 1
        for place, token in enumerate(sequence.tokens if self.special else ()):
            ends = ended and place == last and not isinstance(sequence.stop, str)
            if name := self._name(token, ends):
                sequence.append_text(place, name)
        if ended and last >= 0 and (stop := self._stop(sequence.stop)):
            sequence.append_text(last, stop)

    def _name(self, token: int | None, ends: bool) -> str:
        """The name of a special token. ``ends``: whether the token ended the sequence."""
        if token is None or (ends and not self.with_stop):
            return ""
        return self.special.get(token, "")

    def _stop(self, stop: str | int | None) -> str:
        return stop if self.with_stop and isinstance(stop, str) else ""
