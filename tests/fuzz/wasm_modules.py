"""Uploaded modules as a fuzz target: the worker's code reads, examines and rewrites them, as before
compilation."""

from __future__ import annotations

from collections.abc import Iterator

import wasmtime
from tokenbus.protocol.errors import TokenbusError
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm.abis import EXPORTS, examine
from tokenbus.workers.controller.wasm.wasm_binary import (
    mutable_global_exports,
    read,
    with_exported_globals,
)
from tokenbus.workers.controller.wasm.wasm_code import why_no_copy

from .target import Target

LIMITS = Limits()

_PARTS = (
    "",
    "(global $a (mut i32) (i32.const 1)) (global (mut f64) (f64.const 2)) (global i64 i64.const 1)",
    "(table 4 8 funcref) (func (table.set (i32.const 0) (ref.null func)))",
    '(data "x") (func (param i32) (result i32) (block (br_table 0 0 0 (local.get 0))) i32.const 1)',
    "(func (result v128) v128.const i32x4 1 2 3 4) (start 0) (func)",
    "(type (func (param i32 i64) (result f32))) (elem func 0) (func)",
    '(import "tokenbus" "log" (func (param i32 i32)))',
    '(import "wasi_snapshot_preview1" "fd_write" (func (param i32 i32 i32 i32) (result i32)))',
)


def modules() -> Iterator[bytes]:
    """A module for each ABI and each of ``_PARTS``, an empty module, and bytes that are not a
    module."""
    for abi in ("native", "aici"):
        calls = "".join(
            f'(func (export "{name}") {"(param i32)" if kind.params else ""} '
            f"{'(result i32) i32.const 1' if kind.results else ''})"
            for name, kind in EXPORTS[abi].items()
        )
        for part in _PARTS:
            imports, others = (part, "") if part.startswith("(import") else ("", part)
            text = f'(module {imports} (memory (export "memory") 1) {calls} {others})'
            try:
                yield bytes(wasmtime.wat2wasm(text))
            except wasmtime.WasmtimeError:
                continue
    yield b""
    yield b"\0asm\1\0\0\0"
    yield b"\0asm\x0d\0\1\0"


def run(data: bytes) -> None:
    """Examines and rewrites a module. A fault must become a TokenbusError, and a rewritten module
    must be readable."""
    for look in (why_no_copy, lambda wasm: examine(wasm, LIMITS)):
        try:
            look(data)
        except TokenbusError:
            pass
    try:
        exported = with_exported_globals(data)
    except TokenbusError:
        return
    before, after = read(data), read(exported)
    assert None not in mutable_global_exports(after)
    assert after.globals == before.globals
    assert after.exports.items() >= before.exports.items()


TARGET = Target(
    run, modules, (b"\0asm\1\0\0\0", b"memory", b"tokenbus_abi_v1", b"tokenbus:global:")
)
