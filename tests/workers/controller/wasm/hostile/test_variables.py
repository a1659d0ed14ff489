"""Hostile guests that fill the variables, or try to read those of other requests."""

from __future__ import annotations

import pytest

from .....worlds.hostile_guests import System
from .guests import FREE, GROW, call, guest, times

pytestmark = pytest.mark.process


def test_one_value_of_a_gigabyte_cannot_be_had(system: System) -> None:
    wasm = guest(init=GROW, mid=f"(drop {call('var_set', 512, 4, 0, 64 * 1024 * 1024, -1, 0)})")
    assert system.controller_error(wasm) == (
        "mid_process: the variable's value has 67108864 bytes; at most 1048576 are allowed"
    )


def test_a_gigabyte_by_appending_is_refused(system: System) -> None:
    append = times(1024, f"(drop {call('var_append', 512, 4, 0, 1048576, -1, 0)})")
    assert system.controller_error(guest(pages=32, init=append)) == (
        "init_prompt: it wrote 1048576 bytes to variables in one round; at most 131072 are allowed"
    )


def test_a_gigabyte_round_by_round_is_refused(system: System) -> None:
    wasm = guest(pages=32, mid=f"(drop {call('var_set', 512, 4, 0, 131072, -1, 0)})")
    assert system.controller_error(wasm, max_tokens=1024) == (
        "mid_process: the request's writes to variables, new prompts, scored texts, dropped "
        "tokens and looks have 16908288 bytes in all; at most 16777216 are allowed"
    )


def test_a_gigabyte_in_many_values_is_refused(system: System) -> None:
    # The names have two bytes, which count up. Each round uses a few names.
    body = f"""(global.set $kept (i32.add (global.get $kept) (i32.const 1)))
      (i32.store16 (i32.const 512) (i32.or (i32.const 0x4040) (i32.or
        (i32.and (global.get $kept) (i32.const 31))
        (i32.shl (i32.shr_u (global.get $kept) (i32.const 5)) (i32.const 8)))))
      (drop {call("var_set", 512, 2, 0, 32768, -1, 0)})"""
    error = system.controller_error(guest(mid=times(4, body)), max_tokens=1024)
    assert error.startswith("mid_process: 32768 bytes for '")
    assert "at most 8388608 are allowed" in error


def test_no_request_reads_the_variables_of_another(system: System) -> None:
    keeps = system.upload(guest(init=f"(drop {call('var_set', 512, 4, 520, 6, -1, 0)})"))
    reads = system.upload(
        guest(
            init=f"(local.set $i {call('var_get', 512, 4, FREE, 64, FREE + 64)})"
            "(if (i32.ne (local.get $i) (i32.const -1)) (then unreachable))"
            f"(if (i32.load (i32.const {FREE + 64})) (then unreachable))"
            f"(if (i32.load (i32.const {FREE})) (then unreachable))"
        )
    )
    own = system.upload(
        guest(
            init=f"(drop {call('var_set', 512, 4, 520, 6, -1, 0)})"
            f"(local.set $i {call('var_get', 512, 4, FREE, 64, 0)})"
            f"(call $log (i32.const {FREE}) (local.get $i))"
        )
    )
    assert system.run(own)[0].logs == "secret"

    def act() -> str | None:
        with system.client.generate("x", controller=keeps, max_tokens=400, ignore_eos=True) as one:
            next(iter(one))
            with system.bus.client() as other:
                seen = other.generate("x", controller=reads, max_tokens=2, ignore_eos=True)
                return seen.wait()[0].error or system.run(reads)[0].error

    assert system.undisturbed(act) is None


@pytest.mark.parametrize("name", ["var_get", "var_set", "var_append"])
def test_a_name_that_is_no_utf8_is_reported(system: System, name: str) -> None:
    rest = (8, 8, 0) if name == "var_get" else (8, 8, -1, 0)
    error = system.controller_error(guest(mid=f"(drop {call(name, 528, 3, *rest)})"))
    assert error.startswith("mid_process: the variable name is not UTF-8: ")
    assert "0xff" in error


@pytest.mark.parametrize("size", [0, 257, 60_000])
def test_a_name_of_a_wrong_length_is_reported(system: System, size: int) -> None:
    assert system.controller_error(guest(mid=f"(drop {call('var_get', 0, size, 8, 8, 0)})")) == (
        f"mid_process: the variable name has {size} bytes of UTF-8; a name has 1 to 256"
    )
