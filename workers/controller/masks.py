"""Rows for masks and biases, in a memory file that the GPU worker of the same machine maps too."""

from __future__ import annotations

import logging
import mmap
import os
from collections import OrderedDict
from weakref import WeakValueDictionary

log = logging.getLogger(__name__)

MAX_REFUSED = 64
"""Maximum number of paths that are remembered because their files cannot be mapped. These files are
not tried again."""


class MaskRows:
    """The rows of one shared file. A sequence allocates a row. The file stays mapped as long as
    this object or one of its views exists, so that a mask is never written to an unmapped file.

    The file has the masks of all rows, then the biases of all rows. Row i consists of
    ``row_bytes`` bytes for a mask and ``bias_bytes`` bytes for a bias.
    """

    def __init__(self, path: str, rows: int, row_bytes: int, bias_bytes: int = 0) -> None:
        """Maps the file ``path``, which is ``NAME#NUMBER``. Raises OSError or ValueError if this
        process cannot map the file NAME, or if the inode number of NAME is not NUMBER. The second
        case occurs if the GPU worker runs on another machine."""
        self.row_bytes = row_bytes
        self.bias_bytes = bias_bytes
        self._rows = rows
        name, _, number = path.rpartition("#")
        descriptor = os.open(name, os.O_RDWR | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_ino != int(number):
                raise OSError(f"{name} is a different file on this machine")
            self._map = mmap.mmap(descriptor, rows * (row_bytes + bias_bytes))
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._free = list(range(rows - 1, -1, -1))

    def take(self) -> int | None:
        """A free row; None if all are in use."""
        try:
            # ``pop`` is atomic, and several threads allocate rows.
            return self._free.pop()
        except IndexError:
            return None

    def take_spare(self) -> int | None:
        """A free row for an optional use. None if at most half of the rows are free."""
        return self.take() if 2 * len(self._free) > self._rows else None

    def view(self, row: int) -> memoryview:
        """The bytes of a row's mask."""
        return self._view[row * self.row_bytes : (row + 1) * self.row_bytes]

    def bias_view(self, row: int) -> memoryview | None:
        """The bytes of a row's bias; None if the file has no room for biases."""
        if not self.bias_bytes:
            return None
        first = self._rows * self.row_bytes + row * self.bias_bytes
        return self._view[first : first + self.bias_bytes]

    def give_back(self, row: int) -> None:
        """Frees a row of a sequence that has ended."""
        self._free.append(row)


class MaskFiles:
    """The shared files that requests of this worker use, by their paths.

    When no stream uses the file of a GPU worker any more, the GPU worker creates another file for
    later streams. This table has only weak references to the rows. So a file is unmapped when no
    request uses it any more.
    """

    def __init__(self) -> None:
        self._by_path: WeakValueDictionary[str, MaskRows] = WeakValueDictionary()
        self._refused: OrderedDict[str, None] = OrderedDict()
        """Paths that cannot be mapped, the most recent at the end."""

    def get(self, path: str, rows: int, row_bytes: int, bias_bytes: int = 0) -> MaskRows | None:
        """The rows of a file. None if the file cannot be mapped: masks are then sent in
        messages."""
        found = self._by_path.get(path)
        if found is not None or path in self._refused:
            return found
        try:
            found = self._by_path[path] = MaskRows(path, rows, row_bytes, bias_bytes)
        except (OSError, ValueError) as error:
            log.warning("masks are sent in messages, because %s cannot be mapped: %s", path, error)
            self._refused[path] = None
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        return found
