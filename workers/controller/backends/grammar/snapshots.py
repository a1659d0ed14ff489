"""Snapshots of grammar instances on disk. A snapshot is the memory of the instance's guest.

The content of a snapshot is used only inside the sandbox, so a modified file can at worst cause
wrong masks. Only the worker's user can read and write the folder.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .....protocol.errors import ControllerError
from .file_cache import FileCache

log = logging.getLogger(__name__)

MAX_BYTES = 1024**3
_MAGIC = b"TBGM\x01\0\0\0"


class SnapshotFiles:
    """The snapshots in a folder, by key. One thread of this process writes them."""

    def __init__(self, folder: Path) -> None:
        self._files = FileCache(folder, ".memory", MAX_BYTES)
        self._writer = ThreadPoolExecutor(1, "grammar-snapshots")

    @contextmanager
    def read(self, key: str) -> Iterator[memoryview | None]:
        """The memory in a snapshot; None if the snapshot does not exist or is damaged."""
        try:
            with self._files.path(key).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            yield None
            return
        view = memoryview(mapped)
        head = len(_MAGIC) + 8
        size = int.from_bytes(view[len(_MAGIC) : head], "little")
        whole = bytes(view[: len(_MAGIC)]) == _MAGIC and len(view) == head + size
        part = view[head:]
        try:
            yield part if whole else None
        finally:
            part.release()
            view.release()
            mapped.close()

    def write(self, key: str, memory: Callable[[], bytes]) -> None:
        """Schedules a write; the writer thread calls ``memory`` to get the bytes."""
        self._writer.submit(self._write, key, memory)

    def close(self) -> None:
        """Waits for scheduled writes."""
        self._writer.shutdown()

    def _write(self, key: str, memory: Callable[[], bytes]) -> None:
        try:
            data = memory()
        except ControllerError:
            return  # The instance was closed.
        try:
            self._files.write(key, _MAGIC + len(data).to_bytes(8, "little"), data)
        except OSError as error:
            log.warning("the snapshot %s of a grammar cannot be written: %s", key[:12], error)
