"""Compiles each new grammar in a separate process first, before the worker does.

A grammar of a kilobyte can take llguidance hours to compile (an intersection of a few expressions),
or overflow its stack and so end the process (a chain of 10,000 rules). Therefore each new grammar
is first sent to ``python -m tokenbus.workers.controller.backends.llguidance.trial``, which has
bounded time, memory and stack: it compiles the grammar for a vocabulary of bytes and takes one
step. The process is reused, as starting it takes 0.1 s; a trial takes about a millisecond.
"""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .....protocol.errors import Code, ServiceError, UnavailableError

CPU_S = 2
"""Limit on the CPU time of a trial, in seconds; the kernel may allow up to one second more."""
WALL_S = 30.0
"""Limit on wall time, in seconds, for a machine that is overloaded."""
MEMORY_BYTES = 1024**3
"""Most memory that the process may allocate."""
STACK_BYTES = 3 * 1024 * 1024
"""Less than the worker's threads have (``sandbox.HOST_STACK_BYTES``): a grammar that compiles here
compiles there."""
MAX_LEXER_STATES = 100_000
"""Most lexer states of one grammar, shared by all its sequences, of about 0.5 kB each. A string of
bounded length takes about 5 per character."""
AT_ONCE = 2
"""Most trials at the same time, and most idle processes."""
SHOWN = 400
"""Most characters of a reason that an error message shows."""

_LENGTH = struct.Struct("<I")


class RefusedGrammar(Exception):
    """A grammar that llguidance refuses or that exceeds the bounds; the message is the reason."""


def parser_limits() -> LLParserLimits:
    """The bounds on llguidance's lexer and parser, for every grammar."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def reason(error: str) -> str:
    """llguidance's message on one line, without its excerpts of the grammar, which are indented,
    and without its stack trace."""
    message = error.split("\n<", 1)[0]
    lines = [line for line in message.splitlines() if line and not line[0].isspace()]
    text = " ".join(line.removeprefix("error: ") for line in lines)
    if text.startswith("NoExtension"):
        text = "it allows no text at all"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


class Trials:
    """The trial processes, each of which runs one trial at a time. Thread-safe."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def run(self, grammar: str) -> None:
        """Raises RefusedGrammar if a grammar is not valid or exceeds the bounds above, and
        UnavailableError if no trial process becomes free in time."""
        if not self._turns.acquire(timeout=WALL_S):
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"all {AT_ONCE} grammar checks were busy for {WALL_S:g} s; try again",
                retry_after_s=1.0,
            )
        try:
            reply = self._try(grammar.encode())
        finally:
            self._turns.release()
        if reply:
            raise RefusedGrammar(reply)

    def _try(self, grammar: bytes) -> str:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._spawn()
        try:
            reply = _ask(process, grammar)
        except BaseException:
            process.kill()
            _end(process)
            raise
        with self._lock:
            self._idle.append(process)
        return reply

    def close(self) -> None:
        """Ends the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    @staticmethod
    def _spawn() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )


def _ask(process: subprocess.Popen[bytes], grammar: bytes) -> str:
    """The error that a trial process reports for a grammar; empty if it is valid."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_LENGTH.pack(len(grammar)) + grammar)
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(WALL_S):
                raise RefusedGrammar(f"it could not be compiled within {WALL_S:g} s")
        reply = _read(process.stdout)
        if reply is not None:
            return reply.decode()
    except BrokenPipeError:
        pass
    code = process.wait()
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise RefusedGrammar(f"compiling it takes more than {CPU_S} s of CPU time")
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        raise RefusedGrammar("it is nested too deeply: llguidance's stack overflowed")
    if code == -signal.SIGABRT:
        raise RefusedGrammar(f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory")
    raise ServiceError(
        Code.INTERNAL, f"the process that checks grammars failed with exit code {code}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


def _read(source: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return source.read(_LENGTH.unpack(head)[0])


# --- in the process -------------------------------------------------------------------------------


def _check(tokenizer: LLTokenizer, grammar: str) -> str:
    """The error of compiling a grammar and taking one step; empty if there is none."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        token = (mask & -mask).bit_length() - 1
        if not matcher.is_error() and token != tokenizer.eos_token:
            matcher.consume_token(token)
    return reason(matcher.get_error()) if matcher.is_error() else ""


def _serve() -> None:
    tokenizer = LLTokenizer("byte")
    while (grammar := _read(sys.stdin.buffer)) is not None:
        most = math.ceil(time.process_time() + CPU_S)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        reply = _check(tokenizer, grammar.decode()).encode()
        sys.stdout.buffer.write(_LENGTH.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve).start()
