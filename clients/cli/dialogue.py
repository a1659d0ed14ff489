"""The dialogue of a command with the program of its stream: messages and inputs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

from ...protocol.errors import Code, RequestError, TokenbusError
from ...protocol.messages import MAX_INPUT_BYTES, Token
from .. import Stream
from .exits import report
from .line_pipe import READ_BYTES, split_lines

AGAIN_S = 0.5
"""Time after which an input is sent again, in seconds, if the broker does not name another time."""


class Dialogue:
    """Prints the messages of a program on stderr.

    After the first message, or when the program waits for an input, a thread begins to send each
    line of standard input to the program as an input, except if ``with_inputs`` is false.
    """

    def __init__(self, stream: Stream, *, with_inputs: bool = True) -> None:
        self._stream = stream
        self._sends_inputs = with_inputs
        self._without_more = not with_inputs
        """Whether no further input will be sent. The thread of the inputs sets this flag before it
        reads ``_awaited``, and the reader of the stream sets ``_awaited`` before it reads this
        flag."""
        self._awaited = 0
        """If all sequences wait for an input: the lowest number of these inputs. Otherwise 0."""
        self._with_inputs = with_inputs

    def entries(self) -> Iterator[Token]:
        """Yields the entries of the stream, up to its end. If the program waits for an input that
        will not be sent, closes the stream and raises RequestError."""
        try:
            for entry in self._stream:
                yield entry
                running = [s.waiting for s in self._stream.sequences if s.finish_reason is None]
                self._awaited = min(running, default=0)
                if self._without_more:
                    self._close_if_starved()
        except RuntimeError:
            # The thread of the inputs has closed the stream.
            if not self._starved:
                raise
        if self._starved:
            raise RequestError(Code.INVALID_FIELD, self._why())

    def show(self, entry: Token, line_begun: bool) -> None:
        """Prints the messages of an entry. ``line_begun``: whether the last printed line has not
        ended."""
        for message in entry.messages:
            before = "\n" if line_begun else ""
            line_begun = False
            print(f"{before}--- message of {entry.seq}\n{message}", file=sys.stderr, flush=True)
        if entry.waiting > self._stream.num_inputs and self._with_inputs and os.isatty(0):
            print("--- the program waits for an input", file=sys.stderr, flush=True)
        if (entry.messages or entry.waiting) and self._sends_inputs:
            self._sends_inputs = False
            threading.Thread(target=self._send_lines, daemon=True).start()

    def _send_lines(self) -> None:
        # This thread reads the file descriptor. A thread that reads ``sys.stdin`` holds the lock of
        # ``sys.stdin``, and Python cannot exit while a thread has this lock.
        try:
            for line in split_lines(lambda: os.read(0, READ_BYTES), MAX_INPUT_BYTES):
                self._send(line.decode("utf-8", "replace"))
        except RuntimeError:
            return  # The command has closed its client.
        except OSError:
            pass  # Standard input is closed.
        self._without_more = True
        self._close_if_starved()

    @property
    def _starved(self) -> bool:
        """Whether the program waits for an input that will not be sent."""
        return self._without_more and self._awaited > self._stream.num_inputs

    def _close_if_starved(self) -> None:
        if self._starved:
            self._stream.close()

    def _why(self) -> str:
        waits = f"the program waits for input {self._awaited}"
        if self._with_inputs:
            return f"{waits}, and standard input has ended; give all inputs on standard input"
        return f"{waits}, which this command cannot send; use 'tokenbus controller run'"

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
