"""Runs the systems that a benchmark measures, and the client processes that put load on them.

Each process ends at the end of its ``with`` block, even after an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenbus.clients import Client, TokenbusError

HERE = Path(__file__).parent
START_S = 180.0
END_S = 20.0
WORKERS = "tokenbus.workers"
GPU = ("-m", f"{WORKERS}.gpu")
STATE = ("-m", f"{WORKERS}.state")


def environment(**settings: str) -> dict[str, str]:
    """The environment variables for a process with these settings of Tokenbus. ``TOKENBUS_``
    variables of this process are left out."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
    return own | {f"TOKENBUS_{name.upper()}": value for name, value in settings.items()}


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process with SIGTERM, or with SIGKILL if it does not end in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.send_signal(signal.SIGTERM)
        process.wait(END_S)
        return
    process.kill()
    process.wait()


class System:
    """A broker, a GPU worker and, if ``steered``, a controller worker. ``gpu``: the arguments with
    which Python starts the GPU worker. All processes use ``settings``. ``wait`` waits until the
    system is ready."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        gpu: Sequence[str] = GPU,
        steered: bool = False,
        **settings: str,
    ) -> None:
        folder.mkdir(parents=True)
        self.model = str(model)
        self.front = f"ipc://{folder}/front.sock"
        self._settings = environment(
            front=self.front,
            run_dir=str(folder),
            model=str(model),
            log_level="warning",
            **settings,
        )
        self._roles = {"gpu", "controller"} if steered else {"gpu"}
        self._log = (folder / "log").open("w")
        commands = [["-m", "tokenbus.broker"], list(gpu)]
        if steered:
            commands.append(["-m", f"{WORKERS}.controller"])
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                self.processes.append(self._started(command))
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float = START_S, others: Set[str] = frozenset()) -> None:
        """Waits until the workers of all roles have registered and the model is loaded. ``others``:
        roles of workers that ``start`` has started."""
        deadline, roles = time.monotonic() + seconds, self._roles | others
        with Client(self.front, patience_s=seconds) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(TokenbusError):
                    workers = client.status(timeout_s=5.0).workers
                    if {w.role for w in workers if w.role != "gpu" or w.models} == roles:
                        return
                time.sleep(0.1)
        raise SystemExit(f"the system did not start within {seconds:g} s; see {self._log.name}")

    def close(self) -> None:
        """Ends the workers, then the broker."""
        for process in reversed(self.processes):
            end(process)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, arguments: Sequence[str], **settings: str) -> None:
        """Starts another Python process of the system with ``arguments``. ``settings`` override
        those of the system."""
        self.processes.append(self._started([*arguments], **settings))

    def _started(self, arguments: list[str], **settings: str) -> subprocess.Popen[bytes]:
        more = {f"TOKENBUS_{name.upper()}": value for name, value in settings.items()}
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self._settings | more,
            stdout=self._log,
            stderr=self._log,
        )


class Loader:
    """A process that puts load on a server or an engine (``_serving_client.py``,
    ``_serving_engine.py``). For each run, the process reads an *order*, which is a line of JSON,
    and answers with a line of JSON."""

    def __init__(self, script: str, *arguments: str, **settings: str) -> None:
        self._name = " ".join([script, *arguments])
        self._process = subprocess.Popen(
            [sys.executable, HERE / script, *arguments],
            env=environment(**settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **order: Any) -> dict[str, Any]:
        """Sends an order, and returns the answer to it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process."""
        end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def orders() -> Iterator[dict[str, Any]]:
    """Yields the orders of all runs until the end of the input. Called in the process of a
    ``Loader``."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(found: Mapping[str, Any]) -> None:
    """Answers the order of a run. Called in the process of a ``Loader``."""
    print(json.dumps(found), flush=True)
