"""Starts and ends the processes that compile grammars. Each process runs one task at a time.

Compiling a grammar can take hours or all memory, for example if the grammar intersects a few
expressions. Compiling a chain of 10,000 rules overflows the stack of the native library llguidance,
which ends the process that compiles. So grammars are compiled in separate processes with bounded
time, memory and stack (``process.py``). Processes are reused, because starting a process takes 0.1
s, and a usual grammar compiles in about a millisecond.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Collection

import msgspec

from .....protocol.decoders import msgpack_decoder
from .....protocol.errors import Code, ServiceError, UnavailableError
from .....protocol.python_command import plain_environment, python_command
from ...pool import tenant_of_thread, waiting
from ...task_pipes import end, exchange
from . import bounds
from .bounds import TOO_DEEP, Bounds, RefusedGrammar
from .tasks import Done, Kind, Task
from .turns import Turns

AT_ONCE = 2
"""Maximum number of simultaneous tasks, and of idle processes."""


class Processes:
    """The processes of a worker. Thread-safe."""

    def __init__(self, limits: Bounds) -> None:
        """``limits``: the bounds of one task."""
        self.limits = limits
        self._turns = Turns(AT_ONCE)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def check(self, grammar: str, unblamed: Collection[str] = ()) -> None:
        """Compiles an llguidance grammar in a process, for a vocabulary of bytes. Then appends to
        an empty text the first tokens that the grammar allows.

        Raises RefusedGrammar if the grammar is not valid or exceeds the bounds. The reason names
        the faulty part of the grammar, if this part is found. If the reason contains a text of
        ``unblamed``, this method does not search for the faulty part. Raises UnavailableError if no
        process becomes free in time or the machine is too busy.
        """
        self._done("llguidance", grammar.encode(), unblamed)

    def shortest(self, grammar: str) -> bytes | None:
        """Searches for the shortest text of an llguidance grammar; returns None if the search does
        not find a text. Raises the same errors as ``check``, but the reason does not name a part of
        the grammar."""
        return self._done("shortest", grammar.encode()).shortest

    def run(self, kind: Kind, grammar: bytes) -> bytes:
        """Runs a task and returns its result: the tables of compiled automata, or the rewritten or
        relaxed schema. Raises the same errors as ``check``; the reason is the compiler's
        message."""
        return self._done(kind, grammar).tables

    def close(self) -> None:
        """Ends the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            end(process)

    # --- inside ---------------------------------------------------------------------------------

    def _done(self, kind: Kind, grammar: bytes, unblamed: Collection[str] = ()) -> Done:
        tenant = tenant_of_thread()
        with waiting():
            if not self._turns.acquire(tenant, bounds.TURN_S):
                raise UnavailableError(
                    Code.QUEUE_FULL,
                    f"the grammar has waited {bounds.TURN_S:g} s to be compiled, because this "
                    f"worker compiles at most {AT_ONCE} grammars at a time; try again",
                    retry_after_s=1.0,
                )
            try:
                done = self._ask(Task(kind, self.limits.cpu_s, grammar))
                blamed = kind == "llguidance" and not any(one in done.refused for one in unblamed)
                if done.refused and blamed:
                    done.refused += self._blame(grammar, done.refused)
            finally:
                self._turns.release(tenant)
        if done.refused:
            raise RefusedGrammar(done.refused)
        return done

    def _blame(self, grammar: bytes, reason: str) -> str:
        """The faulty part of a refused grammar, as text that is appended to the reason; empty if
        the part is unknown."""
        task = Task("blame", bounds.BLAME_SHARE * self.limits.cpu_s, grammar, reason)
        try:
            return self._ask(task).refused
        except (ServiceError, UnavailableError):
            return ""

    def _ask(self, task: Task) -> Done:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._spawn()
        try:
            reply = exchange(process, msgspec.msgpack.encode(task), bounds.WALL_S)
            if reply is None:
                end(process)
                return Done(refused=self._why_ended(process.returncode, task))
        except BaseException as error:
            process.kill()
            end(process)
            if isinstance(error, TimeoutError):
                raise UnavailableError(
                    Code.QUEUE_FULL,
                    f"compiling the grammar did not end within {bounds.WALL_S:g} s, because this "
                    "machine is busy; try again",
                    retry_after_s=5.0,
                ) from None
            raise
        with self._lock:
            self._idle.append(process)
        return msgpack_decoder(Done).decode(reply)

    def _why_ended(self, code: int, task: Task) -> str:
        if task.kind == "blame":
            return ""
        if code in (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGKILL):
            return self.limits.too_slow
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return TOO_DEEP
        if code == -signal.SIGABRT:
            return self.limits.too_large
        raise ServiceError(
            Code.INTERNAL, f"the process that compiles grammars failed with exit code {code}"
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        program = __name__.rpartition(".")[0] + ".process"
        return subprocess.Popen(
            python_command(program, str(self.limits.memory_bytes)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=plain_environment(),
        )
