"""The run directory of a system. It contains the system's sockets and logs, and the configuration
of supervisord."""

from __future__ import annotations

import os
import re
import shlex
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...protocol.decoders import json_decoder
from ...protocol.settings import Settings
from .faults import WRONG_SETTING, SystemFault

SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket's path on Linux, in bytes."""
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ ")
"""Matches the time and the level at the beginning of a log line."""
LONGEST_NAME = "supervisor.sock.4194304"
"""The longest name of a socket in the folder. supervisord first creates its socket under a name
that ends with its process id."""


class _JsonLine(msgspec.Struct):
    """A log line in the format ``json``."""

    message: str


@dataclass(frozen=True)
class RunDir:
    """The paths in one run directory."""

    path: Path

    @classmethod
    def of(cls, settings: Settings) -> RunDir:
        """The run directory of these settings, as an absolute path. ``make`` creates it."""
        return cls(Path(os.path.abspath(settings.run_folder)))

    @property
    def down_command(self) -> str:
        """The command that stops the system in this run directory."""
        default = self == RunDir.of(Settings())
        return "tokenbus down" + ("" if default else f" --run-dir {shlex.quote(str(self.path))}")

    @property
    def conf(self) -> Path:
        """The configuration of supervisord: the packaged file with the system's settings."""
        return self.path / "supervisord.conf"

    @property
    def supervisor_socket(self) -> Path:
        """The socket of supervisord for commands."""
        return self.path / "supervisor.sock"

    @property
    def logs(self) -> Path:
        """The folder of the log files."""
        return self.path / "log"

    @property
    def supervisor_log(self) -> Path:
        """supervisord's own log: starts, exits, restarts."""
        return self.logs / "supervisord.log"

    @property
    def supervisor_errors(self) -> Path:
        """The standard error of supervisord, which says why supervisord cannot start."""
        return self.logs / "supervisord.err"

    def make(self) -> None:
        """Creates the folder and its ``log/`` with access for this user only.

        Raises SystemFault if the folder cannot be created, or if the path contains ``%`` or is too
        long for a socket in the folder. Also raises SystemFault if the folder belongs to another
        user, or if other users have access to it. Such users could control the system.
        """
        room = SOCKET_PATH_BYTES - len(LONGEST_NAME) - 1
        length = len(os.fsencode(self.path))
        if length > room:
            raise SystemFault(
                f"run_dir: {self.path} has {length} bytes, too long for the path of a socket; "
                f"choose a path of at most {room} bytes with --run-dir",
                WRONG_SETTING,
            )
        if "%" in str(self.path):
            raise SystemFault(
                f"run_dir: {self.path} contains '%', which supervisord does not support; choose "
                "another path with --run-dir",
                WRONG_SETTING,
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise SystemFault(
                    f"run_dir: {self.path} is not a folder that belongs to this user; choose "
                    "another path with --run-dir",
                    WRONG_SETTING,
                )
            if found.st_mode & 0o077:
                raise SystemFault(
                    f"run_dir: other users may access {self.path} (mode "
                    f"{found.st_mode & 0o777:o}); use chmod 700, or another path with --run-dir",
                    WRONG_SETTING,
                )
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SystemFault(
                f"run_dir: cannot use {self.path}: {error.strerror}", WRONG_SETTING
            ) from None

    def last_line(self, process: str) -> str:
        """The message in the last log line of a process; ``""`` if the log is empty."""
        line = "".join(_tail(self.logs / f"{process}.log")[-1:])
        if line.startswith("{"):
            with suppress(msgspec.MsgspecError):
                return json_decoder(_JsonLine).decode(line).message
        return _STAMP.sub("", line)

    def last_error(self) -> str:
        """The error message of a supervisord that did not start; ``""`` without a message."""
        lines = _tail(self.supervisor_errors)
        return next((line for line in lines if line.startswith("Error: ")), "".join(lines[-1:]))


def _tail(file: Path, tail_bytes: int = 16_384) -> list[str]:
    """The lines in the last ``tail_bytes`` bytes of a file, without empty lines."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - tail_bytes))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
