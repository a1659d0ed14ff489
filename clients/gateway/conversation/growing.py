"""The texts of sequences while they grow, fork and lose tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.messages import Token
from ..answer_parts import AnswerForm
from .answers import entry_text


class GrowingChoice:
    """The text of one sequence so far, with a piece for each token. A fork begins with a copy of
    the pieces, and a backtrack removes pieces."""

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self.pieces = list(pieces)
        self.logs = ""
        self.storage: list[object] = []

    def take(self, entry: Token, text: str) -> int:
        """Adds an entry and its text; returns the number of characters that the entry removes from
        the earlier text."""
        removed = 0
        if entry.backtrack:
            cut = max(0, len(self.pieces) - entry.backtrack)
            removed = sum(map(len, self.pieces[cut:]))
            del self.pieces[cut:]
        if entry.token is not None or not self.pieces:
            self.pieces.append(text)
        else:
            self.pieces[-1] += text
        self.logs += entry.logs
        self.storage += entry.storage
        return removed


class GrowingChoices:
    """The growing texts of all sequences of one stream."""

    def __init__(self, form: AnswerForm | None = None) -> None:
        self._form = form
        self._by_seq: dict[int, GrowingChoice] = {}

    def take(self, entry: Token) -> tuple[int, str, GrowingChoice]:
        """Adds an entry; returns the number of characters that the client must remove, the new
        text, and the choice.

        With its first entry, a forked sequence also gets the text that it has in common with the
        sequence from which it was forked.
        """
        choice = self._by_seq.get(entry.seq)
        inherited = ""
        if choice is None:
            parent = self._by_seq.get(entry.parent) if entry.parent is not None else None
            before = parent.pieces[: entry.pos + entry.backtrack] if parent is not None else []
            choice = self._by_seq[entry.seq] = GrowingChoice(before)
            inherited = "".join(before)
        text = entry_text(self._form, entry)
        removed = choice.take(entry, text)
        if inherited:
            # The client has not received any text of this choice, so it has nothing to remove.
            return 0, inherited[: len(inherited) - removed] + text, choice
        return removed, text, choice
