"""Forks of modules that change their tables: a fork has the same elements in its own tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import wasmtime
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm import function_tables
from tokenbus.workers.controller.wasm.exported_state import with_exported_state
from tokenbus.workers.controller.wasm.host_functions import make_linker
from tokenbus.workers.controller.wasm.instance import Guest, Template
from tokenbus.workers.controller.wasm.native import FUNCTIONS
from tokenbus.workers.controller.wasm.sandbox import make_engine

from ....counts import examples

LIMITS = Limits()
SIZE = 8
"""Number of elements of the first table at the beginning."""
WAT = f"""
(module
  (import "tokenbus" "seq_id" (func $imported (result i32)))
  (type $gives (func (result i32)))
  (memory (export "memory") 1)
  (table $first {SIZE} funcref)
  (table $second 2 funcref)
  (elem (table $first) (i32.const 1) func $one $two $imported)
  (elem $passive funcref (ref.func $two) (ref.null func) (ref.func $three))
  (global $kept funcref (ref.func $four))
  (func $one (result i32) i32.const 1)
  (func $two (export "two") (result i32) i32.const 2)
  (func $three (result i32) i32.const 3)
  (func $four (result i32) i32.const 4)
  (func (export "call") (param i32) (result i32)
    (if (ref.is_null (table.get $first (local.get 0))) (then (return (i32.const -1))))
    (call_indirect $first (type $gives) (local.get 0)))
  (func (export "call_second") (param i32) (result i32)
    (call_indirect $second (type $gives) (local.get 0)))
  (func (export "clear") (param i32) (result i32)
    (table.set $first (local.get 0) (ref.null func)) i32.const 0)
  (func (export "keep") (param i32) (result i32)
    (table.set $first (local.get 0) (global.get $kept)) i32.const 0)
  (func (export "copy") (param i32) (result i32)
    (table.copy $first $first (local.get 0) (i32.const 1) (i32.const 2)) i32.const 0)
  (func (export "init") (param i32) (result i32)
    (table.init $first $passive (local.get 0) (i32.const 0) (i32.const 3)) i32.const 0)
  (func (export "fill") (param i32) (result i32)
    (table.fill $first (local.get 0) (ref.func $one) (i32.const 3))
    (table.copy $second $first (i32.const 0) (local.get 0) (i32.const 2)) i32.const 0)
  (func (export "grow") (param i32) (result i32)
    (table.grow $first (ref.func $three) (local.get 0))))
"""
OPERATIONS = ("clear", "keep", "copy", "init", "fill", "grow")


class State:
    """The state of the host functions."""

    class Host:
        seq = 77

    host = Host()


@pytest.fixture(scope="module")
def template() -> Template:
    engine = make_engine(LIMITS)
    module = wasmtime.Module(engine, with_exported_state(bytes(wasmtime.wat2wasm(WAT))))
    return Template(make_linker(engine, FUNCTIONS), module, engine)


@pytest.fixture
def guest(template: Template) -> Iterator[Guest]:
    made = Guest(template, State(), LIMITS)
    yield made
    made.close()


def call(guest: Guest, name: str, number: int) -> int:
    return guest.call_with(guest.function(name), 60.0, name, number)


def elements(guest: Guest, size: int) -> list[int]:
    return [call(guest, "call", at) for at in range(size)]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, SIZE - 3)), max_size=12),
    st.lists(st.tuples(st.sampled_from(OPERATIONS[:5]), st.integers(0, SIZE - 3)), min_size=1),
)
def test_a_fork_has_the_elements_of_its_parent_and_its_own_tables(
    template: Template, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    parent = Guest(template, State(), LIMITS)
    size = SIZE
    for name, number in before:
        call(parent, name, number)
        size += number if name == "grow" else 0
    expected = elements(parent, size)
    fork = parent.clone(State(), LIMITS)
    assert elements(fork, size) == expected
    for name, number in after:
        call(parent, name, number)
    assert elements(fork, size) == expected
    again = fork.clone(State(), LIMITS)
    assert elements(again, size) == expected
    for guest in (parent, fork, again):
        guest.close()


def test_every_table_and_every_kind_of_function_is_copied(guest: Guest) -> None:
    call(guest, "fill", 2)
    call(guest, "keep", 0)
    fork = guest.clone(State(), LIMITS)
    assert elements(fork, 6) == [4, 1, 1, 1, 1, -1]
    assert [call(fork, "call_second", at) for at in (0, 1)] == [1, 1]
    fresh = Guest(guest.template, State(), LIMITS).clone(State(), LIMITS)
    assert elements(fresh, 5) == [-1, 1, 2, 77, -1]


def test_a_table_that_has_grown_too_large_cannot_be_copied(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_tables, "MAX_TABLE_ELEMENTS", SIZE + 4)
    call(guest, "grow", 2)
    guest.clone(State(), LIMITS).close()
    call(guest, "grow", 1)
    with pytest.raises(ControllerError, match="forks with 13 elements in tables"):
        guest.clone(State(), LIMITS)
