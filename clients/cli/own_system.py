"""Starts a system for one command, and stops it when the command ends."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

import msgspec

from ...protocol.errors import Code, TokenbusError, UnavailableError
from ...protocol.settings import Settings
from .. import Client
from ..system.faults import SystemFault

if TYPE_CHECKING:
    from ..system.supervisor import Supervisor
    from ..system.watch import Watcher

START_S = 120.0
"""Maximum time of the system's start, in seconds."""
END_S = 20.0
"""Maximum time of the system's stop, in seconds."""
DRAIN_S = 3.0
LOOK_EVERY_S = 0.1


def broker_answers(settings: Settings) -> bool:
    """Whether a broker answers at the TCP address in the settings. Returns immediately if no
    process listens on that address."""
    front, timeout_s = settings.front_endpoint, settings.command_timeout_s
    if not listens(front):
        return False
    with Client(front, patience_s=timeout_s) as client, suppress(TokenbusError):
        client.status(timeout_s=timeout_s)
        return True
    return False


def listens(front: str) -> bool:
    """Whether a process listens on an address, ``tcp://…`` or ``ipc://…``."""
    parts = urlsplit(front)
    try:
        if parts.scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(front.removeprefix("ipc://"))
        else:
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def own_system(settings: Settings, model: str) -> Iterator[Client]:
    """A client of a new system with one GPU worker, one controller worker and one state worker, in
    a private folder.

    The system ends with the ``with`` block, and at Ctrl-C, SIGTERM or SIGHUP. Raises
    UnavailableError if the system does not start.
    """
    from ..system.model_check import check_model
    from ..system.supervisor import Supervisor
    from ..system.watch import Watcher

    folder = Path(tempfile.mkdtemp(prefix="tokenbus-run-"))
    own = msgspec.structs.replace(
        settings,
        run_dir=str(folder),
        front=f"ipc://{folder}/front.sock",
        back="",
        model=model,
        gpu_workers=1,
        controller_workers=1,
        http="none",
        drain_s=DRAIN_S,
    )
    supervisor = Supervisor(own)
    ready = False
    with interrupted():
        watcher = Watcher(supervisor.control, own)
        try:
            check_model(own)
            with _progress(f"starting a system with the model {model} for this run"):
                supervisor.start()
                _wait_until_ready(supervisor, watcher)
            ready = True
            with Client(own.front) as client:
                yield client
        except SystemFault as fault:
            raise UnavailableError(Code.NO_WORKER, f"cannot start a system: {fault}") from None
        finally:
            watcher.close()
            _end(supervisor, gently=ready)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def interrupted() -> Iterator[None]:
    """In the ``with`` block, SIGTERM and SIGHUP raise KeyboardInterrupt. So the block's ``finally``
    clauses run."""
    before = [(n, signal.signal(n, _interrupt)) for n in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Shows ``what`` on stderr while the block runs. If stderr is not a terminal, prints ``what``
    once."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True, highlight=False).status(what):
            yield
    else:
        print(f"tokenbus: {what}", file=sys.stderr, flush=True)
        yield


def _wait_until_ready(supervisor: Supervisor, watcher: Watcher) -> None:
    deadline = time.monotonic() + START_S
    while not watcher.look().ready:
        for exited in supervisor.exits():
            if exited.code is not None:  # None: a signal killed the process, which is restarted.
                why = supervisor.run_dir.last_line(exited.name)
                why = why or f"its exit code is {exited.code}"
                raise SystemFault(f"{exited.name} failed: {why}")
        if supervisor.exit_code() is not None:
            raise SystemFault(f"supervisord ended with exit code {supervisor.exit_code()}")
        if time.monotonic() > deadline:
            raise SystemFault(f"the system was not ready within {START_S:.0f} s")
        time.sleep(LOOK_EVERY_S)


def _end(supervisor: Supervisor, gently: bool) -> None:
    """Stops the system. If the system was never ready, if the stop takes too long, or at Ctrl-C,
    kills the system instead."""
    deadline = time.monotonic() + END_S
    try:
        if gently:
            supervisor.stop()
        while gently and supervisor.exit_code() is None and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
    finally:
        supervisor.kill()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
