"""Starts, watches and stops a supervisord and its processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple, TypeVar

import msgspec
from supervisor.xmlrpc import SupervisorTransport

from ...protocol.python_command import python_command
from ...protocol.settings import Settings, environment
from .conf import configuration
from .faults import SystemFault
from .processes import alive, in_session, send, started_by
from .run_dir import RunDir

T = TypeVar("T")

START_S = 20.0
"""Maximum time until a new supervisord answers, in seconds."""
ANSWER_S = 10.0
"""Maximum time until a running supervisord answers a command, in seconds."""
EXITED = re.compile(r"exited: (\S+) \((?:exit status (\d+)|terminated by ([^;]+));")
"""Matches a line about the end of a process in supervisord's log. The log is read because
supervisord's XML-RPC interface does not report everything. It does not report the signal that
killed a process. It also does not report the exit code of a process that exits within
``startsecs``."""


@dataclass(frozen=True)
class ProcessState:
    """The state of a process in supervisord."""

    name: str
    state: str
    """supervisord's name of the state: STARTING, RUNNING, BACKOFF, STOPPING, STOPPED, EXITED,
    FATAL."""
    pid: int
    """The process id; 0 if the process does not run."""
    group: str = ""
    """The process's group in supervisord, such as ``gpu-worker``."""

    @property
    def failed(self) -> bool:
        """Whether supervisord has given up the process after several early exits. A process in the
        state EXITED does not count: supervisord restarts it, unless its exit code is 2.
        """
        return self.state == "FATAL"


class Exit(NamedTuple):
    """The end of a process that supervisord did not stop. supervisord starts the process again,
    unless the exit code is 2 (a setting is wrong)."""

    name: str
    code: int | None
    """The exit code; None if a signal killed the process."""
    signal: str = ""
    """The signal that killed the process, such as ``SIGKILL``; ``""`` if the process exited."""

    def __str__(self) -> str:
        """A line for the operator."""
        ended = (
            f"exited with code {self.code}" if self.code is not None else f"killed by {self.signal}"
        )
        return f"{self.name}: {ended}; it will be restarted"


