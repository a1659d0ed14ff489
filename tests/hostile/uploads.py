"""Attacks on the compilers: modules that are not valid, compile bombs, and grammar bombs."""

from __future__ import annotations

from functools import partial

from ..workers.controller.backends.compile_bombs import doubled, intersection, nested, product
from ..workers.controller.wasm.hostile.guests import guest
from .attack import ENDS, Attack, Expected, refused
from .binary import MARKER, MARKER_BYTES, custom, repeated, replaced, section, unsigned, vector

ENDS_OR_REFUSED = Expected(("", "invalid_field"))
NOTHING = b"\x00\x0b"
"""A function body without locals and instructions."""
I32 = 0x7F
HEAD = b"\0asm\1\0\0\0"


def functions(count: int, body: bytes) -> bytes:
    """A module of ``count`` functions with this body and without parameters."""
    types = section(1, b"\x01\x60\x00\x00")
    code = unsigned(len(body)) + body
    return HEAD + types + section(3, vector([b"\0"] * count)) + section(10, vector([code] * count))


def loops_over_locals(loops: int, locals_: int) -> bytes:
    """A module with a function of many loops. Every local is live in each loop, so the compilation
    takes long."""
    uses = "".join(f"(local.set $l{i} (local.get $l{(i + 1) % locals_}))" for i in range(locals_))
    local = "".join(f"(local $l{i} i32)" for i in range(locals_))
    body = f"(loop {uses} {MARKER} (br_if 0 (local.get $l0)))"
    wasm = guest(more=f"(func $slow {local} {body})")
    one_loop = b"\x03\x40\x20\x01\x21\x00\x20\x00\x0d\x00\x0b"
    return repeated(wasm, one_loop, loops)


def branches(count: int) -> bytes:
    """A module with a function that has 20 tables of ``count`` branches."""
    table = b"\x41\x00\x0e" + vector([b"\0"] * count) + b"\0"
    return repeated(
        guest(more=f"(func $jumps (block {MARKER}))"), b"\x02\x40" + table + b"\x0b", 20
    )


def deep(depth: int) -> bytes:
    """A module with a function of ``depth`` nested blocks."""
    return repeated(guest(more=f"(func $deep {MARKER})"), b"\x02\x40" * depth + b"\x0b" * depth, 1)


def many_locals() -> bytes:
    """A module with a function that declares 2^32-1 locals."""
    declared = b"\x01" + unsigned(2**32 - 1) + bytes([I32])
    return replaced(guest(more=f"(func $many {MARKER})"), b"\0" + MARKER_BYTES, declared)


def exports(count: int) -> str:
    """Code that exports one global under ``count`` names."""
    return "(global $g i32 (i32.const 1))" + "".join(
        f'(export "g{i}" (global $g))' for i in range(count)
    )


def upload(name: str, tries: str, says: str, wasm: object, *codes: str) -> Attack:
    """An attack by a module whose upload is refused. The error must match ``says``."""
    made = wasm if callable(wasm) else lambda: wasm
    return Attack(name, tries, refused(says, *codes), made)  # type: ignore[arg-type]


GLOBALS = "(global (mut i64) (i64.const 1))"
LARGE_MODULE = 16 * 1024 * 1024

