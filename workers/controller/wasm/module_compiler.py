"""Examines and compiles modules in separate processes, with bounded time and memory.

A small module may take long to compile. For example, 300 kB of loops over 2,000 locals take 27 s
and 3 GB of memory. Parsing some modules of 4 MB takes a second. So the worker neither compiles nor
parses uploads in its own process.

``python -m tokenbus.workers.controller.wasm.module_compiler`` reads tasks from stdin, and writes
their outcomes to stdout. Each task runs in a process that is forked from this process, because a
fork takes a hundredth of the time of starting a new process. The resource limits apply
only to the forked process. The memory of a task is freed when the forked process ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from typing import Literal, NamedTuple, NoReturn

import msgspec
import wasmtime

from ....protocol.decoders import json_decoder, msgpack_decoder
from ....protocol.errors import Code, ControllerError, RequestError, ServiceError
from ....protocol.python_command import plain_environment, python_command
from ..limits import Limits
from ..priority import long_call, lower_priority
from ..scripts.engines import booted, boots
from ..scripts.modules import script_module
from ..scripts.sources import Source, check_program
from ..task_pipes import end, exchange, read, write
from .abis import Examined, examine
from .exported_state import with_exported_state
from .sandbox import Ticker, make_engine
from .wasm_reader import WasmError

CPU_S = 30
"""Maximum CPU time of a compilation, in seconds. The times of its threads are added up. A usual
module of 16 MB takes 7 s."""
WALL_S = 300.0
"""Maximum wall-clock time of a compilation, in seconds. A compilation takes longer only on an
overloaded machine."""
MEMORY_BYTES = 2 * 1024**3
"""Maximum bytes of memory that a task may allocate."""
COMPILED_BYTES = 256 * 1024**2
"""Maximum bytes of a compiled form. The compiled form of a usual module is about as large as the
module."""

_INVALID = 3
"""Exit code: Wasmtime cannot compile the module."""
_NO_MEMORY = 4
"""Exit code: the memory bound is exceeded."""
_REFUSED = 5
"""Exit code: a check of this project refuses the module or the script."""
_MAX_REASON = 2000
"""Maximum characters of the reason for a refusal, which may quote names of the module."""
_MAX_WASMTIME_MESSAGE = 400
"""Maximum characters of a message of Wasmtime."""
_PR_SET_PDEATHSIG = 1

_idle: list[subprocess.Popen[bytes]] = []
"""The processes that wait for their next task. A thread that compiles takes one of these processes,
or starts a new process."""
_idle_lock = threading.Lock()

Kind = Literal["module", "interpreter", "script"]
"""The kind of a task. A module is examined and compiled. An interpreter of scripts is booted, if it
exports ``tokenbus_boot``, and compiled. A script is only checked."""


class _Task(msgspec.Struct):
    """A task for the process."""

    kind: Kind
    limits: Limits
    cpu_s: int
    given: bytes
    """The module, or the text of the script."""
    language: str = ""
    interpreter: bytes = b""
    """The compiled interpreter of the script."""


class _Outcome(msgspec.Struct):
    """The outcome of a task."""

    code: int
    """The exit code of the forked process; negative if a signal ended this process."""
    output: bytes
    """The result of ``examine`` as a line of JSON, and then the input of
    ``wasmtime.Module.deserialize``; empty for a script."""
    errors: bytes


class Compiled(NamedTuple):
    """A compiled module, from which this worker can create controllers."""

    found: Examined
    code: bytes
    """The compiled form, with all of its state exported (``with_exported_state``)."""


def compile_module(wasm: bytes, limits: Limits) -> Compiled:
    """Examines a module, and compiles it for an engine that ``make_engine`` made from the same
    limits.

    Raises RequestError if ``examine`` refuses the module, if the module is not valid, or if
    compiling it exceeds the bounds above. Raises ServiceError if the compiler process fails.
    """
    return _compile("module", wasm, limits)


def compile_interpreter(wasm: bytes, limits: Limits) -> Compiled:
    """Compiles an interpreter of scripts. If the interpreter exports ``tokenbus_boot``, the
    compiled form contains the memory of an interpreter in which ``tokenbus_boot`` has run. Raises
    the errors of ``compile_module``."""
    return _compile("interpreter", wasm, limits)


def _compile(kind: Kind, wasm: bytes, limits: Limits) -> Compiled:
    head, _, code = _run_apart(_Task(kind, limits, CPU_S, wasm)).partition(b"\n")
    if len(code) > COMPILED_BYTES:
        raise WasmError(
            f"the {kind}'s compiled form has {len(code)} bytes; at most {COMPILED_BYTES} are "
            "allowed"
        )
    return Compiled(json_decoder(Examined).decode(head), code)


def check_script(source: Source, interpreter: bytes, limits: Limits) -> None:
    """Raises RequestError if a script has a syntax error or does not define a program. The message
    gives the position of a syntax error. ``interpreter``: the compiled form of the script's
    interpreter."""
    _run_apart(_Task("script", limits, CPU_S, source.text, source.language, interpreter))


def _run_apart(task: _Task) -> bytes:
    """Runs a task, and returns its output. Raises RequestError if the task refuses its input,
    WasmError if the module is not valid or the task exceeds the bounds above, and ServiceError if
    the task fails."""
    try:
        outcome = _outcome(msgspec.msgpack.encode(task))
    except TimeoutError:
        raise WasmError(f"the {task.kind} could not be compiled within {WALL_S:g} s") from None
    if outcome.code == 0:
        return outcome.output
    said = outcome.errors.decode("utf-8", "replace").strip()
    if outcome.code == _REFUSED:
        raise RequestError(Code.INVALID_FIELD, said, path="$.data")
    if outcome.code == _INVALID:
        raise WasmError(f"the module is not valid: {said}")
    if outcome.code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise WasmError(f"compiling the {task.kind} takes more than {task.cpu_s} s of CPU time")
    if outcome.code in (-signal.SIGABRT, _NO_MEMORY):
        raise WasmError(
            f"compiling the {task.kind} takes more than {MEMORY_BYTES >> 20} MiB of memory"
        )
    raise ServiceError(
        Code.INTERNAL,
        f"the module compiler failed with exit code {outcome.code}: {said[-300:]}",
    )


def _outcome(task: bytes) -> _Outcome:
    """Runs an encoded task in an idle process, or in a new process if none is idle, and returns the
    outcome. Raises TimeoutError after ``WALL_S``, and ServiceError if the process ends without an
    outcome."""
    with _idle_lock:
        process = _idle.pop() if _idle else None
    if process is None or process.poll() is not None:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            python_command(__name__), stdin=pipe, stdout=pipe, env=plain_environment()
        )
    try:
        reply = exchange(process, task, WALL_S)
    except BaseException:
        process.kill()
        end(process)
        raise
    if reply is None:
        end(process)
        raise ServiceError(
            Code.INTERNAL, f"the module compiler ended with exit code {process.returncode}"
        )
    with _idle_lock:
        _idle.append(process)
    return msgpack_decoder(_Outcome).decode(reply)


# --- in the process -----------------------------------------------------------------------------


def _serve() -> NoReturn:
    """Runs tasks until the worker closes stdin."""
    # The process ignores these signals, because the worker handles them and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    with suppress(BrokenPipeError):
        while (task := read(sys.stdin.buffer)) is not None:
            write(sys.stdout.buffer, msgspec.msgpack.encode(_forked(task)))
            del task  # An idle process does not keep the module.
    os._exit(0)


def _forked(task: bytes) -> _Outcome:
    """Runs an encoded task in a process that is forked from this process."""
    server, output, errors = os.getpid(), os.memfd_create("output"), os.memfd_create("errors")
    fork = os.fork()
    if not fork:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != server:
                os._exit(1)
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
                os.dup2(file, number)
            code = _run(msgpack_decoder(_Task).decode(task))
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(fork, 0)
    return _Outcome(os.waitstatus_to_exitcode(status), _content(output), _content(errors))


def _content(file: int) -> bytes:
    """Returns the content of an open file, and closes the file."""
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read()


def _run(task: _Task) -> int:
    """Runs a task in this process; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_s, task.cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * COMPILED_BYTES, 2 * COMPILED_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if task.kind == "interpreter":
        return _translate(task)
    lower_priority()  # Streams have priority over uploads.
    with long_call():
        return _check(task) if task.kind == "script" else _translate(task)


