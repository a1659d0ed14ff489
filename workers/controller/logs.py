"""What a controller prints, bounded."""

from __future__ import annotations

IN_ALL = 16
"""How many times its limit a log keeps altogether: all of it is held until its stream ends."""


class Log:
    """Bytes of one sequence since they were last taken; beyond ``limit`` they are only counted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = IN_ALL * limit
        self._kept = bytearray()
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Adds to it."""
        self._kept += data[: self.room(len(data))]

    def room(self, size: int) -> int:
        """How many of the next ``size`` bytes will be kept; the others are counted as dropped."""
        kept = min(size, max(0, min(self._limit, self._left) - len(self._kept)))
        self._dropped += size - kept
        return kept

    def take(self) -> str:
        """What was written since the last call, as text."""
        if not self._kept and not self._dropped:
            return ""
        text = self._kept.decode("utf-8", "replace")
        if self._dropped:
            text += f"\n[{self._dropped} more bytes of log were dropped]\n"
        self._left -= len(self._kept)
        self._kept.clear()
        self._dropped = 0
        return text
