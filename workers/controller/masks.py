"""Where masks are written: rows of a file that the GPU worker maps too, or buffers to be sent."""

from __future__ import annotations

import logging
import mmap
import os

log = logging.getLogger(__name__)


class MaskRows:
    """The rows of one shared file, given out to sequences."""

    def __init__(self, path: str, rows: int, row_bytes: int) -> None:
        """Maps the file ``NAME#NUMBER``; raises OSError or ValueError where that cannot be done
        from here, or where what has this name here is not the file of this number."""
        self.row_bytes = row_bytes
        name, _, number = path.rpartition("#")
        descriptor = os.open(name, os.O_RDWR | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_ino != int(number):
                raise OSError(f"{name} is another file here")
            self._map = mmap.mmap(descriptor, rows * row_bytes)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._free = list(range(rows - 1, -1, -1))

    def take(self) -> int | None:
        """A row that nobody has; None where there is none."""
        try:
            # In one step, as several threads take rows.
            return self._free.pop()
        except IndexError:
            return None

    def view(self, row: int) -> memoryview:
        """The bytes of a row."""
        return self._view[row * self.row_bytes : (row + 1) * self.row_bytes]

    def give_back(self, row: int) -> None:
        """The row's sequence is over."""
        self._free.append(row)


class MaskFiles:
    """The shared files of this worker, by their paths."""

    def __init__(self) -> None:
        self._by_path: dict[str, MaskRows | None] = {}

    def get(self, path: str, rows: int, row_bytes: int) -> MaskRows | None:
        """The rows of a file; None where it cannot be mapped, so that masks are to be sent."""
        if path not in self._by_path:
            try:
                self._by_path[path] = MaskRows(path, rows, row_bytes)
            except (OSError, ValueError) as error:
                log.warning("masks are sent, as %s cannot be shared: %s", path, error)
                self._by_path[path] = None
        return self._by_path[path]
