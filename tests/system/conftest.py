"""Systems under a real supervisord, driven through the command line as a user would."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenbus.clients.system.processes import alive, started_by
from tokenbus.clients.system.run_dir import RunDir

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")


def clean_environment() -> dict[str, str]:
    """The environment without the user's own settings."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until ``condition`` holds; fails the test where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def free_port() -> int:
    """A port of 127.0.0.1 at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tokenbus(
    *arguments: str, cwd: Path, timeout_s: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [TOKENBUS, *arguments],
        cwd=cwd,
        env=clean_environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Foreground:
    """A ``tokenbus up`` or ``serve-model`` that runs in a folder of its own, away from files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.front = f"tcp://127.0.0.1:{self.port}"
        self.folder = folder
        self.run_dir = RunDir(folder / "run")
        self._output = folder / "output"
        where = ["--run-dir", str(self.run_dir.path)]
        at = ["--port", str(self.port)] if "serve-model" in arguments else ["--front", self.front]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [TOKENBUS, *arguments, *where, *at],
                cwd=folder,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    @property
    def logs(self) -> str:
        """The logs of all its processes, for a failing test's message."""
        files = sorted(self.run_dir.logs.glob("*"))
        return "".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def wait_until_ready(self, seconds: float = 60.0) -> None:
        """Waits for its word that clients can connect."""
        until(
            lambda: "ready" in self.output or self.process.poll() is not None,
            seconds,
            f"ready; it printed {self.output!r}",
        )
        assert self.process.poll() is None, self.output + self.logs

    def processes(self) -> list[int]:
        """Ids of its broker and workers that live."""
        return started_by(self.run_dir)

    def end(self, number: signal.Signals = signal.SIGINT, seconds: float = 20.0) -> int:
        """Sends a signal and waits; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Leaves nothing of it, whatever the test did."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.processes():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets; pytest's own may not."""
    folder = Path(tempfile.mkdtemp(prefix="tb-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder of this test."""
    yield from short_folder()


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENBUS_")]:
        monkeypatch.delenv(name)
