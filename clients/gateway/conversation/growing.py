"""The texts of sequences while they grow, fork and lose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....protocol.messages import Token
from ..answer_parts import AnswerForm
from .answers import entry_text
from .constraints import Receipt


class GrowingChoice:
    """The text of one sequence so far, with a piece for each token. A fork begins with a copy of
    the pieces, and a backtrack removes pieces."""

    def __init__(self, seq: int, pieces: Sequence[str] = ()) -> None:
        self.seq = seq
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
            choice = self._by_seq[entry.seq] = GrowingChoice(entry.seq, before)
            inherited = "".join(before)
        text = entry_text(self._form, entry)
        removed = choice.take(entry, text)
        if inherited:
            # The client has not received any text of this choice, so it has nothing to remove.
            return 0, inherited[: len(inherited) - removed] + text, choice
        return removed, text, choice


class TextStep(NamedTuple):
    """New text of one sequence, from entries that have only text."""

    seq: int
    text: str


class EntryStep(NamedTuple):
    """New text of one sequence, and the last entry of the text, which has more than text."""

    entry: Token
    text: str
    removed: int
    """Number of characters that ``entry`` removes from the earlier text."""
    choice: GrowingChoice
    """The sequence so far."""

    def receipt(self, ended: Receipt | None) -> Receipt | None:
        """The receipt of a chunk for this step. ``ended``: the receipt of the ended sequence, if
        the step is its last one."""
        entry = self.entry
        if not (self.removed or entry.messages or entry.waiting):
            return ended
        receipt = ended or Receipt()
        receipt.backtrack = self.removed
        receipt.messages, receipt.waiting = list(entry.messages), entry.waiting
        return receipt


Step = TextStep | EntryStep


class Steps:
    """Joins the texts of entries that arrive together."""

    def __init__(self, form: AnswerForm | None, *, constrained: bool, single: bool) -> None:
        """``constrained``: whether the answer has a constraint. ``single``: whether each entry gets
        a step of its own, for example because its log-probability is reported."""
        self._form = form
        self._single = single
        self._plain = not constrained and not single
        """Whether all entries of a sequence except its last entry have only text."""
        self._choices = GrowingChoices(form)

    def take(self, entries: Sequence[Token]) -> list[Step]:
        """Adds entries; returns the steps that they make."""
        steps: list[Step] = []
        texts: dict[int, str] = {}
        for entry in entries:
            seq = entry.seq
            if self._plain and entry.finish_reason is None:
                text = entry_text(self._form, entry)
                if text:
                    texts[seq] = texts.get(seq, "") + text
                continue
            removed, text, choice = self._choices.take(entry)
            before = texts.pop(seq, "")
            whole = self._single or bool(entry.messages or entry.waiting)
            if not removed and entry.finish_reason is None and not whole:
                texts[seq] = before + text
                continue
            if removed and before:
                steps.append(TextStep(seq, before))
                before = ""
            steps.append(EntryStep(entry, before + text, removed, choice))
        steps += [TextStep(seq, text) for seq, text in texts.items() if text]
        return steps
