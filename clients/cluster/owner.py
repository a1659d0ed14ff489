"""The Ray actor that runs the process of one worker. Ray chooses the actor's node."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.python_command import python_command

RESTART_S = (0.5, 15.0)
"""The shortest and the longest pause before an ended process is restarted, in seconds. If a process
ran longer than the longest pause, the next pause is the shortest. If it ran for less time, the next
pause is twice the previous one, up to the longest."""
WRONG_SETTING = 2
"""The exit code after which a process is not restarted, because a restart would fail too."""
_PR_SET_PDEATHSIG = 1


class Report(NamedTuple):
    """The report of an owner about its process."""

    host: str
    pid: int
    """The process id; 0 if no process runs."""
    node: str
    starts: int
    """Number of times that this actor has started the process."""
    exit_code: int | None
    """The exit code of the last process that ended; None if no process has ended."""
    retiring: bool
    """Whether ``retire`` was called. The process then ends."""
    ended: bool
    """Whether the process has ended and will not be restarted."""


class Owner:
    """Runs ``python -m MODULE`` until ``retire`` is called. Restarts the process when it ends,
    unless its exit code is ``WRONG_SETTING``.

    Ray kills actors without notice, so the process asks the kernel to kill it when the actor dies.
    ``key`` is the content of the worker's key file. The actor writes this content to a file on the
    node. When the worker has ended and will not be restarted, the actor removes the file. If Ray
    kills the actor, the file stays.
    """

    def __init__(self, module: str, settings: Mapping[str, str], key: str | None) -> None:
        self._module = module
        self._environment = os.environ | dict(settings)
        self._key_folder: str | None = None
        if key is not None:
            self._key_folder = tempfile.mkdtemp(prefix="tokenbus-key-")
            path = Path(self._key_folder, "worker.key")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key)
            self._environment["TOKENBUS_KEY"] = str(path)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._exit_code: int | None = None
        self._retiring = threading.Event()
        self._ended = threading.Event()
        # When the thread that started the process ends, the kernel kills the process. So a thread
        # that lives as long as the actor starts all processes.
        threading.Thread(target=self._run, name="owner", daemon=True).start()

    def report(self) -> Report:
        """The state of the process."""
        process = self._process
        running = process is not None and process.poll() is None
        return Report(
            host=socket.gethostname(),
            pid=process.pid if process is not None and running else 0,
            node=_node_id(),
            starts=self._starts,
            exit_code=self._exit_code,
            retiring=self._retiring.is_set(),
            ended=self._ended.is_set(),
        )

    def retire(self) -> None:
        """Drains the process, whose streams continue at other workers. The process is not
        restarted."""
        self._retiring.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def _run(self) -> None:
        first_s, longest_s = RESTART_S
        pause_s = first_s
        try:
            while not self._retiring.is_set():
                ran = threading.Event()
                timer = threading.Timer(longest_s, ran.set)
                timer.daemon = True
                timer.start()
                code = self._run_once()
                timer.cancel()
                if code == WRONG_SETTING:
                    return
                pause_s = first_s if ran.is_set() else min(2 * pause_s, longest_s)
                self._retiring.wait(pause_s)
        finally:
            if self._key_folder is not None:
                shutil.rmtree(self._key_folder, ignore_errors=True)
            self._ended.set()

    def _run_once(self) -> int:
        """Runs the process to its end; returns its exit code."""
        self._process = subprocess.Popen(
            python_command(self._module),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        self._starts += 1
        if self._retiring.is_set():
            self._process.send_signal(signal.SIGTERM)
        self._exit_code = self._process.wait()
        return self._exit_code


def _die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. Called in the new
    process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _node_id() -> str:
    """The Ray node of this actor."""
    ray: Any = importlib.import_module("ray")
    return str(ray.get_runtime_context().get_node_id())
