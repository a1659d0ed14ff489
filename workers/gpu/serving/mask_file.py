"""Shared memory for masks and biases: a controller worker on the same machine writes rows of a
memory file, and the GPU worker reads them.

The file does not have a name in a folder. While this process is alive, the controller worker can
open the file under ``/proc``. So a killed process does not leave a file.
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
"""Number of masks, and of biases, in a mask file."""


class MaskFile:
    """``ROWS`` masks of ``words`` u32 each, followed by ``ROWS`` biases. One controller worker
    writes them, and this worker reads them in place. The system allocates memory only for the parts
    of the file that have been written.
    """

    def __init__(self, words: int) -> None:
        """Raises OSError if the system has no memory files."""
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
        """The masks, u32 ``[words]`` each; bit i of a row is token i, little-endian. A reference to
        a row keeps the memory mapped."""
        self.biases = every[ROWS * words :].reshape(ROWS, bias_size)
        """The encoded biases, u32 ``[ROWS, bias_bytes / 4]``; ``biases.py`` describes the
        format."""
        number = os.fstat(self._descriptor).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}#{number}"
        """The path at which the controller worker opens the file, and the file's inode. The inode
        is needed, because after a restart, or in another container, the path may lead to another
        file."""

    def close(self) -> None:
        """Closes the descriptor. The memory is freed when no process maps it any more."""
        os.close(self._descriptor)


class MaskFiles:
    """The memory files of this worker. There is one file for each controller worker that steers
    requests of this worker, and for each mask size.

    A file is open while any live request uses it. When a controller worker registers again, it gets
    a new id, and its earlier requests end. So its old file is closed.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], MaskFile | None] = {}
        """The file for each controller worker and mask size in words; None if the system could not
        make a file."""
        self._users: Counter[tuple[int, int]] = Counter()

    def open(self, worker: int, words: int) -> MaskFile | None:
        """Counts a request that uses the file of a controller worker, and opens the file if needed.
        Returns None if the file cannot be opened."""
        key = (worker, words)
        self._users[key] += 1
        if key not in self._files:
            try:
                self._files[key] = MaskFile(words)
            except OSError as error:
                log.warning(
                    "masks are sent in messages, because a memory file cannot be opened: %s", error
                )
                self._files[key] = None
        return self._files[key]

    def get(self, worker: int, words: int) -> MaskFile | None:
        """The file of a controller worker; None if its masks are sent in messages."""
        return self._files.get((worker, words))

    def close(self, worker: int, words: int) -> None:
        """Ends a request's use of the file of a controller worker. The last request closes the
        file."""
        key = (worker, words)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            file = self._files.pop(key)
            if file is not None:
                file.close()
