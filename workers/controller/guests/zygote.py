"""The zygote: the process from which guest processes are forked. The zygote has already loaded
everything that guest processes need.

``python -m tokenbus.workers.controller.guests.zygote DESCRIPTOR SETUP`` reads commands from the
socket DESCRIPTOR. SETUP is a ``Setup`` as JSON. The process has one thread, because a fork copies
only the thread that calls it. The guest processes share the zygote's memory, with the vocabularies,
the engine, the libraries and the operator's controllers. A page of this memory is copied when a
process writes to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from ....protocol import logs, settings
from ....protocol.decoders import json_decoder
from ....protocol.errors import TokenbusError
from ...machine import machine_memory, memory_limits
from ..host import Vocabulary
from ..interface import Program
from ..priority import lower_priority
from ..python import load_program
from ..python.printed import captured
from ..python.script_constraints import load_vocabulary
from ..tokens import vocabulary as _vocabulary  # noqa: F401 - unpickled later, without files
from ..wasm import aici, native
from ..wasm.sandbox import make_engine
from . import guest
from .rights import bound_memory, drop_rights, isolate
from .setup import Setup

log = logging.getLogger(__name__)

MAX_MEMORY = 1 << 60
"""If the memory limit of a cgroup is at least this number of bytes, the cgroup counts as
unlimited."""
MAX_TEXT = 16 * 1024
"""Maximum characters of a reported error."""
MEMORY_PART = 2
"""A guest process may have 1 / MEMORY_PART of the machine's memory. The kernel enforces this limit.
A tenant's share is smaller, but a compromised process can ignore the share."""
_FIRST_TO_END = 1000
"""The highest OOM score: if the machine runs out of memory, the kernel ends guest processes before
all others."""
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class Zygote:
    """Handles the commands of the worker."""

    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control = control
        self._programs: dict[str, Program] = {}
        self._memory_bytes = machine_memory() // MEMORY_PART
        self._user = setup.user
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._engine = make_engine(setup.limits)
        # The host functions of both ABIs (native and AICI's) are linked once, before the first
        # fork.
        native._linker(self._engine)
        aici._linker(self._engine)
        self._vocabularies: dict[int, Vocabulary] = {}

    def report_layers(self) -> None:
        """Reports the missing layers of isolation to the worker."""
        missing = isolate(same_users=self._user is not None)
        if self._user is None:
            missing.append("a user of their own (set guest_user: tokenbus up --guest-user NAME)")
        if min(memory_limits(), default=MAX_MEMORY) >= MAX_MEMORY:
            missing.append(
                "a cgroup with a memory limit (run the worker in a container, or in a systemd unit "
                "with MemoryMax)"
            )
        read, write = os.pipe()
        if not os.fork():
            try:
                os.write(write, "\n".join(drop_rights(self._memory_bytes, self._user)).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as file:
            missing += file.read().split("\n")
        os.wait()
        self._report("layers", "\n".join(filter(None, missing)))

    def load(self, controllers: list[str]) -> None:
        """Loads Python controllers, and reports their names. Raises TokenbusError if a controller
        cannot be loaded."""
        try:
            self._programs = dict(map(load_program, controllers))
        except TokenbusError as error:
            self._report("refused", error.message[:MAX_TEXT])
            raise
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            log.warning(
                "importing the controllers started %d threads, which guest processes do not have; "
                "start a thread in the call that needs it",
                threads,
            )
        self._report("loaded", "\n".join(self._programs))

    def run(self) -> None:
        """Handles commands until the worker closes the socket."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._command():
                return

    def _command(self) -> bool:
        """Handles a command; returns False if the worker has closed the socket."""
        try:
            body, files, _, _ = socket.recv_fds(self._control, 4096, 1)
        except ConnectionResetError:
            return False
        if not body:
            return False
        name, number, which = json_decoder(tuple[str, int, int]).decode(body)
        if name == "vocabulary":
            with open(files[0], "rb") as file:
                file.seek(0)
                # Unpickling is safe, because only the worker can write to the socket.
                vocabulary = self._vocabularies[number] = pickle.load(file)
            if self._programs:
                # The vocabulary is prepared here once. Without this call, each process would
                # prepare it when a script first uses a grammar.
                load_vocabulary(vocabulary)
            gc.collect()
            gc.freeze()
        elif name == "forget":
            self._vocabularies.pop(number, None)
        elif name == "spawn":
            self._spawn(number, socket.socket(fileno=files[0]), which)
        return True

    def _spawn(self, number: int, control: socket.socket, vocabulary: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
            if not pid:
                self._guest(parent, control, vocabulary)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # For example, the container's limit of processes is reached. If only ``pidfd_open`` has
            # failed, the new process ends when the worker closes the other end of ``control``.
            body = msgspec.json.encode(("spawned", number, -1, str(error)[:MAX_TEXT]))
            self._control.send(body)
            return
        finally:
            control.close()
        try:
            body = msgspec.json.encode(("spawned", number, pid, ""))
            socket.send_fds(self._control, [body], [pidfd])
        finally:
            os.close(pidfd)

    def _guest(self, parent: int, control: socket.socket, vocabulary: int) -> NoReturn:
        """Runs a guest process in the process that the fork has just created."""
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process = guest.GuestProcess(
                self._engine, self._vocabularies[vocabulary], self._programs
            )
            if self._programs:
                self._run_trusted(control, process)
            else:
                self._run_sandboxed(control, process)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _run_trusted(self, control: socket.socket, process: guest.GuestProcess) -> None:
        """Runs code of the operator. The process keeps the worker's rights and writes to the
        worker's log."""
        os.setpgid(0, 0)  # Ctrl-C at a terminal does not reach the process.
        bound_memory(self._memory_bytes)
        _close_files(control)
        with captured():
            guest.run(control, process)

    def _run_sandboxed(self, control: socket.socket, process: guest.GuestProcess) -> None:
        """Runs code of clients."""
        lower_priority()
        # Standard output and error are closed, because a compromised process could fill the
        # worker's log, or write lines that seem to come from the worker.
        os.dup2(self._nothing, 1)
        os.dup2(self._nothing, 2)
        _close_files(control)
        drop_rights(self._memory_bytes, self._user)
        guest.run(control, process)

    def _report(self, name: str, text: str) -> None:
        self._control.send(msgspec.json.encode((name, 0, 0, text)))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            self._control.send(msgspec.json.encode(("died", code, pid, "")))


def _close_files(control: socket.socket) -> None:
    """Closes all descriptors except ``control`` and the standard ones (0 to 2)."""
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, 1 << 16)


def _main() -> None:
    # The zygote ignores these signals. The worker handles them, and closes the socket when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_END))
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json_decoder(Setup).decode(sys.argv[2])
    zygote = Zygote(control, setup)
    # If the worker has ended, for example because of an invalid setting, writing to the socket
    # fails.
    with contextlib.suppress(BrokenPipeError):
        if setup.trusted:
            logs.set_up(settings.load(), "controller")
            try:
                zygote.load(setup.controllers)
            except TokenbusError:
                return
        else:
            zygote.report_layers()
        gc.collect()
        gc.freeze()
        zygote.run()


if __name__ == "__main__":
    _main()
