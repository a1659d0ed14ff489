"""Trying a grammar out in a process of its own, before the worker compiles it.

A grammar of a kilobyte may take llguidance hours to compile (the
intersection of a few expressions), or that overflows its stack and takes the process with it (a
chain of 10,000 rules). So each new grammar goes first to ``python -m
tokenbus.workers.controller.backends.llguidance.trial``, with bounded time, memory and stack: it
compiles the grammar for a vocabulary of bytes and takes one step. The process stays, as starting it
takes 0.1 s; a trial takes the time of compiling, about a millisecond.
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
"""Time that a trial may take, in seconds of CPU; up to a second more, as the system counts."""
WALL_S = 30.0
"""The same by the clock, so that a machine that is too busy is noticed."""
MEMORY_BYTES = 1024**3
"""What the process may allocate."""
STACK_BYTES = 3 * 1024 * 1024
"""Less than the worker's threads have (``sandbox.HOST_STACK_BYTES``): what passes here passes
there."""
MAX_LEXER_STATES = 100_000
"""Of one grammar, for all its sequences, about 0.5 kB each. A string of bounded length takes some 5
for each character."""
AT_ONCE = 2
"""Trials at the same time, and processes that are kept for the next one."""
SHOWN = 400
"""Characters of a reason that an error shows at most."""

_LENGTH = struct.Struct("<I")


class RefusedGrammar(Exception):
    """A grammar that llguidance refuses, or that takes too much; the message is the reason."""


def parser_limits() -> LLParserLimits:
    """llguidance's own bounds on its lexer and its parser, for every grammar."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def reason(error: str) -> str:
    """llguidance's message on one line, without its excerpts of the grammar, which are indented,
    and without its stack."""
    message = error.split("\n<", 1)[0]
    lines = [line for line in message.splitlines() if line and not line[0].isspace()]
    text = " ".join(line.removeprefix("error: ") for line in lines)
    if text.startswith("NoExtension"):
        text = "it allows no text at all"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


class Trials:
    """The processes. Safe from any thread; each trial has one to itself."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def run(self, grammar: str) -> None:
        """Raises RefusedGrammar where a grammar is wrong or takes more than the bounds above, and
        UnavailableError where others take so long that its turn does not come."""
        if not self._turns.acquire(timeout=WALL_S):
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"other grammars have been tried out for {WALL_S:g} s, {AT_ONCE} at once; try "
                "again",
                retry_after_s=1.0,
            )
        try:
            said = self._tried(grammar.encode())
        finally:
            self._turns.release()
        if said:
            raise RefusedGrammar(said)

    def _tried(self, grammar: bytes) -> str:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._spawn()
        try:
            said = _asked(process, grammar)
        except BaseException:
            process.kill()
            _end(process)
            raise
        with self._lock:
            self._idle.append(process)
        return said

    def close(self) -> None:
        """Ends the processes that wait."""
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


def _asked(process: subprocess.Popen[bytes], grammar: bytes) -> str:
    """What a process says of a grammar: what is wrong, or nothing."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_LENGTH.pack(len(grammar)) + grammar)
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(WALL_S):
                raise RefusedGrammar(f"it could not be compiled within {WALL_S:g} s")
        said = _read(process.stdout)
        if said is not None:
            return said.decode()
    except BrokenPipeError:
        pass
    code = process.wait()
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise RefusedGrammar(f"compiling it takes more than {CPU_S} s of CPU time")
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        raise RefusedGrammar("it nests too deeply: llguidance's stack overflowed")
    if code == -signal.SIGABRT:
        raise RefusedGrammar(f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory")
    raise ServiceError(Code.INTERNAL, f"the process that tries grammars out failed ({code})")


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


def _read(source: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return source.read(_LENGTH.unpack(head)[0])


# --- in the process -------------------------------------------------------------------------------


def _wrong(tokenizer: LLTokenizer, grammar: str) -> str:
    """What is wrong with a grammar, found by compiling it and a step; nothing where all is well."""
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
        said = _wrong(tokenizer, grammar.decode()).encode()
        sys.stdout.buffer.write(_LENGTH.pack(len(said)) + said)
        sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve).start()
