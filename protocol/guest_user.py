"""The operating system's user under which guest processes run (the setting ``guest_user``). A guest
process runs modules and scripts that clients have uploaded."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NamedTuple

_NEEDED = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
"""The capabilities that a process needs in order to change the user of a child process and to kill
the child, with their bit numbers."""


class GuestUser(NamedTuple):
    """The user and the group of guest processes."""

    uid: int
    gid: int

    @classmethod
    def named(cls, name: str) -> GuestUser:
        """The user with this name. Raises ValueError if guest processes cannot run under this
        user."""
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            raise ValueError(
                f"guest_user: no user {name!r} on this machine; make one with "
                f"'useradd --system --no-create-home {name}'"
            ) from None
        if found.pw_uid in (0, os.getuid()):
            raise ValueError(
                f"guest_user: {name} is the user of the workers or root; expected a user that owns "
                "no files and no other processes"
            )
        if missing := [each for each, bit in _NEEDED.items() if not _capabilities() >> bit & 1]:
            raise ValueError(
                f"guest_user: this process may not start processes as {name}, because it lacks "
                f"{', '.join(missing)}; start the system as root, or with these capabilities "
                "(AmbientCapabilities= in a systemd unit)"
            )
        return cls(found.pw_uid, found.pw_gid)


def _capabilities() -> int:
    """The effective capabilities of this process, as bits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
