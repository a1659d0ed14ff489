"""What grammars have found out, on disk: the memories of their guests, by key.

A memory is only ever used inside the sandbox, so a file that somebody has changed can make masks
wrong, and nothing else; the folder is this user's alone.
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

MOST_BYTES = 1024**3
_MAGIC = b"TBGM\x01\0\0\0"


class SnapshotFiles:
    """The memories in a folder; they are written by one thread of this process."""

    def __init__(self, folder: Path) -> None:
        self._files = FileCache(folder, ".memory", MOST_BYTES)
        self._writer = ThreadPoolExecutor(1, "grammar-memories")

    @contextmanager
    def read(self, key: str) -> Iterator[memoryview | None]:
        """A memory; None where there is none."""
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
        """Writes a memory soon; ``memory`` gives it then."""
        self._writer.submit(self._write, key, memory)

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()

    def _write(self, key: str, memory: Callable[[], bytes]) -> None:
        try:
            data = memory()
        except ControllerError:
            return  # The guest is gone.
        try:
            self._files.write(key, _MAGIC + len(data).to_bytes(8, "little"), data)
        except OSError as error:
            log.warning("the memory %s of a grammar cannot be kept: %s", key[:12], error)
