"""Compiling a module in a process of its own, with bounded time and memory.

A small module may take hours to compile (300 kB of loops over 2,000 locals take 27 s and 3 GB), so
the worker does not compile in its own process what users upload.
``python -m tokenbus.workers.controller.wasm.module_compiler STACK_BYTES CPU_S`` takes a module on
stdin, and writes what ``wasmtime.Module.deserialize`` takes to stdout.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import wasmtime

from ....protocol.errors import Code, ServiceError
from ..limits import Limits
from .sandbox import make_engine
from .wasm_reader import WasmError

CPU_S = 30
"""Time that compiling may take, in seconds of CPU, all threads together. 16 MB of usual code: 7."""
WALL_S = 100.0
"""The same by the clock, in seconds, so that a machine that is too busy is noticed."""
MEMORY_BYTES = 2 * 1024**3
"""What the process may allocate."""
COMPILED_BYTES = 256 * 1024**2
"""Size of the compiled form at most; usual code is about as large as its module."""

_INVALID = 3
"""Exit code: the module is not valid."""
_NO_MEMORY = 4


def compile_module(wasm: bytes, limits: Limits) -> bytes:
    """The compiled form of a module, for an engine that ``make_engine`` made of the same limits.

    Raises WasmError where the module is not valid, or takes more than the bounds above.
    """
    command = [sys.executable, "-m", __name__, str(limits.stack_bytes), str(CPU_S)]
    try:
        done = subprocess.run(command, input=wasm, capture_output=True, timeout=WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise WasmError(f"the module could not be compiled within {WALL_S:g} s") from None
    if done.returncode == 0:
        if len(done.stdout) > COMPILED_BYTES:
            raise WasmError(
                f"the module's compiled form has {len(done.stdout)} bytes; at most "
                f"{COMPILED_BYTES} are allowed"
            )
        return done.stdout
    said = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode == _INVALID:
        raise WasmError(f"the module is not valid: {said}")
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise WasmError(f"compiling the module takes more than {CPU_S} s of CPU time")
    if done.returncode in (-signal.SIGABRT, _NO_MEMORY):
        raise WasmError(f"compiling the module takes more than {MEMORY_BYTES >> 20} MiB of memory")
    raise ServiceError(Code.INTERNAL, f"the compiler failed ({done.returncode}): {said[-300:]}")


def _main() -> int:
    stack_bytes, cpu_s = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    engine = make_engine(replace(Limits(), stack_bytes=stack_bytes))
    try:
        compiled = wasmtime.Module(engine, sys.stdin.buffer.read()).serialize()
    except wasmtime.WasmtimeError as error:
        print(_shortened(str(error)), file=sys.stderr)
        return _INVALID
    except MemoryError:
        return _NO_MEMORY
    sys.stdout.buffer.write(compiled)
    return 0


def _shortened(said: str) -> str:
    """Wasmtime's message on one line, innermost cause last, without its list of causes."""
    lines = [line.strip() for line in said.splitlines()]
    parts = [line for line in lines if line and line != "Caused by:"]
    return ": ".join(re.sub(r"^\d+: ", "", part) for part in parts)[:400]


if __name__ == "__main__":
    sys.exit(_main())
