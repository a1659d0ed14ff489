"""What grammars have found out, on disk: the memories of their guests, by key.

A memory is only ever used inside the sandbox, so a file that somebody has changed can make masks
wrong, and nothing else; the folder is this user's alone.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ....protocol.errors import ControllerError

log = logging.getLogger(__name__)

MOST_BYTES = 1024**3
"""Of the folder; the files that were used least recently go first."""
_MAGIC = b"TBGM\x01\0\0\0"
_SUFFIX = ".memory"


class Memories:
    """Files of one folder, written under another name and renamed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, "grammar-memories")

    @contextmanager
    def read(self, key: str) -> Iterator[memoryview | None]:
        """A memory; None where there is none."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            yield None
            return
        with suppress(OSError):
            os.utime(path)
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
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".new-", delete=False) as new:
                new.write(_MAGIC + len(data).to_bytes(8, "little"))
                new.write(data)
            os.replace(new.name, self._path(key))
            self._bound()
        except Exception:
            log.exception("the memory of a grammar cannot be kept")

    def _bound(self) -> None:
        files = []
        for path in self._folder.iterdir():
            with suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            used -= size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"
