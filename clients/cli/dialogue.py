"""The dialogue of a command with the program of its stream: messages and inputs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

from ...protocol.errors import Code, TokenbusError
from ...protocol.messages import MAX_INPUT_BYTES, Token
from .. import Stream
from .exits import report
from .line_pipe import READ_BYTES, split_lines

AGAIN_S = 0.5
"""Time after which an input is sent again, in seconds, if the broker does not name another time."""
SILENT_S = 5.0
"""If standard input has ended and no entry arrives for this time, in seconds, a line reports that
the program may wait for an input."""


class Dialogue:
    """Prints the messages of a program on stderr.

    After the first message, a thread sends each line of standard input to the program as an input,
    except if ``with_inputs`` is false.
    """

    def __init__(self, stream: Stream, *, with_inputs: bool = True) -> None:
        self._stream = stream
        self._sends_inputs = with_inputs
        self._arrived = threading.Event()
        """Set by each entry and by the end of the stream; cleared by the thread of the inputs."""
        self._ended = False
        """Whether the stream has ended, or is not read any more."""

    def entries(self) -> Iterator[Token]:
        """Yields the entries of the stream, up to its end."""
        try:
            for entry in self._stream:
                self._arrived.set()
                yield entry
        finally:
            self._ended = True
            self._arrived.set()

    def show(self, entry: Token, line_begun: bool) -> None:
        """Prints the messages of an entry. ``line_begun``: whether the last printed line has not
        ended."""
        for message in entry.messages:
            before = "\n" if line_begun else ""
            line_begun = False
            print(f"{before}--- message of {entry.seq}\n{message}", file=sys.stderr, flush=True)
        if entry.messages and self._sends_inputs:
            self._sends_inputs = False
            threading.Thread(target=self._send_lines, daemon=True).start()

    def _send_lines(self) -> None:
        # This thread reads the file descriptor. A thread that reads ``sys.stdin`` holds the lock of
        # ``sys.stdin``, and Python cannot exit while a thread has this lock.
        try:
            for line in split_lines(lambda: os.read(0, READ_BYTES), MAX_INPUT_BYTES):
                self._send(line.decode("utf-8", "replace"))
        except (OSError, RuntimeError):
            return  # Standard input is closed, or the command has closed its client.
        self._watch_silence()

    def _watch_silence(self) -> None:
        """Prints a line if no entry arrives for ``SILENT_S``. The program may wait for an input, or
        for something else, such as a tool, so the stream is not ended."""
        while self._arrived.wait(SILENT_S):
            self._arrived.clear()
            if self._ended:
                return
        print(
            f"tokenbus: standard input has ended, and nothing has arrived for {SILENT_S:.0f} s; if "
            "the program waits for an input, it waits for ever: press Ctrl-C, give all inputs on "
            "standard input, or limit the time with --timeout",
            file=sys.stderr,
            flush=True,
        )

    def _send(self, text: str) -> None:
        """Sends an input; sends it again while too many inputs wait for the program. Reports other
        errors, unless the stream has ended."""
        while True:
            try:
                return self._stream.send(text)
            except TokenbusError as error:
                if error.code != Code.QUEUE_FULL:
                    if error.code != Code.UNKNOWN_STREAM:  # The code if the stream has ended.
                        report(error)
                    return None
                time.sleep(error.retry_after_s or AGAIN_S)
