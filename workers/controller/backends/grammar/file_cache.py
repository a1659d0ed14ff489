"""A folder of files by key that may grow so far and no further."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


class FileCache:
    """Files of this user alone, written under another name and renamed. Safe from any process."""

    def __init__(self, folder: Path, suffix: str, most_bytes: int) -> None:
        """Beyond ``most_bytes`` in all the files that were used least recently go."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._suffix = suffix
        self._most = most_bytes

    def path(self, key: str) -> Path:
        """Where the file of a key is, or would be; it counts as used now."""
        path = self._folder / f"{key}{self._suffix}"
        with suppress(OSError):
            os.utime(path)
        return path

    def write(self, key: str, *parts: bytes) -> None:
        """Writes a file. Raises OSError where that cannot be done."""
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".new-", delete=False) as new:
            try:
                for part in parts:
                    new.write(part)
                new.flush()
                os.replace(new.name, self._folder / f"{key}{self._suffix}")
            except BaseException:
                Path(new.name).unlink(missing_ok=True)
                raise
        self._bound()

    def _bound(self) -> None:
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
