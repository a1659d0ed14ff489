"""Hostile guests that pass addresses outside their memory to imports."""

from __future__ import annotations

import pytest
from tokenbus.clients import ControllerError

from .....worlds.hostile_guests import System
from .guests import COUNT, LIST, MASK_AT, WASI, N, call, guest, set_word

pytestmark = pytest.mark.process

ADDRESSES = [65_534, 70_000_000, 2**32 - 1]
"""An address whose range crosses the end of a page, an address beyond the memory of any guest, and
the last address."""
POINTERS = {
    "log": ["log {} 4", "log 8 {}"],
    "fail": ["fail {} 4"],
    "tokenize": ["tokenize {} 4 8 4", "tokenize 512 {} 8 4", "tokenize 512 4 {} 4"],
    "trie_read": ["trie_read {} 0 4"],
    "var_get": ["var_get {} 4 8 8 0", "var_get 512 4 {} 8 0", "var_get 512 4 8 8 {}"],
    "var_set": [
        "var_set {} 4 8 8 -1 0",
        "var_set 512 4 {} 8 -1 0",
        "var_set 512 4 8 8 -1 {}",
    ],
    "var_append": [
        "var_append {} 4 8 8 -1 0",
        "var_append 512 4 {} 8 -1 0",
        "var_append 512 4 8 8 -1 {}",
    ],
    "fd_write": ["fd_write 1 {} 1 8", "fd_write 2 512 0 {}"],
    "fd_fdstat_get": ["fd_fdstat_get 1 {}"],
    "random_get": ["random_get {} 4", "random_get 8 {}"],
    "clock_res_get": ["clock_res_get 0 {}"],
    "args_sizes_get": ["args_sizes_get {} 8", "args_sizes_get 8 {}"],
    "environ_sizes_get": ["environ_sizes_get {} 8", "environ_sizes_get 8 {}"],
}
"""Calls of imports. ``{}`` is replaced by an address, or by a size with the same value."""


def test_pointers_out_of_bounds_are_told_of_by_every_import(system: System) -> None:
    bodies = []
    for name, calls in POINTERS.items():
        for pattern in calls:
            for address in ADDRESSES:
                _, *arguments = pattern.format(address).split()
                made = call(name, *map(int, arguments))
                bodies.append(
                    (pattern, address, made if name in ("log", "fail") else f"(drop {made})")
                )
    clock = "(drop (call $clock_time_get (i32.const 0) (i64.const 0) (i32.const {})))"
    bodies += [("clock_time_get", a, clock.format(a)) for a in ADDRESSES]
    # The argument is the number of the call: two characters after the prompt in the inbox.
    chosen = f"""(local.set $i (i32.add (i32.const 2048) (i32.mul (i32.const 4)
      (i32.load (i32.const {COUNT})))))
      (local.set $j (i32.add (i32.sub (i32.load8_u (local.get $i)) (i32.const 48))
        (i32.mul (i32.const 64) (i32.sub (i32.load8_u offset=1 (local.get $i)) (i32.const 48)))))"""
    set_name = f"(drop {call('var_set', 512, 4, 8, 8, -1, 0)})"
    cases = "\n".join(
        f"(if (i32.eq (local.get $j) (i32.const {i})) (then {body}))"
        for i, (_, _, body) in enumerate(bodies)
    )
    name = system.upload(guest(imports="\n".join(WASI.values()), init=set_name + chosen + cases))

    def every() -> list[str]:
        errors = []
        for i in range(len(bodies)):
            with pytest.raises(ControllerError) as caught:
                system.run(name, controller_arg=chr(48 + i % 64) + chr(48 + i // 64))
            errors.append(caught.value.message)
        return errors

    for (pattern, address, _), error in zip(bodies, system.undisturbed(every), strict=True):
        assert error.startswith("init_prompt: "), pattern
        if "8 {}" not in pattern or address > 65_534:
            assert str(address) in error, (pattern, address, error)
        assert "its memory ends at 65536" in error or "at most" in error, (pattern, error)


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ({"abi": "(return (i32.const -4))"}, "64 bytes at address 4294967292"),
        ({"abi": "(return (i32.const 65500))"}, "64 bytes at address 65500"),
        (
            {"abi": "(return (i32.const 1026))"},
            "returned the address 1026, which is not aligned to 4",
        ),
        ({"abi": set_word(1028, 70_000_000)}, "bytes at address 70000000"),
        ({"init": set_word(1028, 70_000_000)}, "4 bytes at address 70000000"),
        ({"init": set_word(1028, 65_534)}, "4 bytes at address 65534"),
        ({"mid": set_word(MASK_AT, 65_500)}, "512 bytes at address 65500"),
        ({"mid": set_word(MASK_AT, 65_532)}, "512 bytes at address 65532"),
        ({"mid": set_word(MASK_AT, 2**32 - 4)}, "512 bytes at address 4294967292"),
        (
            {"pre": set_word(N, 1) + set_word(LIST, 65_534) + "(return (i32.const 4))"},
            "4 bytes at address 65534",
        ),
        (
            {"mid": set_word(N, 5) + set_word(LIST, 2**32 - 1) + "(return (i32.const 4))"},
            "20 bytes at address 4294967295",
        ),
        (
            {"pre": set_word(N, 2**32 - 1) + "(return (i32.const 4))"},
            "the controller appended 4294967295 tokens at once",
        ),
    ],
)
def test_pointers_out_of_bounds_in_the_call_block_are_told_of(
    system: System, calls: dict[str, str], says: str
) -> None:
    error = system.controller_error(guest(**calls))
    assert says in error
    assert "its memory ends at 65536" in error or "aligned" in error or "are allowed" in error
