"""Prints the messages of a stream's program, and sends lines of standard input to the program."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from ...protocol.errors import Code, RequestError, TokenbusError
from ...protocol.messages import MAX_INPUT_BYTES, Token
from .. import Stream
from .exits import report
from .line_pipe import READ_BYTES, Line, split_lines

AGAIN_S = 0.5
"""If the error for a refused input has no ``retry_after_s``, the input is sent again after this
number of seconds."""


class Dialogue:
    """Prints the messages of a stream's program on stderr, and sends inputs to the program.

    If ``with_inputs`` is true, a thread sends each line of standard input to the program as an
    input. The thread starts after the first message, or when the program waits for an input.
    """

    def __init__(self, stream: Stream, *, with_inputs: bool = True) -> None:
        self._stream = stream
        self._sends_inputs = with_inputs
        self._without_more = not with_inputs
        """Whether the last input was sent. The thread that sends the inputs first sets this flag
        and then reads ``_awaited``. The thread that reads the stream first sets ``_awaited`` and
        then reads this flag. So if the program waits for an input that will never be sent, at least
        one thread detects this."""
        self._refused: deque[TokenbusError] = deque(maxlen=1)
        """The error of a refused input, until the error is reported. If standard input ends while
        the program waits for an input, ``entries`` raises this error."""
        self._awaited = 0
        """If all running sequences wait for an input, the lowest number of these inputs. 0 if a
        running sequence does not wait, or if no sequence is running."""
        self._with_inputs = with_inputs

    def entries(self) -> Iterator[Token]:
        """Yields the entries of the stream, up to its end. If the program waits for an input that
        will not be sent, closes the stream and raises TokenbusError."""
        try:
            for entry in self._stream:
                yield entry
                running = [s.waiting for s in self._stream.sequences if s.finish_reason is None]
                self._awaited = min(running, default=0)
                if self._without_more:
                    self._close_if_starved()
        except RuntimeError:
            # The thread that sends the inputs has closed the stream.
            if not self._starved:
                raise
        if self._starved:
            if self._refused:
                raise self._refused.pop()
            raise RequestError(Code.INVALID_FIELD, self._why())
        self._report_refused()

    def show(self, entry: Token, line_begun: bool) -> None:
        """Prints the messages of an entry. ``line_begun``: whether the last printed line has no
        line break yet."""
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
                self._report_refused()
                refused = self._send(line)
                if refused is not None:
                    self._refused.append(refused)
                if os.isatty(0):
                    self._report_refused()
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

    def _report_refused(self) -> None:
        with suppress(IndexError):  # Another thread may report at the same time.
            report(self._refused.pop())

    def _send(self, line: Line) -> TokenbusError | None:
        """Sends an input. If too many inputs wait for the program, the broker refuses the input,
        and this method sends it again after a pause. Returns None if the input is accepted, or if
        the stream has ended. If the input is refused for another reason, returns the error."""
        if line.size > MAX_INPUT_BYTES:
            what = f"the input has {line.size} bytes; at most {MAX_INPUT_BYTES} are allowed"
            return RequestError(Code.TOO_LARGE, what)
        while True:
            try:
                self._stream.send(line.data.decode("utf-8", "replace"))
                return None
            except TokenbusError as error:
                if error.code != Code.QUEUE_FULL:
                    # UNKNOWN_STREAM means that the stream has ended.
                    return None if error.code == Code.UNKNOWN_STREAM else error
                time.sleep(error.retry_after_s or AGAIN_S)
