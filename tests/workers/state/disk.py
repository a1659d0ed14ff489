"""A folder on a disk that can fail and lose power.

Files are written as usual. This disk records what survives a power failure: synced content, and
names that were in the folder when it was synced. As on Linux, pages whose sync has failed count as
clean, so a later sync succeeds without them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FOLDER = "."
"""The name that stands for the folder itself."""


@dataclass(eq=False)
class _File:
    """A file, and the content of it that is on the disk."""

    pinned: int
    """A descriptor that keeps the inode from being used again."""
    size: int = 0
    """Length of the beginning of the file that the next sync skips: these bytes are on the disk, or
    their sync has failed."""
    durable: bytes = b""

    def sync(self, fails: bool) -> None:
        """Writes the bytes after ``size`` to the disk. If the sync fails, writes zeros instead."""
        now = os.pread(self.pinned, 1 << 30, 0)
        self.size = min(self.size, len(now))
        new = now[self.size :]
        self.durable = self.durable[: self.size] + (bytes(len(new)) if fails else new)
        self.size = len(now)


@dataclass
class Disk:
    """The calls on a folder, and the content of its disk."""

    folder: Path
    fails: Callable[[int, str, str], bool] = lambda number, call, name: False
    """Whether a call fails; takes its number, its kind and the name of its file."""
    after: Callable[[str, str], None] = lambda call, name: None
    """Called after each sync and each rename that has succeeded."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    _files: dict[tuple[int, int], _File] = field(default_factory=dict)
    _durable: dict[str, _File] = field(default_factory=dict)

    def images(self) -> Iterator[dict[str, bytes]]:
        """Files that a power failure may leave. The folder has the names of its last sync or its
        current names, and the files have their synced content or their current content."""
        there = {path.name: self._of(path) for path in self.folder.iterdir()}
        for names in (self._durable, there):
            yield {name: file.durable for name, file in names.items()}
            yield {name: os.pread(f.pinned, 1 << 30, 0) for name, f in names.items()}

    def call(self, what: str, name: str, path: Path | int) -> None:
        """Records a call before it is made. Raises OSError if the call fails."""
        self.calls.append((what, name))
        if self.fails(len(self.calls), what, name):
            if what == "sync" and name != FOLDER:
                self._of(path).sync(fails=True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def synced(self, number: int) -> None:
        """Records that a descriptor was synced."""
        if self.name(number) == FOLDER:
            self._durable = {path.name: self._of(path) for path in self.folder.iterdir()}
        else:
            self._of(number).sync(fails=False)

    def close(self) -> None:
        """Closes the descriptors of the model."""
        for file in self._files.values():
            os.close(file.pinned)

    def _of(self, path: Path | int) -> _File:
        found = os.stat(path)
        file = self._files.get((found.st_dev, found.st_ino))
        if file is None:
            pinned = os.open(
                f"/proc/self/fd/{path}" if isinstance(path, int) else path, os.O_RDONLY
            )
            file = self._files[found.st_dev, found.st_ino] = _File(pinned)
        return file

    def name(self, path: Path | int) -> str | None:
        """The name of a file of the folder, or ``FOLDER``; None for any other file."""
        if isinstance(path, int):
            path = Path(os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)"))
        if path == self.folder:
            return FOLDER
        return path.name if path.parent == self.folder else None


@contextmanager
def disk_of(folder: Path) -> Iterator[Disk]:
    """Simulates the disk of an existing folder while the block runs."""
    disk = Disk(folder)
    synchronize: dict[str, Any] = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
    rename, write = os.rename, os.write

    def syncing(call: str) -> Callable[[int], None]:
        def sync(number: int) -> None:
            name = disk.name(number)
            if name is None:
                return
            disk.call("sync", name, number)
            synchronize[call](number)
            disk.synced(number)
            disk.after("sync", name)

        return sync

    def renaming(source: Path, target: Path) -> None:
        name = disk.name(source)
        if name is not None:
            disk.call("rename", name, source)
        rename(source, target)
        if name is not None:
            disk.after("rename", name)

    def writing(number: int, data: bytes) -> int:
        name = disk.name(number)
        if name is not None:
            disk.call("write", name, number)
        return write(number, data)

    with pytest.MonkeyPatch.context() as patch:
        for call in synchronize:
            patch.setattr(os, call, syncing(call))
        patch.setattr(os, "rename", renaming)
        patch.setattr(os, "write", writing)
        yield disk
    disk.close()
