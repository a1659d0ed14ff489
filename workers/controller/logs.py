"""The bounded log of a controller's output."""

from __future__ import annotations

IN_ALL = 16
"""Maximum total output of a log, as a multiple of its ``limit``. The total is bounded because the
output is stored until the stream ends."""


class Log:
    """Output of one sequence since the last ``take``; bytes beyond ``limit`` are only counted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = IN_ALL * limit
        self._data = bytearray()
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Appends bytes, as far as they fit."""
        self._data += data[: self.room(len(data))]

    def room(self, size: int) -> int:
        """Counts ``size`` further bytes; returns how many of them fit. The others are counted as
        dropped."""
        kept = min(size, max(0, min(self._limit, self._left) - len(self._data)))
        self._dropped += size - kept
        return kept

    def drop(self, size: int) -> None:
        """Counts bytes that were dropped before they reached this log."""
        self._dropped += size

    def take_bytes(self) -> tuple[bytes, int]:
        """The output since the last call, and the number of dropped bytes."""
        if not self._data and not self._dropped:
            return b"", 0
        taken = bytes(self._data), self._dropped
        self._left -= len(self._data)
        self._data.clear()
        self._dropped = 0
        return taken

    def take(self) -> str:
        """The output since the last call, as text."""
        data, dropped = self.take_bytes()
        text = data.decode("utf-8", "replace")
        if dropped:
            text += f"\n[{dropped} more bytes of log were dropped]\n"
        return text
