"""Compiles a yacc grammar in a separate process, with bounded time and memory.

The compiler is Python code and takes 3 ms or more, up to its limit of 20 s. In a thread of the
worker, the compiler would keep Python's lock during this time. ``python -m
tokenbus.workers.controller.backends.grammar.yacc_compiler`` reads a grammar from stdin and writes
its tables to stdout, or an error as JSON to stderr.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys

import msgspec

from .....grammars.yacc import GrammarError, compile_grammar
from .....protocol.decoders import json_decoder
from .....protocol.errors import Code, ServiceError, UnavailableError
from .....protocol.python_command import python_command
from ..compiling.turns import Turns

AT_ONCE = 2
"""Maximum number of grammars that are compiled at the same time; further grammars wait."""
TURN_S = 30.0
"""Maximum time that a grammar waits for its turn, in seconds. If the wait is longer, the client has
to send the request again."""
MAX_SECONDS = 20
CPU_S = 25
"""Limit on the process's CPU time, in seconds, in case the compiler exceeds ``MAX_SECONDS``."""
WALL_S = 300.0
"""Maximum wall-clock time of compiling, in seconds. Compiling takes longer only on a busy machine.
The client then has to send the request again."""
MEMORY_BYTES = 2 * 1024**3

_WRONG = 3
"""Exit code: the grammar is not valid."""
_NO_MEMORY = 4

_turns = Turns(AT_ONCE)


class _Wrong(msgspec.Struct):
    message: str
    line: int
    column: int


def compile_apart(text: str, tenant: str) -> bytes:
    """The tables of a tenant's grammar (``CompiledGrammar.to_bytes``). The caller frees its
    thread's slot during the call (``pool.waiting``).

    Raises GrammarError if the grammar is not valid or exceeds the bounds above. Raises
    UnavailableError if the grammar waits longer than ``TURN_S`` for its turn, or if the machine is
    too busy.
    """
    if not _turns.acquire(tenant, TURN_S):
        raise UnavailableError(
            Code.QUEUE_FULL,
            f"the grammar has waited {TURN_S:g} s to be compiled, because this worker compiles at "
            f"most {AT_ONCE} grammars at a time; try again",
            retry_after_s=1.0,
        )
    try:
        done = subprocess.run(
            python_command(__name__),
            input=text.encode(),
            capture_output=True,
            timeout=WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            Code.QUEUE_FULL,
            f"compiling the grammar did not end within {WALL_S:g} s, because this machine is busy; "
            "try again",
            retry_after_s=5.0,
        ) from None
    finally:
        _turns.release(tenant)
    if done.returncode == 0:
        return done.stdout
    if done.returncode == _WRONG:
        wrong = json_decoder(_Wrong).decode(done.stderr)
        raise GrammarError(wrong.message, wrong.line, wrong.column)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise GrammarError(f"compiling the grammar takes more than {CPU_S} s of CPU time")
    if done.returncode in (-signal.SIGABRT, _NO_MEMORY):
        raise GrammarError(
            f"compiling the grammar takes more than {MEMORY_BYTES >> 20} MiB of memory"
        )
    said = done.stderr.decode("utf-8", "replace").strip()
    raise ServiceError(
        Code.INTERNAL,
        f"the grammar compiler failed with exit code {done.returncode}: {said[-300:]}",
    )


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiled = compile_grammar(sys.stdin.buffer.read().decode(), max_seconds=MAX_SECONDS)
    except GrammarError as error:
        wrong = _Wrong(error.message, error.line, error.column)
        sys.stderr.buffer.write(msgspec.json.encode(wrong))
        return _WRONG
    except MemoryError:
        return _NO_MEMORY
    sys.stdout.buffer.write(compiled.grammar.to_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
