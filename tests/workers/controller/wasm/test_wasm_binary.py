"""The reader of Wasm modules, applied to hand-made modules, compiled modules and garbage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.controller import limits
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm.abis import EXPORTS, IMPORTS, examine
from tokenbus.workers.controller.wasm.exported_state import with_exported_state
from tokenbus.workers.controller.wasm.wasm_binary import (
    FUNC,
    mutable_global_exports,
    read,
    with_exported_globals,
)
from tokenbus.workers.controller.wasm.wasm_code import (
    bodies,
    changes,
    changes_tables,
    why_no_copy,
)
from tokenbus.workers.controller.wasm.wasm_reader import GlobalType, Reader, WasmError, encode_u32

LIMITS = Limits()


def wat(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def native(
    more: str = "", memory: str = '(memory (export "memory") 1)', leave_out: str = ""
) -> str:
    """A module of the native ABI that does nothing."""
    calls = "".join(
        f'(func (export "{name}") {"(param i32)" if kind.params else ""} (result i32) i32.const 1)'
        for name, kind in EXPORTS["native"].items()
        if name != leave_out
    )
    return f"(module {more} {memory} {calls})"


def aici(more: str = "", leave_out: str = "") -> str:
    """A module of AICI's ABI that does nothing."""
    calls = "".join(
        f'(func (export "{name}") {"(param i32)" if kind.params else ""} '
        f"{'(result i32) i32.const 1' if kind.results else ''})"
        for name, kind in EXPORTS["aici"].items()
        if name != leave_out
    )
    return f'(module {more} (memory (export "memory") 1) {calls})'


COUNTER = wat(
    """(module
      (memory (export "memory") 1)
      (global $count (mut i32) (i32.const 40))
      (global $wide (mut i64) (i64.const -7))
      (global $vector (mut v128) (v128.const i32x4 1 2 3 4))
      (global $named (export "named") (mut f64) (f64.const 2.5))
      (global $fixed i32 (i32.const 3))
      (func (export "next") (result i32)
        (global.set $count (i32.add (global.get $count) (i32.const 1)))
        (global.set $wide (i64.mul (global.get $wide) (i64.const 3)))
        (i32.add (global.get $count) (i32.wrap_i64 (global.get $wide)))))"""
)

C_SOURCE = r"""
#include <stdint.h>
typedef float v4 __attribute__((vector_size(16)));
typedef uint8_t b16 __attribute__((vector_size(16)));
static uint32_t seen[999];
static uint32_t (*calls[4])(uint32_t);
static uint32_t one(uint32_t x) { return x * 2654435761u; }
static uint32_t two(uint32_t x) { return __builtin_popcount(x) + seen[x % 999]; }
__attribute__((export_name("mix"))) uint32_t mix(uint32_t n) {
  calls[0] = one; calls[1] = two;
  v4 sum = {0, 1, 2, 3};
  b16 bytes = {38, 38, 38};
  for (uint32_t i = 0; i < n; i++) {
    sum = sum * 1.5f + (v4){(float)i, 2, 38, 1e30f};
    bytes += (b16){1, 2, 3, 38};
    seen[i % 999] += calls[i & 1](i) + (uint32_t)sum[i & 3] + bytes[i & 15];
    switch (n & 15) { case 0: seen[3]++; break; case 1: seen[4]--; break; case 2: return 7;
      case 3: seen[38] ^= n; break; case 9: seen[9] = 9; break; case 11: seen[1] = 2; break; }
  }
  return seen[n % 999];
}
"""


