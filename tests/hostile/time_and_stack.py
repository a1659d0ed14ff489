"""Attacks on the time of other streams: loops, recursion, host calls, slow rounds."""

from __future__ import annotations

from functools import partial

from ..workers.controller.wasm.aici_guests import puppet
from ..workers.controller.wasm.hostile.guests import (
    FREE,
    GROW,
    INBOX_SIZE,
    LIST,
    LOOP,
    RECURSE,
    WASI,
    N,
    call,
    guest,
    set_word,
    times,
)
from .attack import ENDS, TIMEOUT, Attack, Expected, fails
from .binary import MARKER, repeated

MANY = 4
"""Number of requests of an attack that sends several requests at the same time."""
WHOLE = 64 * 1024 * 1024
"""Maximum size of a guest's memory in bytes."""
FILL = f"(memory.fill (i32.const 65536) (i32.const 1) (i32.const {WHOLE - 65536}))"
COPY = f"(memory.copy (i32.const 65536) (i32.const 65537) (i32.const {WHOLE - 65537}))"
TOKENIZE = "(drop {})".format(call("tokenize", 65_536, 1_048_576, 0, 0))
TOKENIZE_HALF = "(drop {})".format(call("tokenize", 65_536, 524_288, 0, 0))
START = "(func $begin %s) (start $begin)"
NESTED = "".join(f"(loop $l{i} " for i in range(60)) + "(br $l0)" + ")" * 60
THROUGH_A_TABLE = """(type $f (func)) (table $t 1 funcref) (elem (i32.const 0) $again)
  (func $again (call_indirect $t (type $f) (i32.const 0)))"""
WIDE = f"(func $wide (local {'i64 ' * 5000}) (call $wide) (call $wide))"
GROW_INBOX = (
    set_word(N, 2) + set_word(LIST, FREE) + set_word(INBOX_SIZE, 0) + "(return (i32.const 4))"
)
OVERFLOW = fails("its stack of 524288 bytes overflowed")
SCRIPT = "async def main(ctx):\n    await ctx.fixed('a')\n    while True: pass"
"""A script in Python that never ends its first round."""
LATE = "(if (i32.eq (global.get $round) (i32.const 4)) (then %s))"
"""Instructions that execute the instructions given for ``%s``, but only in the fourth round."""


def host_calls(count: int) -> bytes:
    """A module that makes ``count`` host calls in code without a loop."""
    seq_id_and_drop = b"\x10\x02\x1a"
    return repeated(guest(pre=MARKER), seq_id_and_drop, count)


def clock() -> bytes:
    """A guest that fails if the clock of WASI advances during a loop."""
    now = "(drop (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const {})))"
    first, second = FREE, FREE + 8
    same = f"(i64.eq (i64.load (i32.const {first})) (i64.load (i32.const {second})))"
    body = now.format(first) + times(100_000, "nop") + now.format(second)
    return guest(
        imports=WASI["clock_time_get"], mid=f"{body} (if (i32.eqz {same}) (then unreachable))"
    )


def randomness() -> bytes:
    """A guest that fails if the random bytes of WASI are not zeros."""
    get = f"(drop (call $random_get (i32.const {FREE}) (i32.const 8)))"
    test = f"(if (i64.ne (i64.load (i32.const {FREE})) (i64.const 0)) (then unreachable))"
    return guest(imports=WASI["random_get"], init=get + test)


def loop(name: str, tries: str, **calls: str) -> Attack:
    """An attack by an endless loop in one call."""
    arg = "x" * 5000 if "grow" in calls else ""
    return Attack(f"loop-{name}", tries, TIMEOUT, partial(guest, **calls), arg)


