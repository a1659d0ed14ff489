"""Attacks on the memory of the machine, and attacks by forks, logs and variables."""

from __future__ import annotations

from functools import partial

from ..workers.controller.wasm.aici_guests import puppet
from ..workers.controller.wasm.hostile.guests import (
    FREE,
    GROW,
    LOOP,
    WASI,
    N,
    call,
    guest,
    set_word,
    times,
    until_refused,
)
from .attack import ENDS, TIMEOUT, Attack, Expected, fails, refused

PAGE = 4096
WHOLE = 64 * 1024 * 1024
FORK = "(if (i32.eq (global.get $round) (i32.const 1)) (then {} (return (i32.const 3))))"
"""Code that forks in the first round. ``{}`` is replaced by code that runs before the fork."""


def touch(first: str, step: str) -> str:
    """Code that grows to the largest memory and writes to each of its pages. ``first``: the first
    page. ``step``: the page after the page ``$i``, modulo the number of pages."""
    pages = WHOLE // PAGE
    return f"""{GROW} (local.set $i {first}) (local.set $j (i32.const {pages}))
      (loop $again
        (i32.store offset=2000 (i32.mul (local.get $i) (i32.const {PAGE})) (local.get $j))
        (local.set $i (i32.rem_u {step} (i32.const {pages})))
        (br_if $again (local.tee $j (i32.sub (local.get $j) (i32.const 1)))))"""


FORWARDS = touch("(i32.const 16)", "(i32.add (local.get $i) (i32.const 1))")
BACKWARDS = touch(
    f"(i32.const {WHOLE // PAGE - 1})", f"(i32.add (local.get $i) (i32.const {WHOLE // PAGE - 1}))"
)
# This guest writes to each page once, because the multiplier is 5 modulo 8 and the increment is
# odd.
AT_RANDOM = touch(
    "(i32.const 16)", "(i32.add (i32.mul (local.get $i) (i32.const 1229)) (i32.const 3))"
)
STRIDES = touch("(i32.const 16)", "(i32.add (local.get $i) (i32.const 4097))")


def forks(count: int) -> str:
    """Code that forks into ``count`` sequences in the first round."""
    return FORK.format(set_word(N, count))


def names(count: int) -> str:
    """Code that writes ``count`` variables in each round, with new names of two bytes."""
    body = f"""(global.set $kept (i32.add (global.get $kept) (i32.const 1)))
      (i32.store16 (i32.const 512) (i32.or (i32.const 0x4040) (i32.or
        (i32.and (global.get $kept) (i32.const 31))
        (i32.shl (i32.shr_u (global.get $kept) (i32.const 5)) (i32.const 8)))))
      (drop {call("var_set", 512, 2, 0, 32768, -1, 0)})"""
    return times(count, body)


READ = call("var_get", 512, 4, FREE, 64, 0)
WAKE = f"""(if (i32.gt_u (global.get $round) (i32.const 2))
  (then (drop {call("var_set", 512, 4, 8, 8, -1, 0)}) (return (i32.const 2))))"""
STORE = '{"WriteVar":{"name":"v","value":"%s","op":"Append"}}' % ("ab" * 20_000)

