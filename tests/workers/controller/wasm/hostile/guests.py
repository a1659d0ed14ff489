"""Guests of the native ABI in Wasm text. They are well-behaved except for the instructions that a
test puts into a call."""

from __future__ import annotations

import wasmtime

MASK = 8192
"""The address of 16 KiB of ones. As a mask, they allow every token."""
FREE = 32768
"""From this address on, a guest's memory is zeros."""
N, LIST, DROP, MASK_AT, COUNT, SEQ = 1056, 1060, 1064, 1068, 1036, 1044
"""Addresses of words of the call block, which is at 1024. The inbox is at 2048."""
INBOX_SIZE = 1032
LOOP = "(loop $ever (br $ever))"
RECURSE = "(call $recurse)"
WASI = {
    name: f'(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {params}) (result i32)))'
    for name, params in {
        "fd_write": "i32 i32 i32 i32",
        "fd_fdstat_get": "i32 i32",
        "random_get": "i32 i32",
        "clock_time_get": "i32 i64 i32",
        "clock_res_get": "i32 i32",
        "args_sizes_get": "i32 i32",
        "environ_sizes_get": "i32 i32",
    }.items()
}
"""The declarations of imports from WASI."""

_GUEST = """(module
  (import "tokenbus" "log" (func $log (param i32 i32)))
  (import "tokenbus" "fail" (func $fail (param i32 i32)))
  (import "tokenbus" "seq_id" (func $seq_id (result i32)))
  (import "tokenbus" "tokenize" (func $tokenize (param i32 i32 i32 i32) (result i32)))
  (import "tokenbus" "trie_size" (func $trie_size (result i32)))
  (import "tokenbus" "trie_read" (func $trie_read (param i32 i32 i32) (result i32)))
  (import "tokenbus" "var_get" (func $var_get (param i32 i32 i32 i32 i32) (result i32)))
  (import "tokenbus" "var_set" (func $var_set (param i32 i32 i32 i32 i32 i32) (result i32)))
  (import "tokenbus" "var_append" (func $var_append (param i32 i32 i32 i32 i32 i32) (result i32)))
  %(imports)s
  (memory (export "memory") %(pages)d)
  (global $round (mut i32) (i32.const 0))
  (global $kept (mut i32) (i32.const 0))
  (data (i32.const 1024) "\\01\\00\\00\\00\\00\\08\\00\\00\\00\\10\\00\\00")
  (data (i32.const 1068) "\\00\\20\\00\\00")
  (data (i32.const 512) "name")
  (data (i32.const 520) "secret")
  (data (i32.const 528) "\\ff\\fe\\80")
  (data (i32.const 8192) "%(ones)s")
  %(more)s
  (func $recurse (local i64 i64 i64 i64) (call $recurse) (call $recurse))
  (func (export "tokenbus_abi_v1") (result i32) (local $i i32) (local $j i32)
    %(abi)s (i32.const 1024))
  (func (export "tokenbus_grow") (param i32) (result i32) %(grow)s (i32.const 0))
  (func (export "tokenbus_init_prompt") (result i32) (local $i i32) (local $j i32)
    %(init)s (i32.const 1))
  (func (export "tokenbus_pre_process") (result i32) (local $i i32) (local $j i32)
    (global.set $round (i32.add (global.get $round) (i32.const 1)))
    %(pre)s (i32.const 1))
  (func (export "tokenbus_mid_process") (result i32) (local $i i32) (local $j i32)
    %(mid)s (i32.const 1))
  (func (export "tokenbus_post_process") (result i32) (local $i i32) (local $j i32)
    %(post)s (i32.const 1)))"""


def guest(
    *,
    abi: str = "",
    grow: str = "",
    init: str = "",
    pre: str = "",
    mid: str = "",
    post: str = "",
    imports: str = "",
    more: str = "",
    pages: int | str = 1,
) -> bytes:
    """A controller that samples under a mask of ones, with these instructions in its calls.

    Each call has two i32 locals, ``$i`` and ``$j``. ``$round`` counts the calls of pre_process.
    ``imports`` and ``more`` are further imports and definitions of the module.
    """
    calls = {"abi": abi, "grow": grow, "init": init, "pre": pre, "mid": mid, "post": post}
    given = {"imports": imports, "more": more, "pages": pages, "ones": "\\ff" * 16384}
    return bytes(wasmtime.wat2wasm(_GUEST % (calls | given)))


def set_word(address: int, value: int) -> str:
    """Instructions that store a u32."""
    return f"(i32.store (i32.const {address}) (i32.const {value}))"


def call(name: str, *arguments: int) -> str:
    """Instructions that call an import. Its result remains on the stack."""
    return f"(call ${name} {' '.join(f'(i32.const {a})' for a in arguments)})"


def times(count: int, body: str) -> str:
    """Instructions that execute ``body`` ``count`` times. ``$i`` counts down from ``count``."""
    return (
        f"(local.set $i (i32.const {count})) (loop $again {body} "
        "(br_if $again (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))"
    )


def until_refused(grow: str) -> str:
    """Instructions that repeat ``grow`` (memory.grow or table.grow) until it returns -1."""
    return f"(loop $more (br_if $more (i32.ne {grow} (i32.const -1))))"


GROW = until_refused("(memory.grow (i32.const 1))")
"""Instructions that allocate all the memory that a guest can have."""

COUNTS = guest(
    mid=f"""(drop {call("var_append", 512, 4, 512, 1, -1, FREE)})
      (i32.store8 (i32.const {FREE + 1}) {call("var_get", 512, 4, FREE + 8, 1024, 0)})
      {call("log", FREE, 2)}"""
)
"""A guest that appends a byte to a variable in each round. It logs two bytes: the lowest bytes of
the variable's new version and new length."""
