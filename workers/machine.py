"""Which machine this is, so that two processes on one can share memory."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine_id() -> str:
    """The same for all processes of one machine, another one on each other machine and boot."""
    try:
        return f"{socket.gethostname()}/{_BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()