class _UnixConnection(HTTPConnection):
    """An HTTP connection to a Unix socket. If supervisord does not answer within ``ANSWER_S``, the
    connection raises TimeoutError. For example, supervisord is suspended."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        """Opens the connection; raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Control:
    """Sends commands to the supervisord of a run directory over its Unix socket. Another process
    may have started this supervisord."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._address = f"unix://{run_dir.supervisor_socket}"

    def pid(self) -> int | None:
        """The process id of supervisord; None if supervisord does not answer."""
        return self._ask(lambda api: int(api.getPID()))

    def processes(self) -> list[ProcessState] | None:
        """All processes, sorted by group and name; None if supervisord does not answer."""
        infos = self._ask(lambda api: list(api.getAllProcessInfo()))
        if infos is None:
            return None
        return [ProcessState(i["name"], i["statename"], int(i["pid"]), i["group"]) for i in infos]

    def signal(self, process: ProcessState, name: str) -> None:
        """Sends a signal to a process. If the process exits, supervisord restarts it, unless its
        exit code is 2."""
        self._ask(lambda api: bool(api.signalProcess(f"{process.group}:{process.name}", name)))

    def announce_end(self) -> None:
        """Notifies the brokers that the system ends, and also the process that manages workers in a
        Ray cluster. They then do not wait for successors of the ended processes."""
        for group in ("broker", "cluster"):
            self._ask(partial(_announce, group))

    def shutdown(self) -> None:
        """Makes supervisord stop all processes in its stop order, and exit."""
        self.announce_end()
        self._ask(lambda api: bool(api.shutdown()))

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        transport = SupervisorTransport(serverurl=self._address)
        transport._get_connection = lambda: _UnixConnection(str(self.run_dir.supervisor_socket))
        try:
            proxy = xmlrpc.client.ServerProxy("http://localhost", transport=transport)
            return question(proxy.supervisor)
        except (OSError, HTTPException, xmlrpc.client.Error):
            return None
        finally:
            transport.close()


def _announce(group: str, api: Any) -> bool:
    return bool(api.signalProcessGroup(group, "USR1"))


class Supervisor:
    """A supervisord that this process has started, and the children of supervisord.

    supervisord runs in its own session, so that Ctrl-C on the terminal reaches only this process.
    After Ctrl-C, this process makes supervisord end all processes in its stop order.
    """

    def __init__(self, settings: Settings) -> None:
        self.run_dir = RunDir.of(settings)
        self.control = Control(self.run_dir)
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._read = 0

    def check_run_dir(self) -> None:
        """Creates the run directory. Raises SystemFault if this fails, or if processes of a system
        use the run directory."""
        self.run_dir.make()
        other = self.control.pid()
        if other is not None:
            raise SystemFault(
                f"a system already runs in {self.run_dir.path} (supervisord is process {other}); "
                f"stop it with: {self.run_dir.down_command}; or choose another --run-dir"
            )
        left = started_by(self.run_dir)
        if left:
            raise SystemFault(
                f"supervisord in {self.run_dir.path} has ended, but processes of its system still "
                f"run ({', '.join(map(str, left))}); end them with: {self.run_dir.down_command}"
            )

    def start(self) -> None:
        """Starts supervisord and waits until it answers. Raises SystemFault if supervisord does not
        answer within ``START_S``, or if ``check_run_dir`` fails."""
        self.check_run_dir()
        _raise_descriptor_limit()
        with self.run_dir.conf.open("w", encoding="utf-8") as conf:
            configuration(self._settings, sys.executable).write(conf)
        log = self.run_dir.supervisor_log
        self._read = log.stat().st_size if log.exists() else 0
        with self.run_dir.supervisor_errors.open("wb") as errors:
            self._child = subprocess.Popen(
                python_command("supervisor.supervisord", "-c", str(self.run_dir.conf)),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while self.control.pid() is None:
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.kill()
                why = self.run_dir.last_error() or f"no answer within {START_S:.0f} s"
                raise SystemFault(f"supervisord did not start: {why}")
            time.sleep(0.05)

    def environment(self) -> dict[str, str]:
        """The environment of supervisord, which the processes of the system inherit."""
        settings = msgspec.structs.replace(self._settings, run_dir=str(self.run_dir.path))
        settings = msgspec.structs.replace(settings, back=settings.back_endpoint)
        return {**os.environ, **environment(settings)}

    def restore_folders(self) -> None:
        """If the run directory or its ``log/`` was deleted, creates it again, because a restarted
        process needs it. Errors are ignored, because the running processes do not need the
        folders."""
        if not self.run_dir.logs.is_dir():
            with suppress(SystemFault):
                self.run_dir.make()

    def exit_code(self) -> int | None:
        """The exit code of supervisord. None while supervisord runs; 0 before ``start``. If a
        signal has killed supervisord, the result is the negative number of the signal."""
        return self._child.poll() if self._child is not None else 0

    def exits(self) -> list[Exit]:
        """The exits that supervisord has logged since the last call, or since ``start``."""
        try:
            with self.run_dir.supervisor_log.open("rb") as log:
                # If the file is shorter than before, supervisord has begun a new log file.
                self._read *= os.fstat(log.fileno()).st_size >= self._read
                log.seek(self._read)
                added = log.read().rpartition(b"\n")[0]
        except OSError:
            return []
        self._read += len(added)
        return [
            Exit(name, int(code) if code else None, signal_name)
            for name, code, signal_name in EXITED.findall(added.decode(errors="replace"))
        ]

    def stop(self) -> None:
        """Begins to stop all processes in supervisord's stop order. When they have ended,
        ``exit_code`` is not None."""
        if self._child is not None and self._child.poll() is None:
            self.control.announce_end()
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills supervisord and all of its processes."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
            # ``end_leftovers`` finds processes by their environment. A process that was just forked
            # does not have this environment yet.
            send(in_session(self._child.pid), signal.SIGKILL)
        end_leftovers(self.run_dir, grace_s=0.0)


def end_leftovers(run_dir: RunDir, grace_s: float) -> list[int]:
    """Ends the processes of a supervisord that has ended. Sends SIGTERM first, and SIGKILL after
    ``grace_s`` seconds. If ``grace_s`` is 0, sends only SIGKILL. Returns the ids of the
    processes."""
    pids = started_by(run_dir)
    if pids and grace_s:
        send(pids, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
    deadline = time.monotonic() + 5.0
    while (left := started_by(run_dir)) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.02)
    return pids


def _raise_descriptor_limit() -> None:
    """Raises the limit of open files to the hard limit, because each connection of the broker is an
    open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
