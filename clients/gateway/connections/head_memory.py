"""Bounds the memory of the large heads of all connections of one gateway process.

A head is the first line and the headers of a request. It arrives before the API key is checked.
"""

from __future__ import annotations

ORDINARY_HEAD_BYTES = 8 * 1024
"""Number of bytes of each head that are not counted. Most heads are smaller."""
MAX_LARGE_HEADS_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes that all heads of one process have beyond ``ORDINARY_HEAD_BYTES``."""


class HeadMemory:
    """Counts the bytes of heads beyond ``ORDINARY_HEAD_BYTES``."""

    def __init__(self, max_bytes: int = MAX_LARGE_HEADS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0

    def resize(self, before: int, after: int) -> bool:
        """Counts a head of ``after`` bytes, which had ``before`` bytes at the previous call.
        Returns False, and counts nothing, if the head does not fit."""
        more = max(after - ORDINARY_HEAD_BYTES, 0) - max(before - ORDINARY_HEAD_BYTES, 0)
        if more > 0 and self._bytes + more > self._max_bytes:
            return False
        self._bytes += more
        return True
