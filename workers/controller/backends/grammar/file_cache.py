"""A cache of files by key in a folder of bounded size."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


class FileCache:
    """Files that only the user of this process can read. A file is written under a temporary name
    and then renamed, so that other processes that share the folder never read an unfinished
    file."""

    def __init__(self, folder: Path, suffix: str, max_bytes: int) -> None:
        """If all files together exceed ``max_bytes``, the least recently used files are removed."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._suffix = suffix
        self._most = max_bytes

    def path(self, key: str) -> Path:
        """Returns the path of a key's file, and marks the file as used if it exists."""
        path = self._folder / f"{key}{self._suffix}"
        with suppress(OSError):
            os.utime(path)
        return path

    def write(self, key: str, *parts: bytes) -> None:
        """Writes the file of a key, with ``parts`` one after another. Raises OSError if the file
        cannot be written."""
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".new-", delete=False) as new:
            try:
                for part in parts:
                    new.write(part)
                new.flush()
                os.replace(new.name, self._folder / f"{key}{self._suffix}")
            except BaseException:
                Path(new.name).unlink(missing_ok=True)
                raise
        self._evict()

    def _evict(self) -> None:
        files = []
        for path in self._folder.iterdir():
            with suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= self._most:
                break
            path.unlink(missing_ok=True)
            used -= size
