"""Finds the running processes of a system in ``/proc``, even if their supervisord has ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .run_dir import RunDir


def alive(pid: int) -> bool:
    """Whether a process with the id ``pid`` runs. A zombie does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return not Path("/proc/self").exists() and _exists(pid)
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def started_by(run_dir: RunDir) -> list[int]:
    """The ids of the running processes of a run directory: the processes that its supervisord has
    started, and their descendants.

    Each of these processes has supervisord's address in its environment. Without ``/proc``, the
    list is empty.
    """
    mark = b"SUPERVISOR_SERVER_URL=unix://" + os.fsencode(run_dir.supervisor_socket)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            given = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        pid = int(folder.name)
        if mark in given and alive(pid):
            found.append(pid)
    return sorted(found)


def supervisor_of(run_dir: RunDir) -> int | None:
    """The process id of the supervisord of this run directory; None if it does not run.
    supervisord's socket may have been deleted. Needs ``/proc``.

    This function looks for the parent of the processes that supervisord has started. It also looks
    for a process whose arguments contain the configuration file of the run directory.
    """
    started = started_by(run_dir)
    candidates = {parent for pid in started if (parent := _parent(pid)) not in (0, *started)}
    for pid in sorted(candidates):
        if _is_supervisord(pid):
            return pid
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if os.fsencode(run_dir.conf) in arguments(pid) and _is_supervisord(pid):
            return pid
    return None


def arguments(pid: int) -> list[bytes]:
    """The command line of a process; ``[]`` if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _parent(pid: int) -> int:
    """The id of the parent of a process; 0 if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _is_supervisord(pid: int) -> bool:
    """Whether a process is a running supervisord of this user."""
    try:
        own = os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False
    named = any(argument.endswith(b"supervisord") for argument in arguments(pid)[:4])
    return own and named and alive(pid)


def running_supervisors() -> list[int]:
    """Ids of this user's running supervisords, of any system; needs ``/proc``."""
    found = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return sorted(pid for pid in found if _is_supervisord(pid))


def in_session(leader: int) -> list[int]:
    """Ids of the running processes in the session of process ``leader``; needs ``/proc``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in ("Z", "X") and int(fields[3]) == leader:
            found.append(int(folder.name))
    return sorted(found)


def send(pids: list[int], number: signal.Signals) -> None:
    """Sends a signal to processes. Skips processes that do not exist or belong to another user."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
