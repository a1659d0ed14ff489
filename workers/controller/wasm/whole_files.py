"""Files that are written as a whole or not at all, by several processes at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_NEW = ".new-"


def write_whole(file: Path, content: bytes, *, synced: bool) -> None:
    """Writes a file under another name, and renames it; where it is ``synced``, it is on the disk
    afterwards. Raises OSError; nothing is left then."""
    number, name = tempfile.mkstemp(prefix=_NEW, dir=file.parent)
    try:
        with os.fdopen(number, "wb") as new:
            # As long as it is locked, it was not left by a process that died.
            fcntl.flock(new, fcntl.LOCK_EX)
            new.write(content)
            new.flush()
            if synced:
                os.fsync(new.fileno())
            os.replace(name, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def clear_left(folder: Path) -> None:
    """Removes what processes that died had begun to write in a folder."""
    for left in folder.glob(f"{_NEW}*"):
        with suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