@pytest.fixture(scope="module")
def compiled_c(processes: None, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A module that clang makes from C, with many extensions of Wasm."""
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("c")
    (folder / "mix.c").write_text(C_SOURCE)
    options = (
        "-target wasm32-freestanding -O3 -nostdlib -Wl,--no-entry -mbulk-memory -msimd128 "
        "-msign-ext -mnontrapping-fptoint -mmultivalue -mreference-types -mtail-call"
    )
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *options.split(), "mix.c", "-o", "mix.wasm"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return (folder / "mix.wasm").read_bytes()


# --- sections -------------------------------------------------------------------------------------


def test_everything_that_a_module_declares_is_read() -> None:
    binary = read(
        wat(
            """(module
              (import "env" "f" (func (param i32 i64) (result f32 f64)))
              (import "env" "g" (global (mut v128)))
              (import "env" "t" (table 2 5 externref))
              (memory (export "memory") 3 9)
              (table 7 funcref)
              (global (mut externref) (ref.null extern))
              (global f64 (f64.const 38))
              (func $begin)
              (start $begin)
              (export "first" (func 0)))"""
        )
    )
    [f, g, t] = binary.imports
    assert [(i.module, i.name, i.kind) for i in (f, g, t)] == [
        ("env", "f", 0),
        ("env", "g", 3),
        ("env", "t", 1),
    ]
    assert str(binary.function_type(0)) == "(i32, i64) -> (f32, f64)"
    assert binary.globals == [
        GlobalType("v128", True),
        GlobalType("externref", True),
        GlobalType("f64", False),
    ]
    assert [(s.minimum, s.maximum) for s in binary.tables] == [(2, 5), (7, None)]
    assert [(s.minimum, s.maximum, s.shared) for s in binary.memories] == [(3, 9, False)]
    assert binary.exported(FUNC) == {"first": 0}
    assert binary.start == 1


@pytest.mark.parametrize(
    ("wasm", "says"),
    [
        (b"", "it is empty"),
        (b"#!/bin/sh\n", "begins with"),
        (b"\0asm\x0d\0\1\0", "a component"),
        (b"\0asm\2\0\0\0", "version 02000000"),
        (b"\0asm\1\0\0\0\1", "cut off"),
        (b"\0asm\1\0\0\0\1\x50\0", "has 80 bytes; 1 are there"),
        (b"\0asm\1\0\0\0\x2a\0", "section 42 at byte 8 is unknown"),
        (b"\0asm\1\0\0\0\7\1\0\6\1\0", "section 6 at byte 11 occurs twice or in the wrong place"),
        (b"\0asm\1\0\0\0\1\6\xff\xff\xff\xff\x0f\0", "at most 100000"),
        (b"\0asm\1\0\0\0\1\2\x05\x60", "5 types are announced"),
        (b"\0asm\1\0\0\0\1\2\1\x5f", "garbage-collected"),
        (b"\0asm\1\0\0\0\7\4\1\1\xff\0", "not UTF-8"),
        (b"\0asm\1\0\0\0\3\6\x80\x80\x80\x80\x80\0", "longer than 32 bits"),
    ],
)
def test_what_is_wrong_with_a_module_is_said(wasm: bytes, says: str) -> None:
    with pytest.raises(WasmError, match=says):
        read(wasm)


@given(st.binary(max_size=200))
def test_garbage_gives_an_error_and_nothing_else(garbage: bytes) -> None:
    _try_everything(b"\0asm\1\0\0\0" + garbage)
    _try_everything(garbage)


@given(st.integers(0, len(COUNTER) - 1), st.binary(min_size=1, max_size=3), st.booleans())
def test_a_damaged_module_gives_an_error_or_is_read(at: int, new: bytes, cut: bool) -> None:
    damaged = COUNTER[:at] + new + (b"" if cut else COUNTER[at + len(new) :])
    _try_everything(damaged)


def _try_everything(wasm: bytes) -> None:
    for act in (read, with_exported_globals, why_no_copy, lambda w: examine(w, LIMITS)):
        with suppress(RequestError):
            act(wasm)


@given(st.integers(0, 2**32 - 1))
def test_numbers_come_back_as_they_were_written(number: int) -> None:
    encoded = encode_u32(number)
    reader = Reader(encoded, 0, len(encoded))
    assert reader.u32() == number
    assert reader.at == len(encoded)


# --- globals --------------------------------------------------------------------------------------


def test_every_mutable_global_is_exported_and_nothing_else_changes() -> None:
    changed = with_exported_globals(COUNTER)
    before, after = read(COUNTER), read(changed)
    assert mutable_global_exports(before) == [None, None, None, "named"]
    assert mutable_global_exports(after) == [
        "tokenbus:global:0",
        "tokenbus:global:1",
        "tokenbus:global:2",
        "named",
    ]
    kept = [
        [data[s.start : s.end] for s in binary.sections if s.number != 7]
        for data, binary in ((COUNTER, before), (changed, after))
    ]
    assert kept[0] == kept[1]
    assert before.exports.items() <= after.exports.items()
    assert with_exported_globals(changed) == changed
    wasmtime.Module.validate(wasmtime.Engine(), changed)


@pytest.mark.parametrize(
    "text",
    [
        "(module (global (mut i32) (i32.const 1)))",
        "(module (global (mut i32) (i32.const 1)) (func) (start 0))",
        '(module (import "a" "b" (global (mut i64))) (table 1 funcref) (elem (i32.const 0)))',
        '(module (memory 1) (global (mut i32) (i32.const 1)) (data (i32.const 0) "x") (func))',
        "(module (global (mut i32) (i32.add (i32.const 1) (i32.const 2))))",
    ],
)
def test_a_module_without_exports_gets_a_section_in_the_right_place(text: str) -> None:
    changed = with_exported_globals(wat(text))
    wasmtime.Module.validate(wasmtime.Engine(), changed)
    assert mutable_global_exports(read(changed)) == ["tokenbus:global:0"]


def test_a_module_may_not_use_the_worker_s_own_names() -> None:
    text = '(module (global (mut i32) (i32.const 1)) (func (export "tokenbus:global:0")))'
    with pytest.raises(WasmError, match="tokenbus:global:0"):
        with_exported_globals(wat(text))


@given(st.lists(st.sampled_from([True, False]), max_size=300), st.integers(0, 2))
def test_any_number_of_globals_is_exported(mutable: list[bool], named: int) -> None:
    globals_ = "".join(
        "(global "
        + (f'(export "g{i}") ' if i % 3 == named else "")
        + ("(mut i32)" if m else "i32")
        + f" (i32.const {i}))"
        for i, m in enumerate(mutable)
    )
    changed = with_exported_globals(wat(f"(module {globals_})"))
    wasmtime.Module.validate(wasmtime.Engine(), changed)
    names = mutable_global_exports(read(changed))
    assert len(names) == sum(mutable)
    assert None not in names


def run(wasm: bytes, name: str, arguments: list[int]) -> list[int]:
    store = wasmtime.Store()
    exports = wasmtime.Instance(store, wasmtime.Module(store.engine, wasm), []).exports(store)
    function = exports[name]
    assert isinstance(function, wasmtime.Func)
    return [function(store, *([n] if arguments != [] else [])) for n in arguments or [0] * 5]


@pytest.mark.process
def test_a_module_does_what_it_did_before_its_globals_were_exported(compiled_c: bytes) -> None:
    changed = with_exported_globals(COUNTER)
    assert run(changed, "next", []) == run(COUNTER, "next", [])
    changed = with_exported_globals(compiled_c)
    assert None not in mutable_global_exports(read(changed))
    numbers = [0, 1, 5, 100, 3000]
    assert run(changed, "mix", numbers) == run(compiled_c, "mix", numbers)


# --- code -----------------------------------------------------------------------------------------

HARMLESS = """
    (table.get 0 (i32.const 38)) drop
    (i32.const 38) (f32.const 38) (f64.const 38) drop drop drop
    (i64.store offset=38 align=1 (i32.const 38) (i64.const 38))
    (i64.store offset=4294967295 (i32.const 38) (i64.const -1))
    (block (result i32) (i32.const 38) (br_if 0 (i32.const 1)) (br_table 0 0 0 (i32.const 2)))
    (if (result i32) (then (i32.const 1)) (else (i32.const 2))) drop
    (loop (param) (br_if 0 (i32.const 0)))
    (block (param) (result i32 i64) (i32.const 38) (i64.const 38)) drop drop
    (call_indirect (type 0) (i32.const 38))
    (select (result i32) (i32.const 1) (i32.const 2) (i32.const 38)) drop
    (select (result funcref) (ref.null func) (ref.func 0) (i32.const 38)) drop
    (ref.is_null (ref.null extern)) drop
    (i32.trunc_sat_f64_u (f64.const 38)) (i64.extend8_s (i64.const 38)) drop drop
    (memory.copy (i32.const 38) (i32.const 38) (i32.const 38))
    (memory.fill (i32.const 38) (i32.const 38) (i32.const 38))
    (memory.init 0 (i32.const 38) (i32.const 0) (i32.const 0))
    (table.size 0) (memory.size) (memory.grow (i32.const 0)) drop drop drop
    (v128.const i8x16 38 252 14 38 38 38 38 38 38 38 38 38 38 38 38 38)
    (v128.load32_lane offset=38 3 (i32.const 38) (v128.const i32x4 1 2 3 4))
    (i8x16.shuffle 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 31)
    (i8x16.extract_lane_s 15) drop
    (v128.load64_zero offset=38 (i32.const 0)) (v128.load8x8_s offset=38 (i32.const 0))
    (f64x2.relaxed_madd (v128.const i32x4 1 2 3 4)) (i32x4.relaxed_trunc_f32x4_s) drop
    (f64x2.convert_low_i32x4_u (i64x2.ge_s (v128.const i32x4 1 2 3 4) (v128.const i32x4 0 0 0 0)))
    (v128.store offset=38 (i32.const 0) (v128.const i32x4 1 2 3 4)) drop
    (global.set 0 (i32.add (global.get 0) (local.tee 2 (local.get 38)))) nop
"""
MODULE = """(module (type (func)) (memory 1) (table 40 funcref) (elem declare func 0) (data "x")
    (global (mut i32) (i32.const 0)) (elem $passive func 0)
    (func %s) (func (local i32 i64 i32 v128 f64) (local {locals}) {body}))"""


def function(body: str) -> bytes:
    text = MODULE.replace("%s", "").format(locals="i32 " * 40, body=body)
    wasm = wat(text)
    wasmtime.Module.validate(wasmtime.Engine(), wasm)
    return wasm


def test_instructions_with_every_kind_of_immediate_are_distinguished() -> None:
    wasm = function(HARMLESS)
    for start, end in bodies(read(wasm)):
        assert list(changes(wasm, start, end)) == []


OF_TABLES = [
    "(table.set 0 (i32.const 1) (ref.func 0))",
    "(drop (table.grow 0 (ref.null func) (i32.const 1)))",
    "(table.fill 0 (i32.const 1) (ref.null func) (i32.const 1))",
    "(table.copy 0 0 (i32.const 1) (i32.const 2) (i32.const 1))",
    "(table.init 0 $passive (i32.const 1) (i32.const 0) (i32.const 1))",
]


@pytest.mark.parametrize("change", ["(elem.drop $passive)", "(data.drop 0)"])
@pytest.mark.parametrize("before", ["", *OF_TABLES])
def test_what_no_copy_can_have_is_found_wherever_it_stands(change: str, before: str) -> None:
    name = change.strip("(").split(" ")[0].strip(")")
    for body in (change, HARMLESS + change, change + HARMLESS, f"(block (loop {change}))"):
        why = why_no_copy(function(before + body))
        assert why is not None
        assert name in why
        assert "function 1" in why


@pytest.mark.parametrize("change", OF_TABLES)
def test_changes_of_a_table_of_functions_are_found_and_can_be_copied(change: str) -> None:
    for body in (change, HARMLESS + change, change + HARMLESS, f"(block (loop {change}))"):
        wasm = function(body)
        assert why_no_copy(wasm) is None
        assert changes_tables(read(wasm))
    assert not changes_tables(read(function(HARMLESS)))


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ("(table 1 funcref) (table 1 externref)", "its table 1 is of externref"),
        ("(table 500 funcref) (table 13 funcref)", "513 elements in its tables are more than"),
        (
            "(table 1 funcref) (elem declare func $f)"
            + "".join(f'(export "{i}" (func 0))' for i in range(512)),
            "513 references are more than",
        ),
    ],
)
def test_tables_that_cannot_be_read_back_hinder(tables: str, why: str) -> None:
    change = "(table.set 0 (i32.const 0) (ref.null func))"
    assert why_no_copy(wat(f"(module {tables} (func $f))")) is None
    found = why_no_copy(wat(f"(module {tables} (func $f {change}))"))
    assert found is not None
    assert found.startswith("its function 0 has table.set, at byte ")
    assert why in found


def test_tables_are_exported_if_the_code_changes_them() -> None:
    wasm = function(OF_TABLES[0])
    changed = with_exported_state(wasm)
    wasmtime.Module.validate(wasmtime.Engine(), changed)
    names = ["tokenbus:function:0", "tokenbus:global:0", "tokenbus:table:0"]
    assert sorted(read(changed).exports) == names
    unchanged = with_exported_state(function(HARMLESS))
    assert list(read(unchanged).exports) == ["tokenbus:global:0"]


def test_every_form_of_an_element_segment_is_read() -> None:
    wasm = wat(
        """(module (table $t 9 funcref) (table $u 9 funcref)
          (func) (func) (func) (func) (func) (func) (func) (func) (func) (func)
          (elem (i32.const 0) 0 1) (elem func 2) (elem (table $u) (i32.const 0) func 3)
          (elem declare func 4) (elem (table $t) (i32.const 0) funcref (ref.func 5))
          (elem funcref (ref.null func) (ref.func 6))
          (elem (table $u) (i32.const 0) funcref (ref.func 7))
          (elem declare funcref (ref.func 8)))"""
    )
    assert read(wasm).references == set(range(9))


def test_a_tail_call_is_known() -> None:
    wasm = wat("(module (func $f (param i32)) (func (param i32) local.get 0 return_call $f))")
    assert [list(changes(wasm, *body)) for body in bodies(read(wasm))] == [[], []]


def test_an_unknown_instruction_counts_as_one_that_hinders() -> None:
    wasm = wat(
        """(module (table 3 funcref) (tag $t)
          (func (local i32) (block $h (try_table (catch_all $h) (throw $t))) (local.set 0
            (i32.const 38))))"""
    )
    why = why_no_copy(wasm)
    assert why is not None
    assert "not known" in why


def test_a_number_that_is_longer_than_it_needs_to_be_hides_nothing() -> None:
    plain = function("(elem.drop $passive)")
    assert plain.count(b"\xfc\x0d\x01") == 1
    start, end = list(bodies(read(plain)))[1]
    hidden = plain[start:end].replace(b"\xfc\x0d\x01", b"\xfc\x8d\x80\x00\x01")
    assert [change.name for change in changes(hidden, 0, len(hidden))] == ["elem.drop"]
    padded = plain[start:end].replace(b"\xfc\x0d\x01", b"\xfd\x8c\x00" + b"\x26" * 16 + b"\x1a")
    assert list(changes(padded, 0, len(padded))) == []


@pytest.mark.process
def test_what_a_compiler_makes_is_gone_through_to_the_end(compiled_c: bytes) -> None:
    binary = read(compiled_c)
    found = list(bodies(binary))
    assert found
    assert [list(changes(compiled_c, *body)) for body in found] == [[]] * len(found)
    assert why_no_copy(compiled_c) is None


def test_a_global_that_holds_a_reference_hinders() -> None:
    why = why_no_copy(wat("(module (global (mut funcref) (ref.null func)))"))
    assert why == "its global 0 is mutable and holds a reference (funcref)"
    assert why_no_copy(wat("(module (global funcref (ref.null func)))")) is None


# --- interfaces -----------------------------------------------------------------------------------


def test_the_interface_is_found_by_the_exports() -> None:
    assert examine(wat(native()), LIMITS) == ("native", None)
    assert examine(wat(aici()), LIMITS) == ("aici", None)
    assert examine(wat(native("(table 1 funcref)")), LIMITS).why_no_fork is None


GLOBAL = "(global (mut i32) (i32.const 0))"
EXPORT = '(export "{}" (memory 0))'
IMPORT = '(import "tokenbus" "seq_id" (func (result i32)))'


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (lambda n: GLOBAL * n, ("mutable globals", 0, 128)),
        (lambda n: "".join(map(EXPORT.format, range(n))), ("exports", 7, 1000)),
        (lambda n: IMPORT * n, ("imports", 0, 256)),
    ],
    ids=["globals", "exports", "imports"],
)
def test_what_the_worker_goes_through_for_each_instance_is_bounded(
    more: Callable[[int], str], says: tuple[str, int, int]
) -> None:
    what, had, most = says
    assert examine(wat(native(more(most - had))), LIMITS).abi == "native"
    with pytest.raises(RequestError, match=f"the module has {most + 1} {what}; at most"):
        examine(wat(native(more(most - had + 1))), LIMITS)


@pytest.mark.parametrize("abi", ["native", "aici"])
def test_every_import_of_the_table_may_be_had(abi: str) -> None:
    imports = "".join(
        f'(import "{module}" "{name}" (func (param {" ".join(kind.params)}) '
        f"(result {' '.join(kind.results)})))"
        for (module, name), kind in IMPORTS[abi].items()  # type: ignore[index]
    )
    module = native(imports) if abi == "native" else aici(imports)
    assert examine(wat(module), LIMITS).abi == abi


def test_the_functions_of_wasi_have_the_types_that_wasmtime_gives_them() -> None:
    engine = wasmtime.Engine()
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    store = wasmtime.Store(engine)
    wasi = {name: kind for (module, name), kind in IMPORTS["native"].items() if "wasi" in module}
    assert len(wasi) == 46
    for name, kind in wasi.items():
        function = linker.get(store, "wasi_snapshot_preview1", name)
        assert isinstance(function, wasmtime.Func)
        has = function.type(store)
        assert ([*map(str, has.params)], [*map(str, has.results)]) == (
            list(kind.params),
            list(kind.results),
        )


TOO_LARGE = LIMITS.memory_bytes // 65_536 + 1
ENTRY = '(func (export "tokenbus_abi_v1") (result i32) i32.const 1)'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('(module (memory (export "memory") 1) (func (export "main")))', "it exports main"),
        ("(module)", "it exports nothing"),
        (native().replace("abi_v1", "abi_v2"), "version 2 of the native ABI .* version 1"),
        (native(leave_out="tokenbus_grow"), "must export tokenbus_grow too"),
        (aici(leave_out="aici_pre_process"), "must export aici_pre_process too"),
        (native(memory="(memory 1)"), "does not export a memory with the name 'memory'"),
        (native(memory='(memory (export "mem") 1)'), "it exports mem"),
        (native(memory=""), "does not export a memory"),
        (native('(import "a" "m" (memory 1)) (export "memory" (memory 0))', ""), "imports its"),
        (native(memory='(memory (export "memory") 1) (memory 1)'), "2 memories"),
        (native(memory='(memory (export "memory") i64 1)'), "64-bit"),
        (native(memory='(memory (export "memory") 1 2 shared)'), "threads"),
        (native(memory=f'(memory (export "memory") {TOO_LARGE})'), "67108864"),
        (native("(table 200000 funcref)"), "table of 200000 elements"),
        (native('(import "tokenbus" "exec" (func))'), r"tokenbus\.exec is unknown; tokenbus has"),
        (
            native('(import "env" "log" (func))'),
            "modules are tokenbus, wasi_snapshot_preview1",
        ),
        (aici('(import "tokenbus" "log" (func))'), "known modules are env, wasi_snapshot_preview1"),
        (native('(import "tokenbus" "log" (func))'), r"must be \(i32, i32\) -> \(\)"),
        (native('(import "tokenbus" "log" (global i32))'), "is a global; only functions"),
        (native('(func (export "_start") (param i32))'), r"_start is \(i32\) -> \(\)"),
        (native(leave_out="tokenbus_abi_v1").replace("tokenbus_grow", "tokenbus_abi_v1"), "must"),
        (native('(import "tokenbus" "\\n\\n" (func))'), r"tokenbus\.\\n\\n is unknown"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        examine(wat(text), LIMITS)
    assert caught.value.path == "$.data"
    assert "\n" not in caught.value.message


def test_an_export_of_another_type_is_refused() -> None:
    text = native(leave_out="tokenbus_mid_process").replace(
        "(module", '(module (func $x) (export "tokenbus_mid_process" (func $x))', 1
    )
    with pytest.raises(RequestError, match=r"must be \(\) -> \(i32\)"):
        examine(wat(text), LIMITS)


@pytest.mark.process
def test_the_sdk_s_examples_are_native_and_may_fork(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    sdk = Path(limits.__file__).parent / "sdk"
    out = tmp_path / "out.wasm"
    options = "-target wasm32-freestanding -O2 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536"
    command = [sys.executable, "-m", "ziglang", "cc", *options.split(), "-I", str(sdk)]
    source = sdk / "examples" / "upper4.c"
    subprocess.run([*command, str(source), "-o", str(out)], check=True, capture_output=True)
    assert examine(out.read_bytes(), LIMITS) == ("native", None)
