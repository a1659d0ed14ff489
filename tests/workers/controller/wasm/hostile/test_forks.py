"""Hostile guests that fork without end, or wait for each other."""

from __future__ import annotations

import pytest
from tokenbus.clients import ControllerError

from .....worlds.hostile_guests import System
from .guests import N, call, guest, set_word

pytestmark = pytest.mark.process


def test_twenty_million_forks_at_once_are_refused(system: System) -> None:
    wasm = guest(pre=set_word(N, 20_000_000) + "(return (i32.const 3))")
    assert system.controller_error(wasm) == (
        "the fork into 19999999 more sequences would give this request 20000000 sequences; at most "
        "128 are allowed"
    )


def test_a_fork_bomb_across_forks_is_refused(system: System) -> None:
    # In each of its rounds, each sequence forks into two.
    name = system.upload(guest(pre=set_word(N, 2) + "(return (i32.const 3))"))
    sequences = system.undisturbed(lambda: system.run(name, max_tokens=100))
    assert len(sequences) == 128
    assert {s.error for s in sequences} == {
        "the fork into 1 more sequences would give this request 129 sequences; at most 128 are "
        "allowed"
    }
    assert {s.code for s in sequences} == {"controller_failed"}


def test_sequences_that_wake_each_other_for_ever_are_stopped(system: System) -> None:
    fork = f"{set_word(N, 2)} (return (i32.const 3))"
    write = f"(drop {call('var_set', 512, 4, 8, 8, -1, 0)})"
    pre = f"""(if (i32.eq (global.get $round) (i32.const 1)) (then {fork}))
      (if (i32.gt_u (global.get $round) (i32.const 2)) (then {write} (return (i32.const 2))))"""
    name = system.upload(guest(pre=pre))
    sequences = system.undisturbed(lambda: system.run(name, max_tokens=100))
    assert {s.error for s in sequences} <= {
        f"the sequences of the request woke each other {n} times without sampling; a "
        "sequence that is woken must sample or stop now and then"
        for n in (401, 402)
    }


def test_a_deadlock_is_reported(system: System) -> None:
    error = system.fails(guest(pre="(return (i32.const 2))"))
    assert type(error) is ControllerError
    assert error.code == "deadlock"
    assert error.message == (
        "deadlock: all sequences of the request are suspended; they were woken 20 times in a row, "
        "and suspended again each time"
    )


def test_a_deadlock_of_forks_is_reported_by_each(system: System) -> None:
    fork = f"{set_word(N, 3)} (return (i32.const 3))"
    pre = f"""(if (i32.eq (global.get $round) (i32.const 1)) (then {fork}))
      (return (i32.const 2))"""
    name = system.upload(guest(pre=pre))
    sequences = system.undisturbed(lambda: system.run(name))
    assert [s.code for s in sequences] == ["deadlock"] * 3
