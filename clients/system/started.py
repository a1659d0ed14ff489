"""Finds the settings of a running system, for commands that are called in another folder."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.endpoints import separate
from ...protocol.settings import CONFIG, SettingError, Settings, resolve
from .processes import running_supervisors

IPC = "ipc://"


def started_settings(pid: int) -> Settings | None:
    """The settings of a process, from its environment and its ``tokenbus.toml``. The paths that a
    client needs are absolute.

    The result is None if the process has ended or belongs to another user. It is also None if the
    settings are not valid, or if ``/proc`` does not exist.
    """
    process = Path("/proc") / str(pid)
    try:
        folder = Path(os.readlink(process / "cwd"))
        entries = (process / "environ").read_bytes().split(b"\0")
        given = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
        name = given.get(CONFIG, "")
        path = folder / (name or "tokenbus.toml")
        file: dict[str, Any] = {}
        if name or path.is_file():
            file = tomllib.loads(path.read_text())
        return _absolute(resolve({}, given, file, str(path)), folder)
    except (OSError, ValueError, SettingError):
        return None


def is_started(front: str) -> bool:
    """Whether a supervisord of this user runs a system whose brokers have the addresses
    ``front``."""
    found = (started_settings(pid) for pid in running_supervisors())
    return any(settings is not None and settings.front_endpoint == front for settings in found)


def _absolute(settings: Settings, folder: Path) -> Settings:
    """Makes the paths in the settings absolute that a client needs. A relative path is relative to
    ``folder``."""
    fronts = [
        IPC + str(folder / front.removeprefix(IPC)) if front.startswith(IPC) else front
        for front in separate(settings.front)
    ]
    return msgspec.structs.replace(
        settings,
        front=",".join(fronts),
        run_dir=str(folder / settings.run_folder),
        keys=str(folder / settings.keys) if settings.keys else "",
        key=str(folder / settings.key) if settings.key else "",
    )
