"""Attacks by answers and host calls that a controller must not make."""

from __future__ import annotations

from functools import partial

from ..workers.controller.wasm.aici_guests import puppet
from ..workers.controller.wasm.hostile.guests import (
    DROP,
    FREE,
    LIST,
    MASK_AT,
    N,
    call,
    guest,
    set_word,
)
from .attack import ENDS, Attack, Expected, fails

PAST = 70_000_000
LAST = 2**32 - 4
APPEND = "(return (i32.const 4))"
ONES = "(memory.fill (i32.const 0x10000) (i32.const 255) (i32.const 0x10000))"


def splice(drop: int, *tokens: int, count: int | None = None) -> str:
    """Code that drops ``drop`` tokens and appends ``tokens``. ``count``: the number of appended
    tokens that it claims; None for the right number."""
    stores = "".join(set_word(FREE + 4 * i, token) for i, token in enumerate(tokens))
    words = set_word(N, len(tokens) if count is None else count)
    return f"{stores} {words} {set_word(LIST, FREE)} {set_word(DROP, drop)} {APPEND}"


def answer(name: str, tries: str, says: str, **calls: str) -> Attack:
    """An attack by an answer that the host refuses. The error must match ``says``."""
    return Attack(name, tries, fails(says), partial(guest, **calls))


ATTACKS = (
    answer(
        "block-outside",
        "puts its call block outside its memory",
        "64 bytes at address",
        abi="(return (i32.const -4))",
    ),
    answer(
        "inbox-outside",
        "has the host write outside its memory",
        f"bytes at address {PAST}",
        abi=set_word(1028, PAST),
    ),
    answer(
        "mask-outside",
        "has the host read a mask outside its memory",
        "bytes at address",
        mid=set_word(MASK_AT, LAST),
    ),
    answer(
        "mask-over-the-end",
        "has a mask that ends outside its memory",
        "bytes at address 65500",
        mid=set_word(MASK_AT, 65_500),
    ),
    Attack(
        "mask-beyond-its-row",
        "sets bits beyond the vocabulary and its row",
        ENDS,
        partial(guest, pages=2, mid=ONES + set_word(MASK_AT, 0x10000)),
    ),
    answer(
        "mask-empty",
        "forbids all tokens",
        "forbid all possible tokens",
        mid=set_word(MASK_AT, FREE),
    ),
    answer(
        "append-2^32-1",
        "appends 2^32-1 tokens",
        "the controller appended 4294967295 tokens at once",
        pre=set_word(N, 2**32 - 1) + APPEND,
    ),
    answer(
        "append-outside",
        "appends tokens from outside its memory",
        "bytes at address",
        mid=set_word(N, 5) + set_word(LIST, 2**32 - 1) + APPEND,
    ),
    answer(
        "append-for-ever", "appends tokens and never samples", "without sampling", pre=splice(0, 65)
    ),
    answer(
        "splice-for-ever",
        "drops and appends the same tokens",
        "without sampling",
        mid=f"(if (global.get $kept) (then {splice(2, 65, 66)}))"
        f"(global.set $kept (i32.const 1)) {splice(0, 65, 66)}",
    ),
    answer(
        "token-outside",
        "appends a token that does not exist",
        "the controller appended token 4294967295",
        mid=splice(0, 65, 2**32 - 1),
    ),
    answer(
        "drop-2^32-1",
        "drops 2^32-1 tokens",
        "the splice drops 4294967295 tokens",
        mid=splice(2**32 - 1, 65),
    ),
    answer(
        "splice-nothing", "splices nothing for ever", "neither drops nor appends", mid=splice(0)
    ),
    answer(
        "action-unknown",
        "returns an action that does not exist",
        "mid_process returned 7",
        mid="(return (i32.const 7))",
    ),
    answer(
        "name-not-utf8",
        "names a variable with bytes that are not UTF-8",
        "not UTF-8",
        mid=f"(drop {call('var_get', 528, 3, 8, 8, 0)})",
    ),
    answer(
        "name-outside",
        "names a variable outside its memory",
        "bytes at address",
        mid=f"(drop {call('var_get', LAST, 8, 8, 8, 0)})",
    ),
    answer(
        "value-outside",
        "writes a variable from outside its memory",
        "bytes at address",
        mid=f"(drop {call('var_set', 512, 4, PAST, 8, -1, 0)})",
    ),
    Attack(
        "log-terminal",
        "logs control characters",
        ENDS,
        partial(
            guest,
            more='(data (i32.const 600) "\\1b[2J\\0d\\00\\ff\\fe\\0aERROR forged")',
            mid=call("log", 600, 24),
        ),
    ),
    Attack(
        "fail-long",
        "fails with a message of 60 kB",
        fails(),
        partial(guest, mid=call("fail", 0, 60_000)),
    ),
    Attack(
        "json-4-mib",
        "returns 4 MiB of JSON",
        fails("at most 1048576 bytes"),
        puppet,
        "mid fill 4194304",
    ),
    Attack(
        "json-1-mib",
        "returns a megabyte of nested lists",
        fails("lists and objects"),
        puppet,
        "mid fill 1000000",
    ),
    Attack(
        "json-nested",
        "returns JSON that is nested 50,000 times",
        fails("lists and objects"),
        puppet,
        'pre = {"x":' + "[" * 50_000,
    ),
    Attack(
        "json-numbers",
        "returns a number of 10,000 digits",
        fails("returned"),
        puppet,
        'mid = {"Splice":{"backtrack":' + "9" * 10_000 + ',"ff_tokens":[1]}}',
    ),
    Attack(
        "json-tokens",
        "appends 15,000 tokens in JSON",
        ENDS,
        puppet,
        'mid = {"Splice":{"backtrack":0,"ff_tokens":[' + ",".join(["65"] * 15_000) + "]}}",
    ),
    Attack(
        "json-garbage",
        "returns bytes that are not JSON",
        fails("expected"),
        puppet,
        "mid = \x00nonsense",
    ),
    Attack(
        "bias-outside",
        "has a mask outside its memory, by the ABI of AICI",
        fails(str(PAST)),
        puppet,
        f"mid poke return_logit_bias {PAST}",
    ),
    Attack(
        "blob-unknown",
        "reads a blob that does not exist",
        fails("does not exist"),
        puppet,
        "mid poke read_blob 4711 8 8",
    ),
    Attack("exit", "exits", fails("exited with code 3"), puppet, "mid poke proc_exit 3"),
    Attack("deaf", "gives no answer in a call", fails(), puppet, "mid silent"),
    Attack(
        "storage-garbage",
        "sends a storage command that is not valid",
        fails("storage command|missing|unknown"),
        puppet,
        "mid storage nonsense",
    ),
    Attack(
        "argument-large",
        "has an argument of 60 kB",
        Expected(("", "controller_failed")),
        puppet,
        "mid log " + "x" * 60_000,
    ),
)
