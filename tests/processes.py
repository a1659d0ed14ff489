"""Brokers, workers and gateways as processes of tests, on random ports. A ``Bus`` ends the
processes that it has started when its ``with`` block ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import httpx
import pytest
from tokenbus.clients import Client, TokenbusError
from tokenbus.protocol.messages import Status, WorkerStatus

from . import forks

KV_CACHE_BYTES = 256 * 2**20
"""The size of a GPU worker's KV cache in tests, in bytes: enough for 80,000 tokens of the embedded
model. All of this memory is written when the cache is made."""

LOG_SIZE = 4000
"""Maximum number of characters of each log that a failed test shows."""
LASTING: dict[str, object] = {
    "kv_cache_bytes": KV_CACHE_BYTES,
    "log_level": "debug",
    "expiry_s": 60,
    "session_expiry_s": 60,
    "hung_step_s": 600,
    "controller_pre_ms": 20,
    "controller_post_ms": 20,
}
"""Settings of a bus on a busy machine, where processes wait for CPU time and share the memory. A
call of a controller may take more CPU time there, for example because caches are cold."""


def clean_environment(**settings: object) -> dict[str, str]:
    """The environment of this process, with ``settings`` instead of the user's settings."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
    settings.setdefault("http", "none")  # Otherwise all systems would use one port.
    if "front" in settings:
        settings.setdefault("command_timeout_s", 60)  # The broker runs, but may be slow.
    return own | {f"TOKENBUS_{k.upper()}": str(v) for k, v in settings.items()}


def until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Waits until ``condition`` holds. Fails the test after ``seconds``, with the text ``what``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


def without_hint(errors: str) -> str:
    """The output of a command to standard error, without the line that a client logs if the broker
    does not answer for a few seconds, as on a busy machine."""
    return re.sub(
        r"^no broker answers at .* \(waiting for \S+ s\)\n", "", errors, flags=re.MULTILINE
    )


_random = random.SystemRandom()
_ports: set[int] = set()
"""The ports that ``free_port`` has returned in this process."""
_port_locks = os.open(
    Path(tempfile.gettempdir(), f"tokenbus-test-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT, 0o600
)
"""The descriptor of a file whose locks reserve ports. A test process that uses a port locks the
byte at the port's number until the process ends."""


compiled: Path | None = None
"""The folder with the compiled forms of modules, which all systems of a test run share. Otherwise
each system would compile the interpreters of scripts. ``conftest.py`` sets it."""


def system_folder() -> Path:
    """Makes the run directory of a system, with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="tb-"))
    if compiled is not None:
        (folder / "modules").mkdir(mode=0o700)
        (folder / "modules" / "compiled").symlink_to(compiled)
    return folder


def free_port() -> int:
    """A port of 127.0.0.1 at which no process listens. The port is reserved for this test process,
    because a client could otherwise connect to the broker of another test.

    The port is below the range that the kernel uses for outgoing connections. Otherwise an outgoing
    connection could take the port of a broker that is being restarted. Even the connection of a
    client that tries to reach this broker could take the port.
    """
    while True:
        port = _random.randrange(20_000, 32_000)
        if port in _ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_port_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
            _ports.add(port)
            return port


def children(pid: int) -> list[int]:
    """The ids of the child processes of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def zygotes(pid: int) -> list[int]:
    """The child processes of a controller worker that are the parents of guest processes."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if b".zygote\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def _running(status: Status) -> list[WorkerStatus]:
    """The workers whose processes run. The broker lists a killed worker until it misses the
    worker's heartbeats."""
    return [w for w in status.workers if Path(f"/proc/{w.pid}").exists()]


class Process:
    """A process that runs ``python -m MODULE ARGUMENTS…``, or an equal fork, and logs to a file."""

    def __init__(
        self,
        module: str,
        log: Path,
        environment: dict[str, str],
        python: str = sys.executable,
        arguments: Sequence[str] = (),
    ) -> None:
        self._log = log
        self._process = forks.start(module, log.parent, log, environment, python, arguments)
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """The log of the process."""
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)

    def wait(self, seconds: float = 300.0) -> int:
        """Waits for the end of the process; returns its exit code."""
        return self._process.wait(seconds)

    def kill(self) -> None:
        """Kills the process, and waits for its end."""
        if self.alive:
            self._process.kill()
        self._process.wait()


class Gateway:
    """A running gateway, and its addresses."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url
        """For example ``http://127.0.0.1:20000``."""
        self.ws_url = url.replace("http", "ws", 1) + "/"

    @property
    def answers(self) -> bool:
        """Whether the gateway answers requests. Fails the test if the gateway has ended."""
        assert self.process.alive, self.process.log
        try:
            return httpx.get(f"{self.url}/live", verify=False, timeout=10.0).status_code == 200
        except httpx.TransportError:
            return False


