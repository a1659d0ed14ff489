"""Examines and compiles a module in a separate process, with bounded time and memory.

A small module may take hours to compile: 300 kB of loops over 2,000 locals take 27 s and 3 GB.
Parsing some modules of 4 MB takes a second. So the worker neither compiles nor parses uploads in
its own process.

``python -m tokenbus.workers.controller.wasm.module_compiler LIMITS CPU_S KIND`` reads a module from
stdin. It writes to stdout the result of ``examine``, as a line of JSON, and then the input of
``wasmtime.Module.deserialize``. LIMITS is the JSON of ``Limits``. KIND is ``module``,
``interpreter`` (which is booted before it is compiled if it exports ``tokenbus_boot``), or
``script``. For ``script``, stdin has a
line with the script's language and size, the script, and the compiled interpreter; the process only
checks the script.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from typing import NamedTuple

import msgspec
import wasmtime

from ....protocol.errors import Code, ControllerError, RequestError, ServiceError
from ....protocol.python_command import python_command
from ..limits import Limits
from ..scripts.engines import booted, boots
from ..scripts.modules import script_module
from ..scripts.sources import Source, check_program
from .abis import Examined, examine
from .exported_state import with_exported_state
from .sandbox import Ticker, make_engine
from .wasm_reader import WasmError

CPU_S = 30
"""Maximum CPU time of compiling, in seconds, of all threads together. A usual module of 16 MB takes
7 s."""
WALL_S = 300.0
"""Maximum wall-clock time of compiling, in seconds. Compiling takes longer only on an overloaded
machine."""
_NICENESS = 5
"""The nice value of the process. Streams have priority over uploads."""
MEMORY_BYTES = 2 * 1024**3
"""Maximum bytes of memory that the process may allocate."""
COMPILED_BYTES = 256 * 1024**2
"""Maximum bytes of a compiled form. The compiled form of a usual module is about as large as the
module."""

_INVALID = 3
"""Exit code: the module is not valid."""
_NO_MEMORY = 4
_REFUSED = 5
"""Exit code: ``examine`` refuses the module."""
_SAID_CHARACTERS = 2000
"""Maximum characters of an error message. The bound is needed because the message may quote names
of the module."""


class Compiled(NamedTuple):
    """A compiled module, from which this worker can create controllers."""

    found: Examined
    code: bytes
    """The compiled form, with all of its state exported (``with_exported_state``)."""


def compile_module(wasm: bytes, limits: Limits) -> Compiled:
    """Examines a module, and compiles it for an engine that ``make_engine`` made from the same
    limits.

    Raises RequestError if ``examine`` refuses the module, if the module is not valid, or if
    compiling it exceeds the bounds above.
    """
    return _compile("module", wasm, limits)


def compile_interpreter(wasm: bytes, limits: Limits) -> Compiled:
    """Compiles an interpreter of scripts. If the interpreter exports ``tokenbus_boot``, the
    compiled form contains the memory that the interpreter has after this call."""
    return _compile("interpreter", wasm, limits)


def _compile(kind: str, wasm: bytes, limits: Limits) -> Compiled:
    head, _, code = _run_apart(kind, wasm, limits).partition(b"\n")
    if len(code) > COMPILED_BYTES:
        raise WasmError(
            f"the {kind}'s compiled form has {len(code)} bytes; at most {COMPILED_BYTES} are "
            "allowed"
        )
    return Compiled(msgspec.json.decode(head, type=Examined), code)


def check_script(source: Source, interpreter: bytes, limits: Limits) -> None:
    """Raises RequestError with the place of a syntax error in a script, or if the script has no
    program. ``interpreter``: the compiled form of its interpreter."""
    head = f"{source.language} {len(source.text)}\n".encode()
    _run_apart("script", head + source.text + interpreter, limits)


def _run_apart(kind: str, given: bytes, limits: Limits) -> bytes:
    """Runs this file as a process, and returns the output of the process. Raises RequestError if
    the process refuses its input, WasmError if the module is not valid or the process exceeds the
    bounds above, and ServiceError if the process fails."""
    encoded = msgspec.json.encode(limits).decode()
    command = python_command(__name__, encoded, str(CPU_S), kind)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        if kind != "interpreter":
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        try:
            output, errors = process.communicate(given, WALL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise WasmError(f"the {kind} could not be compiled within {WALL_S:g} s") from None
    if process.returncode == 0:
        return output
    said = errors.decode("utf-8", "replace").strip()
    if process.returncode == _REFUSED:
        raise RequestError(Code.INVALID_FIELD, said, path="$.data")
    if process.returncode == _INVALID:
        raise WasmError(f"the module is not valid: {said}")
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise WasmError(f"compiling the {kind} takes more than {CPU_S} s of CPU time")
    if process.returncode in (-signal.SIGABRT, _NO_MEMORY):
        raise WasmError(f"compiling the {kind} takes more than {MEMORY_BYTES >> 20} MiB of memory")
    raise ServiceError(
        Code.INTERNAL,
        f"the module compiler failed with exit code {process.returncode}: {said[-300:]}",
    )


def _main() -> int:
    limits, cpu_s = msgspec.json.decode(sys.argv[1], type=Limits), int(sys.argv[2])
    kind = sys.argv[3]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wasm = sys.stdin.buffer.read()
    if kind == "script":
        return _check(wasm, limits)
    try:
        if kind == "interpreter":
            wasm = booted(wasm) if boots(wasm) else wasm
            found = Examined("native", None)
        else:
            found = examine(wasm, limits)
        exported = with_exported_state(wasm)
        compiled = wasmtime.Module(make_engine(limits), exported).serialize()
    except RequestError as error:
        said = error.message[:_SAID_CHARACTERS].encode("utf-8", "backslashreplace")
        sys.stderr.buffer.write(said)
        return _REFUSED
    except wasmtime.WasmtimeError as error:
        print(_shortened(str(error)), file=sys.stderr)
        return _INVALID
    except MemoryError:
        return _NO_MEMORY
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n" + compiled)
    return 0


def _check(given: bytes, limits: Limits) -> int:
    """Checks a script by compiling it, without running it."""
    head, _, rest = given.partition(b"\n")
    language, size = head.decode().split()
    text, compiled = rest[: int(size)], rest[int(size) :]
    engine = make_engine(limits)
    try:
        with Ticker(engine):
            module = wasmtime.Module.deserialize(engine, compiled)
            script_module(engine, language, module, text).check(limits)
        check_program(Source(language, text))
    except RequestError as error:
        sys.stderr.buffer.write(error.message.encode())
        return _REFUSED
    except ControllerError as error:
        said = error.message.removeprefix("the script: ")[:_SAID_CHARACTERS]
        sys.stderr.buffer.write(f"the script is not valid: {said}".encode())
        return _REFUSED
    return 0


def _shortened(said: str) -> str:
    """Wasmtime's message and its innermost cause on one line, without the list of the other
    causes."""
    lines = [line.strip() for line in said.splitlines()]
    parts = [line for line in lines if line and line != "Caused by:"]
    return ": ".join(re.sub(r"^\d+: ", "", part) for part in parts)[:400]


if __name__ == "__main__":
    sys.exit(_main())
