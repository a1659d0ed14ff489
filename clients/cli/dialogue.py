"""The dialogue of a command with the program of its stream: messages and inputs."""

from __future__ import annotations

import os
import sys
import threading

from ...protocol.errors import Code, TokenbusError
from ...protocol.messages import Token
from .. import Stream
from .exits import report


class Dialogue:
    """Prints the messages of a program on stderr.

    After the first message, a thread sends each line of standard input to the program as an input.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._begun = False

    def show(self, entry: Token, line_begun: bool) -> None:
        """Prints the messages of an entry. ``line_begun``: the last printed line has not ended."""
        for message in entry.messages:
            before = "\n" if line_begun else ""
            line_begun = False
            print(f"{before}--- message of {entry.seq}\n{message}", file=sys.stderr, flush=True)
        if entry.messages and not self._begun:
            self._begun = True
            threading.Thread(target=self._send_lines, daemon=True).start()

    def _send_lines(self) -> None:
        # Reading ``sys.stdin`` would hold its lock, and Python cannot exit while a thread holds it.
        rest = b""
        try:
            while data := os.read(0, 65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._stream.send(line.decode("utf-8", "replace"))
            if rest:
                self._stream.send(rest.decode("utf-8", "replace"))
        except TokenbusError as error:
            if error.code != Code.UNKNOWN_STREAM:  # The code if the stream has ended.
                report(error)
        except (OSError, RuntimeError):
            return  # Standard input is closed, or the command has closed its client.