ATTACKS = (
    upload("upload-script", "uploads a shell script", "not Wasm", b"#!/bin/sh\nrm -rf /\n"),
    upload("upload-nothing", "uploads nothing", "it is empty", b""),
    upload("upload-truncated", "uploads a part of a module", "are there", lambda: guest()[:-20]),
    upload(
        "upload-large", "uploads 50 MB", "the limit is 16777216", bytes(50_000_000), "too_large"
    ),
    upload(
        "section-2^32-1",
        "claims a section of 2^32-1 bytes",
        "",
        HEAD + b"\x01" + unsigned(2**32 - 1),
    ),
    upload(
        "vector-2^32-1",
        "claims 2^32-1 functions",
        "",
        HEAD + section(1, b"\x01\x60\x00\x00") + section(3, unsigned(2**32 - 1)),
    ),
    upload("number-endless", "has a number that does not end", "", HEAD + b"\x01" + b"\x80" * 1000),
    upload(
        "globals-100,000",
        "has 100,000 globals, which each fork copies",
        "globals; at most",
        lambda: guest(more=GLOBALS * 99_990),
    ),
    upload(
        "exports-100,000",
        "has 20,000 exports",
        "exports; at most 1000",
        lambda: guest(more=exports(20_000)),
    ),
    upload(
        "imports-1,000",
        "has 1,000 imports",
        "imports; at most 256",
        lambda: guest(imports='(import "tokenbus" "seq_id" (func (result i32)))' * 1000),
    ),
    upload(
        "import-unknown",
        "imports a function of the host's system",
        "the import env.system is unknown",
        lambda: guest(imports='(import "env" "system" (func (param i32) (result i32)))'),
    ),
    upload(
        "import-memory",
        "imports a global of the host",
        "only functions can be imported",
        lambda: guest(imports='(import "env" "m" (global i32))'),
    ),
    upload(
        "functions-1,000,001",
        "has a million functions",
        "functions; at most",
        lambda: functions(1_000_001, NOTHING),
    ),
    Attack("blocks-200,000", "nests 200,000 blocks", ENDS_OR_REFUSED, partial(deep, 200_000)),
    upload(
        "locals-2^32-1",
        "has 2^32-1 locals",
        "too many locals",
        many_locals,
    ),
    upload(
        "compile-bomb",
        "takes minutes to compile",
        "more than 8 s of CPU time|MiB of memory",
        partial(loops_over_locals, 60_000, 2_000),
    ),
    Attack(
        "compile-branches",
        "has 20 tables of 200,000 branches",
        ENDS_OR_REFUSED,
        partial(branches, 200_000),
    ),
    Attack(
        "custom-sections",
        "has 8 MB of names that nobody needs",
        ENDS_OR_REFUSED,
        lambda: guest() + custom("name", bytes(8_000_000)),
    ),
    Attack(
        "data-1-mib",
        "has a megabyte of initial memory",
        ENDS,
        lambda: guest(pages=17, more='(data (i32.const 65536) "' + "x" * 1_000_000 + '")'),
    ),
    Attack(
        "regex-intersections",
        "has a pattern whose automaton has 2^29 states",
        ENDS_OR_REFUSED,
        "regex",
        "(a|b)*a(a|b){28}c",
    ),
    Attack(
        "regex-repeats",
        "repeats a letter up to a billion times",
        ENDS_OR_REFUSED,
        "regex",
        "((a{1,1000}){1,1000}){1,1000}",
    ),
    Attack(
        "regex-nested",
        "nests 5,000 groups",
        ENDS_OR_REFUSED,
        "regex",
        "(" * 5_000 + "a" + ")" * 5_000,
    ),
    Attack(
        "schema-alternatives",
        "nests alternatives 16 deep",
        ENDS_OR_REFUSED,
        "json_schema",
        nested("oneOf", 16),
    ),
    Attack(
        "schema-doubles",
        "doubles its schema 40 times",
        ENDS_OR_REFUSED,
        "json_schema",
        doubled("anyOf", 40),
    ),
    Attack(
        "schema-product",
        "multiplies its alternatives",
        ENDS_OR_REFUSED,
        "json_schema",
        product(16, 8),
    ),
    Attack(
        "schema-patterns",
        "intersects 17 patterns",
        ENDS_OR_REFUSED,
        "json_schema",
        intersection(20),
    ),
    Attack(
        "schemas-together",
        "compiles eight slow schemas at once",
        ENDS_OR_REFUSED,
        "json_schema",
        intersection(18),
        requests=8,
    ),
    Attack(
        "lark-recursion",
        "has a rule that consists of itself",
        ENDS_OR_REFUSED,
        "lark",
        "start: start start | start\n",
    ),
    Attack(
        "lark-ambiguous",
        "has 2^200 derivations",
        Expected(("", "invalid_field", "controller_failed")),
        "lark",
        "start: a\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} | \n" for i in range(200)).replace("a0:", "a:")
        + 'a200: "x" |\n',
    ),
    Attack(
        "yacc-garbage",
        "sends a text that is not a valid grammar",
        Expected(("invalid_field", "controller_failed")),
        "yacc",
        "%% start : start start | ; " * 500,
    ),
    Attack(
        "choice-large",
        "chooses from 3,000 texts of 100 characters",
        ENDS_OR_REFUSED,
        "choice",
        [f"{i:04}" * 25 for i in range(3_000)],
    ),
    Attack(
        "substring-large",
        "searches substrings of a repetitive text of 420 kB",
        ENDS_OR_REFUSED,
        "substring",
        "abcdefghij klmnopqrst " * 20_000,
    ),
)
