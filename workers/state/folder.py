"""The folder of a state worker: private to its user, and locked by one worker at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderError(Exception):
    """A state worker cannot use its folder or a file in it; the message has the reason."""


class FolderInUseError(FolderError):
    """Another state worker uses the folder."""


class Folder:
    """A folder with a lock that the kernel releases when the process ends."""

    def __init__(self, path: Path) -> None:
        """Creates the folder if it is missing, and locks it.

        Raises FolderInUseError if another process has the lock, and FolderError if the folder
        cannot be used.
        """
        self.path = path
        try:
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in missing:
                _sync(folder.parent)
            if path.stat().st_uid != os.getuid():
                raise FolderError(
                    f"the folder {path} belongs to another user; it must belong to the user "
                    "of this process"
                )
            path.chmod(0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / "lock", flags, 0o600)
        except OSError as error:
            raise FolderError(f"cannot use the folder {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.read(self._lock, 20).decode("ascii", "replace") or "unknown"
            os.close(self._lock)
            raise FolderInUseError(
                f"the folder {path} is in use by another state worker, process {other}; stop that "
                "worker, start this one with another run_dir, or start it with --standby, so that "
                "it takes over when the other worker ends"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    @property
    def lost(self) -> bool:
        """Whether the folder, or the lock in it, was deleted or replaced."""
        try:
            there = os.stat(self.path / "lock", follow_symlinks=False)
        except OSError:
            return True
        own = os.fstat(self._lock)
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def sync(self) -> None:
        """Syncs the directory to disk, after a file was renamed. Raises OSError."""
        _sync(self.path)

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)


def _sync(folder: Path) -> None:
    """Syncs the names in a folder to disk. Raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
