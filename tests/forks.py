"""Starts processes of Tokenbus as forks of a process that has already imported their modules.

A GPU worker takes 4 s of CPU time to import torch and transformers. A gateway takes 1 s to import
its modules, and a broker 0.25 s. The tests start hundreds of these processes. A *server* is a
process that has only imported modules (``fork_server.py``). Each fork has its own environment,
folder, log, sockets and threads, runs the usual ``main``, and can be killed by its id. Each process
of tests has a separate server for each module.

A process is started without a fork if its module is not in ``IMPORTS``, or if it uses another
interpreter or several threads of torch. On a machine with CUDA, which does not work after a fork,
no process is forked. A fork's environment may differ from the server's only in the variables of
``OWN``, because libraries read the other variables when they are imported. Tests of ``tokenbus
up``, ``supervisord.conf``, tensor parallelism and start-up errors also start processes without a
fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from . import starts

IMPORTS = {
    "tokenbus.workers.gpu": (
        "tokenbus.workers.gpu.worker",
        "transformers.models.llama.modeling_llama",
        "transformers.tokenization_utils_tokenizers",
    ),
    "tokenbus.workers.controller": (
        "tokenbus.workers.controller.worker",
        "tokenbus.workers.controller.python",
    ),
    "tokenbus.workers.state": ("tokenbus.workers.state.worker",),
    "tokenbus.broker": ("tokenbus.broker.server",),
    "tokenbus.clients.gateway": (
        "tokenbus.clients.gateway.app",
        "tokenbus.clients.gateway.users.keys",
        "tokenbus.clients.gateway.connections.server",
    ),
}
"""The modules that a server imports, by the module that its forks run."""

OWN = ("TOKENBUS_", "PYTEST_", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Prefixes of environment variables that may differ between a fork and its server, because no
library stores them when it is imported. torch sets the last two when it compiles."""

_servers: dict[str, ForkServer] = {}


class Forked:
    """A process that a server has forked, with the methods of ``subprocess.Popen`` that tests
    use."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pipe = pipe

    def poll(self) -> int | None:
        """The return code of the process; None while the process runs."""
        if self.returncode is None and self._ended(0.0):
            # If the pipe closes without a code, the server was killed, and the process with it.
            self.returncode = int(os.read(self._pipe, 16) or -signal.SIGKILL)
            os.close(self._pipe)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process, and returns its return code. Raises
        subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None and not self._ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process if it is running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._pipe], [], [], timeout)[0])


class ForkServer:
    """A process that forks processes of one module."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._one_order = threading.Lock()
        self._environment = _of_libraries(dict(os.environ))
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("fork_server.py")),
                    str(theirs.fileno()),
                    *IMPORTS[module],
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """Ends the server and the processes that it has forked."""
        self._orders.close()
        self._process.wait()

    def suits(self, environment: dict[str, str]) -> bool:
        """Whether a fork would equal a new process with this environment."""
        return _of_libraries(environment) == self._environment

    def start(
        self, folder: Path, log: Path, environment: dict[str, str], arguments: Sequence[str]
    ) -> Forked:
        """Starts a process in a folder, with its output in ``log``."""
        starts.check(("fork", self._module))
        order = {
            "module": self._module,
            "arguments": list(arguments),
            "environment": environment,
            "folder": str(folder),
            "log": str(log),
        }
        pipe, theirs = os.pipe()
        with self._one_order:
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [theirs])
            finally:
                os.close(theirs)
            return Forked(int(self._orders.recv(16)), pipe)


def start(
    module: str,
    folder: Path,
    log: Path,
    environment: dict[str, str],
    python: str,
    arguments: Sequence[str] = (),
) -> Forked | subprocess.Popen[bytes]:
    """Starts ``python -m MODULE ARGUMENTS…`` in a folder, as a fork if this makes no difference."""
    # Callers may read the log at once, but a fork opens its log only later.
    log.touch()
    if module in IMPORTS and python == sys.executable and _forks_are_safe(environment):
        server = _servers.get(module) or _servers.setdefault(module, ForkServer(module))
        if server.suits(environment):
            return server.start(folder, log, environment, arguments)
    with log.open("a") as output:
        return subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def close() -> None:
    """Ends all servers and the processes that they have forked."""
    while _servers:
        _servers.popitem()[1].close()


def _forks_are_safe(environment: dict[str, str]) -> bool:
    one_thread = environment.get("OMP_NUM_THREADS") == "1"
    asked = environment.get("TOKENBUS_THREADS", "0")
    return one_thread and asked in ("0", "1") and not Path("/dev/nvidiactl").exists()


def _of_libraries(environment: dict[str, str]) -> dict[str, str]:
    """The variables of an environment whose names do not begin with a prefix in ``OWN``."""
    return {k: v for k, v in environment.items() if not k.startswith(OWN)}
