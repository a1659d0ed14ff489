"""Writes whole files atomically, even if several processes write the same file at the same time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_NEW = ".new-"


def write_whole(file: Path, content: bytes, *, synced: bool) -> None:
    """Writes ``content`` to a new file, and renames the new file to ``file``. If ``synced``, the
    content is on the disk before the rename. If writing raises OSError, the old file is
    unchanged."""
    number, name = _begun(file.parent)
    try:
        with os.fdopen(number, "wb") as new:
            new.write(content)
            new.flush()
            if synced:
                os.fsync(new.fileno())
            os.replace(name, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_first(file: Path, content: bytes) -> None:
    """Writes a file if it does not exist yet. If several processes call this at the same time, the
    file has the content of one process. Raises OSError if the file cannot be written."""
    number, name = _begun(file.parent)
    try:
        with os.fdopen(number, "wb") as new:
            new.write(content)
            new.flush()
            with suppress(FileExistsError):
                os.link(name, file)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _begun(folder: Path) -> tuple[int, str]:
    """Creates, opens and locks a new file of mode 0600; returns its descriptor and its name."""
    while True:
        number, name = tempfile.mkstemp(prefix=_NEW, dir=folder)
        # ``clear_left`` removes files without a lock, because their processes have ended.
        fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number, name
        # Another process has removed the file meanwhile.
        os.close(number)


def clear_left(folder: Path) -> None:
    """Removes unfinished files of dead processes from a folder."""
    for left in folder.glob(f"{_NEW}*"):
        with suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
