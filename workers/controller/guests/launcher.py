"""Starts the *zygote*, the parent of the guest processes, and requests guest processes from the
zygote."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, RequestError, UnavailableError
from ....protocol.python_command import plain_environment, python_command
from ..host import Vocabulary
from .setup import Setup

log = logging.getLogger(__name__)

SPAWN_S = 60.0
"""Maximum wait for a new process, in seconds. On a loaded machine, the zygote itself may still be
starting."""
MAX_REPORT = 64 * 1024
"""Maximum bytes of a message from the zygote."""


class Spawned(NamedTuple):
    """A new guest process."""

    pid: int
    pidfd: int
    control: socket.socket


class _Spawning:
    """A request to the zygote that waits for its answer."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.pid = self.pidfd = -1


class Launcher:
    """A zygote and the connection to it. Thread-safe.

    ``died`` is called with the id and the exit code of a process that has ended. If a signal ended
    the process, the exit code is the negative number of the signal. ``lost`` is called when the
    zygote has ended. All guest processes end with the zygote.
    """

    def __init__(
        self, setup: Setup, died: Callable[[int, int], None], lost: Callable[[], None]
    ) -> None:
        self._died = died
        self._lost = lost
        self._lock = threading.Lock()
        self._spawning: dict[int, _Spawning] = {}
        self._number = 0
        self._loaded = threading.Event()
        self._names: list[str] = []
        self._missing: list[str] = []
        self._refusal = "the parent of guest processes has ended before its controllers were loaded"
        self.alive = True
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = dict(os.environ) if setup.trusted else plain_environment()
        # The zygote must have only one thread. Without these variables, the libraries would start
        # more threads.
        own |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        descriptor = str(theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(
                python_command(_ZYGOTE, descriptor, msgspec.json.encode(setup).decode()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=own,
            )
        threading.Thread(target=self._read, name="zygote", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the zygote's process."""
        return self._process.pid

    def names(self) -> list[str]:
        """The names of the Python controllers that the zygote has loaded. Raises RequestError if a
        controller cannot be loaded."""
        self._loaded.wait()
        if not self._names:
            raise RequestError(Code.UNKNOWN_CONTROLLER, self._refusal)
        return self._names

    def missing_layers(self) -> list[str]:
        """The layers of isolation that the processes do not have, with the reasons."""
        self._loaded.wait()
        return self._missing

    def add_vocabulary(self, number: int, vocabulary: Vocabulary) -> None:
        """Sends a vocabulary to the zygote, for processes that are forked later."""
        memory = os.memfd_create("vocabulary", os.MFD_CLOEXEC)
        with os.fdopen(memory, "wb") as file:
            pickle.dump(vocabulary, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            self._command(("vocabulary", number, 0), [file.fileno()])

    def forget_vocabulary(self, number: int) -> None:
        """Makes the zygote free a vocabulary."""
        self._command(("forget", number, 0))

    def spawn(self, vocabulary: int) -> Spawned:
        """Forks a process with a vocabulary. Raises UnavailableError if the process cannot be
        forked."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spawning = _Spawning()
        with self._lock:
            self._number += 1
            number = self._number
            self._spawning[number] = spawning
        with theirs:
            self._command(("spawn", number, vocabulary), [theirs.fileno()])
        # If the zygote ended before the request was in ``_spawning``, ``ready`` is never set. So
        # ``alive`` is checked first.
        arrived = self.alive and spawning.ready.wait(SPAWN_S)
        with self._lock:
            self._spawning.pop(number, None)
        if not arrived or spawning.pid < 0:
            control.close()
            raise UnavailableError(
                Code.WORKER_LOST,
                "no process for the controller could be started; try again",
                retry_after_s=1.0,
            )
        return Spawned(spawning.pid, spawning.pidfd, control)

    def close(self) -> None:
        """Ends the zygote and all guest processes."""
        self.alive = False
        self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # --- inside ---------------------------------------------------------------------------------

    def _command(self, command: tuple[str, int, int], files: list[int] | None = None) -> None:
        body = msgspec.json.encode(command)
        try:
            socket.send_fds(self._control, [body], files or [])
        except OSError as error:
            log.warning("the parent of guest processes has ended: %s", error)

    def _read(self) -> None:
        while True:
            try:
                body, files, _, _ = socket.recv_fds(self._control, MAX_REPORT, 1)
            except OSError:
                break
            if not body:
                break
            name, number, pid, text = json_decoder(tuple[str, int, int, str]).decode(body)
            if name == "died":
                self._died(pid, number)
                continue
            if number == 0:
                self._report(name, text)
                continue
            if not files:
                log.error("no guest process could be started: %s", text or "no descriptor is free")
            with self._lock:
                spawning = self._spawning.get(number)
            if spawning is None:
                # The caller of ``spawn`` has stopped waiting. The new process ends by itself,
                # because ``spawn`` closes the other end of its socket.
                for file in files:
                    os.close(file)
                continue
            if files:
                spawning.pid, spawning.pidfd = pid, files[0]
            spawning.ready.set()
        was_alive, self.alive = self.alive, False
        if was_alive:
            self._process.wait()
            log.error("the parent of guest processes has ended; it is started again")
        with self._lock:
            waiting = list(self._spawning.values())
        for spawning in waiting:
            spawning.ready.set()
        self._loaded.set()
        self._lost()

    def _report(self, name: str, text: str) -> None:
        """Handles a report of the zygote: the loaded controllers, the reason why a controller
        cannot be loaded, or the missing layers of isolation."""
        if name == "loaded":
            self._names = text.split("\n")
            self._loaded.set()
        elif name == "refused":
            self._refusal, self.alive = text, False
        else:
            self._missing = text.split("\n") if text else []
            if text:
                log.warning("guest processes run without %s", ", ".join(self._missing))
            self._loaded.set()


_ZYGOTE = f"{__package__}.zygote"
