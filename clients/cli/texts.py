"""Prints the text of sequences on stdout, and the logs and messages of controllers on stderr."""

from __future__ import annotations

import sys

from ...protocol.errors import Code, error_for
from ...protocol.messages import Token
from .. import GeneratedSequence, Stream
from .dialogue import Dialogue
from .exits import OK, one_line, report
from .notices import Notices


class LiveText:
    """Prints the text of one sequence on standard output, as it arrives.

    Printed text cannot be removed. After a backtrack, a line says how many tokens were removed, and
    the text is printed again from its beginning.
    """

    def __init__(self) -> None:
        self.begun = False
        """Whether a token has arrived. ``show`` sets this flag."""

    def show(self, entry: Token, sequence: GeneratedSequence) -> None:
        """Prints the text of an entry. ``sequence`` already contains the entry."""
        if entry.backtrack and self.begun:
            count = "a token" if entry.backtrack == 1 else f"{entry.backtrack} tokens"
            print(f"\n--- {count} removed\n{sequence.text}", end="", flush=True)
        elif entry.text:
            print(entry.text, end="", flush=True)
        self.begun = self.begun or entry.token is not None


class Texts:
    """Prints the text of a stream as it arrives, as long as the stream has only one sequence. If
    the stream has several sequences, ``end`` prints the texts of all sequences."""

    def __init__(self, stream: Stream, notices: Notices, *, with_inputs: bool = True) -> None:
        self._stream = stream
        self._notices = notices
        self._live = LiveText()
        self._dialogue = Dialogue(stream, with_inputs=with_inputs)
        self._line_begun = False
        """Whether the last printed line is incomplete."""

    def follow(self) -> None:
        """Reads the stream to its end."""
        for entry in self._dialogue.entries():
            self._notices.clear()
            sequences = self._stream.sequences
            if len(sequences) == 1:
                self._live.show(entry, sequences[0])
                if entry.text or entry.backtrack:
                    self._line_begun = sequences[0].text[-1:] not in ("", "\n")
            if entry.messages or entry.waiting:
                self._dialogue.show(entry, self._line_begun)
                self._line_begun = self._line_begun and not entry.messages

    def end(self) -> None:
        """Prints the texts of several sequences, and the logs. Called even after an error."""
        if self._live.begun:
            print()
        sequences = self._stream.sequences
        if len(sequences) > 1:
            for s in sequences:
                of = f", fork of {s.parent}" if s.parent is not None else ""
                print(f"--- sequence {s.seq}{of} ({s.finish_reason or 'not finished'})\n{s.text}")
        sys.stdout.flush()
        for s in sequences:
            if s.logs:
                print(f"--- log of {s.seq}\n{s.logs.rstrip()}", file=sys.stderr)


def print_completed(stream: Stream, notices: Notices) -> None:
    """Prints the text of each sequence when the sequence has ended. Several growing texts cannot be
    printed at the same time."""
    for entry in stream:
        notices.clear()
        if entry.finish_reason is not None:
            text = next(s.text for s in stream.sequences if s.seq == entry.seq)
            why = one_line(entry.error or "") or entry.finish_reason
            print(f"--- sequence {entry.seq} ({why})\n{text}", flush=True)


def exit_code(sequences: list[GeneratedSequence]) -> int:
    """Reports each failed sequence on stderr. Returns the exit code of the first failure; 0 if no
    sequence failed."""
    failed = [s for s in sequences if s.finish_reason == "error"]
    codes = [
        report(error_for(s.code or Code.INTERNAL, f"sequence {s.seq}: {s.error}")) for s in failed
    ]
    return codes[0] if codes else OK