ATTACKS = (
    loop("start", "never ends its start function", more=START % LOOP),
    loop("initialize", "never ends _initialize", more=f'(func (export "_initialize") {LOOP})'),
    loop("abi", "never ends tokenbus_abi_v1", abi=LOOP),
    loop("grow", "never ends tokenbus_grow", grow=LOOP),
    loop("init", "never ends init_prompt", init=LOOP),
    loop("pre", "never ends pre_process", pre=LOOP),
    loop("mid", "never ends mid_process", mid=LOOP),
    loop("post", "never ends post_process", post=LOOP),
    loop("late", "behaves for three rounds, then never ends", mid=LATE % LOOP),
    loop("nested", "has 59 other loops within the endless loop", mid=NESTED),
    Attack("loops-together", "uses all threads", TIMEOUT, partial(guest, init=LOOP), requests=MANY),
    Attack("loops-script", "never ends a round", TIMEOUT, "pyctrl-latest", SCRIPT, requests=MANY),
    loop(
        "inbox",
        "never ends tokenbus_grow, and has a pre_process that sets the inbox size to 0",
        pre=GROW_INBOX,
        grow=LOOP,
    ),
    Attack(
        "aici-loop",
        "never ends mid_process, as a module of the AICI ABI",
        TIMEOUT,
        puppet,
        "mid loop",
    ),
    Attack(
        "recursion-start", "overflows the stack", OVERFLOW, partial(guest, more=START % RECURSE)
    ),
    Attack("recursion-init", "overflows the stack", OVERFLOW, partial(guest, init=RECURSE)),
    Attack("recursion-post", "overflows the stack", OVERFLOW, partial(guest, post=RECURSE)),
    Attack(
        "recursion-table",
        "overflows the stack by calls through a table",
        OVERFLOW,
        partial(guest, more=THROUGH_A_TABLE, mid="(call $again)"),
    ),
    Attack(
        "recursion-wide",
        "jumps over the guard of the stack with frames of 40 kB",
        OVERFLOW,
        partial(guest, more=WIDE, mid="(call $wide)"),
    ),
    Attack(
        "million-host-calls",
        "calls the host a million times without a loop",
        Expected(("controller_timeout", "invalid_field")),
        partial(host_calls, 1_000_000),
    ),
    Attack(
        "many-host-calls",
        "calls the host 100,000 times without a loop",
        TIMEOUT,
        partial(host_calls, 100_000),
    ),
    Attack(
        "host-calls-log",
        "calls a short host function in an endless loop",
        TIMEOUT,
        partial(guest, mid=f"(loop $ever {call('log', 0, 0)} (br $ever))"),
    ),
    Attack(
        "host-calls-trie",
        "copies a part of the token trie in an endless loop",
        TIMEOUT,
        partial(guest, mid=f"(loop $ever (drop {call('trie_read', 0, 0, 4096)}) (br $ever))"),
    ),
    Attack(
        "host-calls-tokenize",
        "tokenizes half a megabyte 20 times",
        TIMEOUT,
        partial(guest, init=TOKENIZE_HALF * 20, pages=20),
    ),
    Attack(
        "tokenize-in-a-round",
        "tokenizes a megabyte in post_process, whose limit is a millisecond",
        fails("the text to tokenize has 1048576 bytes"),
        partial(guest, post=TOKENIZE, pages=20),
    ),
    Attack(
        "bulk-fill",
        "fills 64 MiB 200 times without a loop",
        TIMEOUT,
        partial(guest, init=GROW, mid=FILL * 200),
    ),
    Attack(
        "bulk-copy",
        "moves 64 MiB 1,000 times without a loop",
        TIMEOUT,
        partial(guest, init=GROW + COPY * 1000),
    ),
    Attack(
        "bulk-table",
        "fills a table of 100,000 elements 2,000 times without a loop",
        TIMEOUT,
        lambda: repeated(
            guest(more="(table $t 100000 funcref) (elem declare func $recurse)", mid=MARKER),
            # table.fill 0 (i32.const 0) (ref.null func) (i32.const 100000)
            b"\x41\x00\xd0\x70\x41\xa0\x8d\x06\xfc\x11\x00",
            2_000,
        ),
    ),
    Attack(
        "almost-too-slow",
        "uses most of the time limit of each mid_process, and ends",
        ENDS,
        partial(guest, mid=times(2_000_000, "nop")),
    ),
    Attack("clock", "measures time with the clock of WASI", ENDS, clock),
    Attack("randomness", "looks for random bytes", ENDS, randomness),
)