class Bus:
    """A broker and any number of workers and gateways, which share a run directory."""

    def __init__(
        self,
        python: str = sys.executable,
        worker_python: str = sys.executable,
        **settings: object,
    ) -> None:
        """``python``: the broker's interpreter. ``worker_python``: the interpreter of workers that
        are started later. ``settings``: settings of all processes.

        Leases are long, so that a process that gets no CPU time for a while is not treated as lost.
        Tests that kill workers shorten the leases.
        """
        self._python = python
        self.worker_python = worker_python
        self.folder = system_folder()
        self.front = f"tcp://127.0.0.1:{free_port()}"
        self.environment = clean_environment(
            front=self.front, run_dir=self.folder, **{**LASTING, **settings}
        )
        self.workers: list[Process] = []
        """The GPU workers."""
        self.others: list[Process] = []
        self.gateways: list[Gateway] = []
        self.broker = self.start_broker()

    def start_broker(self) -> Process:
        """Starts the broker. A test that has killed the broker calls this method to restart it."""
        self.broker = Process(
            "tokenbus.broker", self.folder / "broker.log", self.environment, self._python
        )
        return self.broker

    def start_worker(self, **settings: object) -> Process:
        """Starts another GPU worker. ``settings``: further settings of this worker."""
        extra = {f"TOKENBUS_{k.upper()}": str(v) for k, v in settings.items()}
        log = self.folder / f"gpu-{len(self.workers)}.log"
        worker = Process("tokenbus.workers.gpu", log, self.environment | extra, self.worker_python)
        self.workers.append(worker)
        return worker

    def start_other(self, role: str, **settings: object) -> Process:
        """Starts a controller worker or a state worker, as ``role`` says."""
        extra = {f"TOKENBUS_{k.upper()}": str(v) for k, v in settings.items()}
        log = self.folder / f"{role}-{len(self.others)}.log"
        module = f"tokenbus.workers.{role}"
        worker = Process(module, log, self.environment | extra, self.worker_python)
        self.others.append(worker)
        return worker

    def start_all_roles(self) -> None:
        """Starts a GPU worker, a state worker and a controller worker, in this order, and waits
        until they have registered."""
        self.start_worker()
        self.start_other("state")
        self.start_other("controller")
        self.wait_for_models("embedded")
        self.wait_for_roles("controller", "state")

    def start_gateway(self, scheme: str = "http", **settings: object) -> Gateway:
        """Starts a gateway on a random port, and waits until it answers."""
        extra = {"http": f"127.0.0.1:{free_port()}", **settings}
        environment = {f"TOKENBUS_{k.upper()}": str(v) for k, v in extra.items()}
        log = self.folder / f"gateway-{len(self.gateways)}.log"
        process = Process("tokenbus.clients.gateway", log, self.environment | environment)
        gateway = Gateway(process, f"{scheme}://{extra['http']}")
        self.gateways.append(gateway)
        until(lambda: gateway.answers, 300.0, "a gateway that answers")
        return gateway

    def wait_for_roles(self, *roles: str, seconds: float = 300.0) -> None:
        """Waits until workers of these roles have registered: two workers of a role that is named
        twice, and so on."""
        with self.client() as client:

            def ready() -> bool:
                for worker in (*self.workers, *self.others):
                    assert worker.alive, worker.log
                try:
                    status = client.status(timeout_s=60.0)
                except TokenbusError:
                    return False
                there = Counter(w.role for w in _running(status))
                return there >= Counter(roles)

            until(ready, seconds, f"workers of the roles {roles}")

    def client(self, patience_s: float = 120.0) -> Client:
        """A client of the broker."""
        return Client(self.front, patience_s=patience_s)

    def wait_for_models(self, *models: str, workers: int = 1, seconds: float = 300.0) -> None:
        """Waits until this many workers serve all of these models."""
        with self.client() as client:

            def ready() -> bool:
                for process in (self.broker, *self.workers):
                    assert process.alive, process.log
                try:
                    status = client.status(timeout_s=60.0)
                except TokenbusError:
                    return False
                serving = [w for w in _running(status) if set(models) <= set(w.models)]
                return len(serving) >= workers

            until(ready, seconds, f"{workers} workers with {models}")

    @property
    def logs(self) -> str:
        """The last ``LOG_SIZE`` characters of each process's log."""
        files = sorted(self.folder.glob("*.log"))
        return "".join(f"--- {file.name}\n{file.read_text()[-LOG_SIZE:]}" for file in files)

    @property
    def stacks(self) -> str:
        """The stacks of all threads of the broker and the workers, as py-spy prints them. They show
        what a test waited for."""
        found = ""
        for process in (self.broker, *self.workers, *self.others):
            if process.alive:
                command = [Path(sys.executable).with_name("py-spy"), "dump", "--pid", process.pid]
                done = subprocess.run(
                    list(map(str, command)), capture_output=True, text=True, timeout=60, check=False
                )
                found += done.stdout + done.stderr
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        gateways = [gateway.process for gateway in self.gateways]
        for process in (*gateways, *self.workers, *self.others, self.broker):
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
