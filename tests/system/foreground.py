"""Systems under a real supervisord, driven through the command line as a user would."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenbus.clients.system.processes import alive, started_by
from tokenbus.clients.system.run_dir import RunDir

from ..processes import KV_CACHE_BYTES, clean_environment, free_port, until

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")


def tokenbus(
    *arguments: str, cwd: Path, timeout_s: float = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [TOKENBUS, *arguments],
        cwd=cwd,
        env=clean_environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Foreground:
    """A command ``tokenbus up`` or ``tokenbus serve-model`` that runs in a separate folder."""

    def __init__(self, folder: Path, *arguments: str, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self.front = f"tcp://{host}:{self.port}"
        self.folder = folder
        self.run_dir = RunDir(folder / "run")
        self._output = folder / "output"
        where = ["--run-dir", str(self.run_dir.path)]
        at = ["--port", str(self.port)] if "serve-model" in arguments else ["--front", self.front]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [TOKENBUS, *arguments, *where, *at],
                cwd=folder,
                env=clean_environment(kv_cache_bytes=KV_CACHE_BYTES),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """The output of the command so far."""
        return self._output.read_text()

    @property
    def logs(self) -> str:
        """The ends of the logs of the system's processes, for the message of a failed test."""
        files = sorted(self.run_dir.logs.glob("*"))
        return "".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def wait_until_ready(self, seconds: float = 300.0) -> None:
        """Waits until the command prints that the system is ready."""
        until(
            lambda: "ready" in self.output or self.process.poll() is not None,
            seconds,
            f"a system that is ready; the command printed {self.output!r}",
        )
        assert self.process.poll() is None, self.output + self.logs

    def processes(self) -> list[int]:
        """The ids of the system's live processes, without the command and supervisord."""
        return started_by(self.run_dir)

    def end(self, number: signal.Signals = signal.SIGINT, seconds: float = 300.0) -> int:
        """Sends a signal to the command and waits for its end; returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Ends the command and all processes of the system, whatever the test has done to them."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(300)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.processes():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def short_folder() -> Iterator[Path]:
    """A folder with a short path, because the path of a Unix socket may have about 100 bytes.
    pytest's own folders may have longer paths."""
    folder = Path(tempfile.mkdtemp(prefix="tb-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
