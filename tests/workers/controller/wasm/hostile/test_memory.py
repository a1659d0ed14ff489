"""Hostile guests that take all the memory and all the tables that they can."""

from __future__ import annotations

import pytest

from .....worlds.hostile_guests import System
from .guests import FREE, GROW, MASK_AT, call, guest, set_word, until_refused

pytestmark = pytest.mark.process

FORK_ONCE = """(if (i32.eq (global.get $round) (i32.const 1)) (then
    (i32.store (i32.const 1056) (i32.const %d)) (return (i32.const 3))))"""
TOUCH = """(local.set $i (i32.const 0))
    (loop $again (i32.store8 (local.get $i) (i32.const 1))
      (local.set $i (i32.add (local.get $i) (i32.const 4096)))
      (br_if $again (i32.lt_u (local.get $i) (i32.mul (memory.size) (i32.const 65536)))))"""


def test_memory_ends_where_it_must_and_all_of_it_can_be_used(system: System) -> None:
    # Stores the final number of pages, which mid_process checks.
    keep = "(global.set $kept (memory.size))"
    wasm = guest(
        init=GROW + TOUCH + keep,
        mid=f"{set_word(MASK_AT, 0)} (if (i32.ne (global.get $kept) (i32.const 1024)) "
        "(then unreachable))",
    )
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert (sequence.finish_reason, sequence.error, len(sequence.tokens)) == ("length", None, 5)


def test_memory_beyond_the_end_is_not_there(system: System) -> None:
    beyond = "(i32.store8 (i32.mul (memory.size) (i32.const 65536)) (i32.const 1))"
    error = system.controller_error(guest(init=GROW + TOUCH + beyond))
    assert error.startswith("init_prompt: it reached outside its memory")


def test_an_allocator_that_aborts_without_memory_fails(system: System) -> None:
    abort = "(if (i32.eq (memory.grow (i32.const 65000)) (i32.const -1)) (then unreachable))"
    assert system.controller_error(guest(mid=abort)).startswith("mid_process: it trapped")


def test_a_hundred_forks_of_much_memory_are_refused(system: System) -> None:
    assert system.controller_error(guest(init=GROW + TOUCH, pre=FORK_ONCE % 100)) == (
        "the controller forks with a memory of 67108864 bytes; with this number of sequences in "
        "the request, each may have at most 10737418"
    )


def test_a_hundred_forks_cannot_each_take_much_memory(system: System) -> None:
    grow = "(if (i32.eq (memory.grow (i32.const 1000)) (i32.const -1)) (then %s))"
    name = system.upload(guest(pre=FORK_ONCE % 100, mid=grow % call("log", 512, 4)))
    sequences = system.undisturbed(lambda: system.run(name, max_tokens=2))
    assert [s.error for s in sequences] == [None] * 100
    # The first sequence has its own memory, which can grow once. The memory of a fork cannot grow.
    assert [s.logs for s in sequences] == ["name", *["namename"] * 99]


def test_a_fork_never_finds_what_another_has_left_in_its_memory(system: System) -> None:
    # A fork grows its memory, writes to it, and ends. The next fork gets the same memory.
    mid = f"""(if (call $seq_id) (then
      (if (i32.ne (memory.size) (i32.const 1)) (then unreachable))
      (if (i32.load (i32.const {FREE})) (then unreachable))
      (if (i32.ne (memory.grow (i32.const 1)) (i32.const 1)) (then unreachable))
      (i32.store (i32.const {FREE}) (i32.const 1))
      (if (i32.load (i32.const 65536)) (then unreachable))
      (i32.store (i32.const 65536) (i32.const 1))
      (return (i32.const 0))))"""
    name = system.upload(guest(pre=FORK_ONCE % 3, mid=mid))
    for _ in range(3):
        assert [s.error for s in system.run(name)] == [None] * 3


def test_a_module_that_begins_with_too_much_memory_is_refused(system: System) -> None:
    message = system.refusal(guest(pages=1025)).message
    assert message == (
        "the module's memory begins with 67174400 bytes; at most 67108864 are allowed"
    )


def test_a_table_ends_where_it_must(system: System) -> None:
    more = "(table $t 1 funcref) (type $f (func))"
    wasm = guest(
        more=more,
        init=until_refused("(table.grow $t (ref.null func) (i32.const 1000))")
        + "(global.set $kept (table.size $t))",
        mid="""(if (i32.or (i32.lt_u (global.get $kept) (i32.const 90000))
                          (i32.gt_u (global.get $kept) (i32.const 100000)))
                 (then unreachable))""",
        post="(call_indirect $t (type $f) (global.get $kept))",
    )
    assert system.controller_error(wasm).startswith("post_process: it reached outside a table")


def test_a_module_that_begins_with_a_large_table_is_refused(system: System) -> None:
    error = system.refusal(guest(more="(table 10000000 funcref)"))
    assert "10000000 elements" in error.message
    assert "100000" in error.message


def test_many_tables_are_refused(system: System) -> None:
    error = system.controller_error(guest(more="(table 100000 funcref)" * 90))
    assert error == "start: resource limit exceeded: table count too high at 90"