ATTACKS = (
    Attack("memory-forwards", "touches 64 MiB in order", ENDS, partial(guest, init=FORWARDS)),
    Attack("memory-backwards", "touches 64 MiB backwards", ENDS, partial(guest, init=BACKWARDS)),
    Attack(
        "memory-at-random", "touches 64 MiB in a random order", ENDS, partial(guest, init=AT_RANDOM)
    ),
    Attack(
        "memory-strides", "touches 64 MiB in strides of 16 MiB", ENDS, partial(guest, init=STRIDES)
    ),
    Attack(
        "memory-in-a-round",
        "touches 64 MiB in the first round",
        Expected(("", "controller_timeout")),
        partial(guest, mid=FORWARDS),
    ),
    Attack(
        "memory-page-by-page",
        "grows in each round",
        ENDS,
        partial(guest, mid="(drop (memory.grow (i32.const 16)))"),
        options={"max_tokens": 60},
    ),
    Attack(
        "memory-together",
        "has 64 MiB in each of four requests",
        ENDS,
        partial(guest, init=FORWARDS),
        requests=4,
    ),
    Attack(
        "memory-at-the-start",
        "begins with more than 64 MiB",
        refused("begins with 67174400 bytes"),
        partial(guest, pages=1025),
    ),
    Attack(
        "memory-beyond",
        "writes after its memory",
        fails("reached outside its memory"),
        partial(
            guest,
            init=GROW + "(i32.store8 (i32.mul (memory.size) (i32.const 65536)) (i32.const 1))",
        ),
    ),
    Attack(
        "memory-far",
        "writes at the address 8 GiB - 2",
        fails("reached outside its memory"),
        partial(guest, mid="(i32.store offset=4294967295 (i32.const -1) (i32.const 1))"),
    ),
    Attack(
        "table-large",
        "grows a table, and writes after its end",
        fails("outside a table"),
        partial(
            guest,
            more="(table $t 1 funcref)",
            mid=until_refused("(table.grow $t (ref.null func) (i32.const 1000))")
            + "(table.set $t (table.size $t) (ref.null func))",
        ),
    ),
    Attack(
        "tables",
        "has 90 tables of 100,000 elements",
        fails("table count too high"),
        partial(guest, more="(table 100000 funcref)" * 90),
    ),
    Attack("aici-memory", "grows, by the ABI of AICI", ENDS, puppet, "prompt grow\nmid log here"),
    Attack(
        "forks-2^32-1",
        "forks into 2^32-1 sequences",
        fails("4294967295 sequences; at most 128"),
        partial(guest, pre=set_word(N, 2**32 - 1) + "(return (i32.const 3))"),
    ),
    Attack(
        "forks-0",
        "forks into no sequence",
        ENDS,
        partial(guest, pre=set_word(N, 0) + "(return (i32.const 3))"),
    ),
    Attack(
        "fork-bomb",
        "doubles its sequences in each round",
        fails("at most 128 are allowed"),
        partial(guest, pre=set_word(N, 2) + "(return (i32.const 3))"),
        options={"max_tokens": 100},
    ),
    Attack(
        "forks-of-64-mib",
        "copies 64 MiB 100 times",
        fails("the controller forks with a memory of 67108864 bytes"),
        partial(guest, init=FORWARDS, pre=forks(100)),
    ),
    Attack(
        "forks-that-grow",
        "has 64 MiB in each of 100 forks",
        ENDS,
        partial(guest, pre=forks(100), mid="(drop (memory.grow (i32.const 1000)))"),
        options={"max_tokens": 2},
    ),
    Attack(
        "forks-that-loop",
        "never ends in each of 20 forks",
        TIMEOUT,
        partial(guest, pre=forks(20), mid=LOOP),
        options={"max_tokens": 2},
    ),
    Attack(
        "forks-aici",
        "forks into 1,000 sequences by the ABI of AICI",
        fails("at most 128"),
        puppet,
        'pre = {"attention_masks":[' + ",".join(["[]"] * 1000) + "]}",
    ),
    Attack(
        "forks-that-wait",
        "suspends every sequence for ever",
        fails("deadlock", "deadlock"),
        partial(guest, pre="(return (i32.const 2))"),
    ),
    Attack(
        "forks-that-wake",
        "wakes its sequences without sampling",
        fails("woke each other"),
        partial(
            guest,
            pre=forks(2) + WAKE,
        ),
        options={"max_tokens": 100},
    ),
    Attack(
        "log-gigabytes",
        "logs 10 GB in a call",
        Expected(says="more bytes of log were dropped"),
        partial(guest, init=GROW, mid=times(160, call("log", 0, WHOLE))),
    ),
    Attack(
        "log-each-round",
        "logs 64 KiB in each of 100 rounds",
        ENDS,
        partial(guest, mid=call("log", 0, 65536)),
        options={"max_tokens": 100},
    ),
    Attack(
        "log-bytes",
        "logs a byte at a time",
        TIMEOUT,
        partial(guest, mid=f"(loop $ever {call('log', 512, 1)} (br $ever))"),
    ),
    Attack(
        "log-wasi",
        "writes 64 MiB to the output of WASI",
        Expected(says="more bytes of log were dropped"),
        partial(
            guest,
            imports=WASI["fd_write"],
            init=GROW + set_word(FREE, 0) + set_word(FREE + 4, WHOLE),
            mid=f"(drop {call('fd_write', 1, FREE, 1, FREE + 8)})",
        ),
    ),
    Attack(
        "variables-gigabyte",
        "writes a gigabyte in a call",
        fails("bytes to variables in one round"),
        partial(
            guest,
            pages=32,
            init=times(1024, f"(drop {call('var_append', 512, 4, 0, 1048576, -1, 0)})"),
        ),
    ),
    Attack(
        "variables-each-round",
        "writes 128 KiB in each round",
        fails("the request's writes to variables, new prompts, scored texts, dropped tokens"),
        partial(guest, pages=32, mid=f"(drop {call('var_set', 512, 4, 0, 131072, -1, 0)})"),
        options={"max_tokens": 200},
    ),
    Attack(
        "variables-names",
        "writes four new variables in each round",
        fails("are allowed"),
        partial(guest, mid=names(4)),
        options={"max_tokens": 200},
    ),
    Attack(
        "variables-reads",
        "reads a variable of 64 KiB for ever",
        Expected(("controller_timeout", "controller_failed")),
        partial(
            guest,
            init=f"(drop {call('var_set', 512, 4, 0, 65536, -1, 0)})",
            mid=f"(loop $ever (drop {call('var_get', 512, 4, 0, 65536, 0)}) (br $ever))",
            pages=2,
        ),
    ),
    Attack(
        "variables-of-others",
        "reads the variables of other requests",
        ENDS,
        partial(
            guest,
            init=f"(if (i32.ne {READ} (i32.const -1)) (then unreachable))",
        ),
    ),
    Attack(
        "variables-aici",
        "appends 20 kB to a variable for ever",
        Expected(("controller_failed", "")),
        puppet,
        f"mid storage {STORE}",
    ),
)
