"""Masks on one machine: a file in memory whose rows a controller worker writes and this one reads.

It has no name in any folder: the other process reaches it under ``/proc`` as long as this one
lives, so that nothing is left behind by one that is killed.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

ROWS = 1024


class MaskFile:
    """Rows of ``words`` u32 each, written by one controller worker and read in place."""

    def __init__(self, words: int) -> None:
        """Raises OSError where the system has no such files."""
        self.row_bytes = 4 * words
        self._descriptor = os.memfd_create("tokenbus-masks")
        os.ftruncate(self._descriptor, ROWS * self.row_bytes)
        self._map = mmap.mmap(self._descriptor, ROWS * self.row_bytes)
        self.rows = np.frombuffer(self._map, dtype=np.uint32).reshape(ROWS, words)
        """``[ROWS, words]``; bit i of a row is token i, little-endian."""
        number = os.fstat(self._descriptor).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}#{number}"
        """Where the other process finds it, and the number by which it knows that this is the one:
        a process that was started again, or in another container, may have one at the same place.
        """

    def close(self) -> None:
        """Gives the descriptor back; the memory goes when nobody maps it any more."""
        os.close(self._descriptor)
