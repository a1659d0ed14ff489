"""The id of this machine, and the size of its memory. Two processes can share memory if they have
the same machine id."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"


@cache
def machine_id() -> str:
    """An id that all processes of one machine share. The id is different on each machine, and after
    each boot."""
    try:
        return f"{socket.gethostname()}/{_BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def machine_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The memory that the processes of this machine may use together, in bytes.

    The result is the smallest of these values: ``MemTotal``, and the limits of this process's
    cgroups and their parents (version 1 or 2). ``proc`` and ``cgroups`` are the folders where the
    system mounts these file systems.
    """
    found = re.search(r"^MemTotal:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{proc / 'meminfo'} does not have a line MemTotal")
    return min([1024 * int(found[1]), *memory_limits(proc, cgroups)])


def memory_limits(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Iterator[int]:
    """The memory limits of the cgroups of this process and of all their parents. A cgroup of
    version 1 without a limit reports a number above the memory of any machine."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = PurePosixPath(path.lstrip("/"))
        # In a container, the path may be a path in the host's hierarchy. The folders of this path
        # do not exist in the container, but the root of the mount does.
        for each in (folder, *folder.parents):
            try:
                text = (root / each / file).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text)