def _translate(task: _Task) -> int:
    """Compiles a module, and prints what was found in it and its compiled form."""
    wasm = task.given
    try:
        if task.kind == "interpreter":
            wasm = booted(wasm) if boots(wasm) else wasm
            found = Examined("native", None)
        else:
            found = examine(wasm, task.limits)
        exported = with_exported_state(wasm)
        compiled = wasmtime.Module(make_engine(task.limits), exported).serialize()
    except RequestError as error:
        return _refused(error.message)
    except wasmtime.WasmtimeError as error:
        print(_shortened(str(error)), file=sys.stderr)
        return _INVALID
    except MemoryError:
        return _NO_MEMORY
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n" + compiled)
    return 0


def _check(task: _Task) -> int:
    """Checks a script by compiling it, without running it."""
    engine = make_engine(task.limits)
    try:
        with Ticker(engine):
            module = wasmtime.Module.deserialize(engine, task.interpreter)
            script_module(engine, task.language, module, task.given).check(task.limits)
        check_program(Source(task.language, task.given))
    except RequestError as error:
        return _refused(error.message)
    except ControllerError as error:
        return _refused(f"the script is not valid: {error.message.removeprefix('the script: ')}")
    return 0


def _refused(reason: str) -> int:
    """Writes the reason for a refusal to stderr; returns the exit code."""
    sys.stderr.buffer.write(reason[:_MAX_REASON].encode("utf-8", "backslashreplace"))
    return _REFUSED


def _shortened(said: str) -> str:
    """Wasmtime's message and its causes on one line, cut at ``_MAX_WASMTIME_MESSAGE``."""
    lines = [line.strip() for line in said.splitlines()]
    parts = [line for line in lines if line and line != "Caused by:"]
    line = ": ".join(re.sub(r"^\d+: ", "", part) for part in parts)
    return line[:_MAX_WASMTIME_MESSAGE]


if __name__ == "__main__":
    _serve()
