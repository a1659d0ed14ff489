"""Sequences as text: what the model wrote on standard output, logs of controllers on stderr."""

from __future__ import annotations

import sys

from ...protocol.errors import Code, error_for
from ...protocol.messages import Token
from .. import GeneratedSequence, Stream
from .exits import OK, one_line, report
from .notices import Notices


class LiveText:
    """The text of one sequence on standard output, as it comes.

    What was printed cannot be taken back: after a backtrack a line says how many tokens are gone,
    and the text begins again.
    """

    def __init__(self) -> None:
        self.begun = False
        """Whether a token has come."""

    def show(self, entry: Token, sequence: GeneratedSequence) -> None:
        """Prints what an entry brought; ``sequence`` is its sequence, this entry included."""
        if entry.backtrack and self.begun:
            count = "a token" if entry.backtrack == 1 else f"{entry.backtrack} tokens"
            print(f"\n--- {count} taken back\n{sequence.text}", end="", flush=True)
        elif entry.text:
            print(entry.text, end="", flush=True)
        self.begun = self.begun or entry.token is not None


class Texts:
    """The text of a single sequence as it comes; of several ones when all is over."""

    def __init__(self, stream: Stream, notices: Notices) -> None:
        self._stream = stream
        self._notices = notices
        self._live = LiveText()

    def follow(self) -> None:
        """Reads the stream to its end."""
        for entry in self._stream:
            self._notices.clear()
            sequences = self._stream.sequences
            if len(sequences) == 1:
                self._live.show(entry, sequences[0])

    def end(self) -> None:
        """Prints what was not printed yet, also after an error."""
        if self._live.begun:
            print()
        sequences = self._stream.sequences
        if len(sequences) > 1:
            for s in sequences:
                of = f", fork of {s.parent}" if s.parent is not None else ""
                print(f"--- sequence {s.seq}{of} ({s.finish_reason or 'not over'})\n{s.text}")
        sys.stdout.flush()
        for s in sequences:
            if s.logs:
                print(f"--- log of {s.seq}\n{s.logs.rstrip()}", file=sys.stderr)


def print_completed(stream: Stream, notices: Notices) -> None:
    """Prints each of several independent sequences when it is complete."""
    for entry in stream:
        notices.clear()
        if entry.finish_reason is not None:
            text = next(s.text for s in stream.sequences if s.seq == entry.seq)
            why = one_line(entry.error or "") or entry.finish_reason
            print(f"--- sequence {entry.seq} ({why})\n{text}", flush=True)


def exit_code(sequences: list[GeneratedSequence], front: str) -> int:
    """Reports each failure on stderr; the first one's exit code where every sequence failed."""
    failed = [s for s in sequences if s.finish_reason == "error"]
    codes = [
        report(error_for(s.code or Code.INTERNAL, f"sequence {s.seq}: {s.error}"), front)
        for s in failed
    ]
    return codes[0] if codes and len(codes) == len(sequences) else OK
