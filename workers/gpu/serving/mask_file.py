"""Masks and biases on one machine: a file in memory whose rows a controller worker writes and this
one reads.

It has no name in any folder: the other process opens it under ``/proc`` as long as this one lives,
so that nothing remains of a process that was killed.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import Counter

import numpy as np

from ..sampling.biases import bias_words

log = logging.getLogger(__name__)

ROWS = 1024


class MaskFile:
    """Rows of ``words`` u32 each, written by one controller worker and read in place.

    Behind the masks of all rows there is room for a bias of each. The system provides memory for
    the biases that were written, and for no others."""

    def __init__(self, words: int) -> None:
        """Raises OSError where the system has no such files."""
        self.row_bytes = 4 * words
        bias_size = bias_words(32 * words)
        self.bias_bytes = 4 * bias_size
        size = ROWS * (self.row_bytes + self.bias_bytes)
        self._descriptor = os.memfd_create("tokenbus-masks")
        try:
            os.ftruncate(self._descriptor, size)
            memory = mmap.mmap(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        every = np.frombuffer(memory, dtype=np.uint32)
        self.rows = list(every[: ROWS * words].reshape(ROWS, words))
        """u32 ``[words]`` each; bit i of a row is token i, little-endian. A row that is still
        referenced keeps the memory mapped."""
        self.biases = every[ROWS * words :].reshape(ROWS, bias_size)
        """u32 ``[ROWS, bias_bytes / 4]``: see ``biases.py``."""
        number = os.fstat(self._descriptor).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}#{number}"
        """The path at which the other process opens the file, and its inode. The inode identifies
        it, because a restarted process, or one in another container, may have another file at the
        same path."""

    def close(self) -> None:
        """Closes the descriptor. The memory is freed when no process maps it any more."""
        os.close(self._descriptor)


class MaskFiles:
    """The files of the controller workers whose requests run here, one for each size of a mask.

    A file is open as long as one of the requests that use it is live. A controller worker that
    registers again has another id, and its requests end, so that its file is closed.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], MaskFile | None] = {}
        """By controller worker and words of a mask; None where the system gave no file."""
        self._users: Counter[tuple[int, int]] = Counter()

    def open(self, worker: int, words: int) -> MaskFile | None:
        """One more request uses the file of a controller worker; None where there is none."""
        key = (worker, words)
        self._users[key] += 1
        if key not in self._files:
            try:
                self._files[key] = MaskFile(words)
            except OSError as error:
                log.warning("masks are sent in messages, as they cannot be shared: %s", error)
                self._files[key] = None
        return self._files[key]

    def get(self, worker: int, words: int) -> MaskFile | None:
        """The file of a controller worker; None where masks are sent in messages."""
        return self._files.get((worker, words))

    def close(self, worker: int, words: int) -> None:
        """A request that used the file of a controller worker is over."""
        key = (worker, words)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            file = self._files.pop(key)
            if file is not None:
                file.close()
