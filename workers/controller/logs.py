"""The bounded log of a controller's output."""

from __future__ import annotations

IN_ALL = 16
"""Maximum total bytes that a log accepts until its sequence ends, as a multiple of the log's
``limit``. The total is bounded because all output is stored until the stream ends."""


class Log:
    """The output of one sequence since the last ``take``. Bytes beyond ``limit`` are counted and
    dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = IN_ALL * limit
        self._data = bytearray()
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Appends the bytes that fit, and counts the others as dropped."""
        self._data += data[: self.room(len(data))]

    def room(self, size: int) -> int:
        """Returns how many of ``size`` further bytes fit, and counts the others as dropped."""
        kept = min(size, max(0, min(self._limit, self._left) - len(self._data)))
        self._dropped += size - kept
        return kept

    def drop(self, size: int) -> None:
        """Counts bytes that were dropped before they reached this log."""
        self._dropped += size

    def take_bytes(self) -> tuple[bytes, int]:
        """Removes the output since the last call, and returns it with the number of dropped
        bytes."""
        if not self._data and not self._dropped:
            return b"", 0
        taken = bytes(self._data), self._dropped
        self._left -= len(self._data)
        self._data.clear()
        self._dropped = 0
        return taken

    def take(self) -> str:
        """Removes the output since the last call, and returns it as text, with a line about dropped
        bytes."""
        data, dropped = self.take_bytes()
        text = data.decode("utf-8", "replace")
        if dropped:
            text += f"\n[{dropped} more bytes of log were dropped]\n"
        return text
