"""WASI as a guest calls it: which answers are empty, which are constant, and which calls are
refused."""

from __future__ import annotations

import pytest
import wasmtime
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm.host_functions import make_linker
from tokenbus.workers.controller.wasm.instance import Guest, Template
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.wasi import BADF, CHARACTER_DEVICE, CLOCK_NS, MODULE, OK, WASI

LIMITS = Limits()
TYPES = {"i": "i32", "I": "i64"}
REFUSED = sorted(
    name
    for module, name in WASI
    if name.startswith(("fd_", "path_", "sock_", "poll_", "proc_raise"))
    and name not in ("fd_write", "fd_fdstat_get", "fd_sync")
)
AT = 64
"""The address at which results are written."""


def called(name: str, *arguments: int) -> str:
    """The module of a guest that calls a function of WASI with these arguments."""
    function = WASI[MODULE, name]
    params = " ".join(TYPES[letter] for letter in function.params)
    numbers = " ".join(
        f"({TYPES[letter]}.const {number})"
        for letter, number in zip(function.params, arguments, strict=True)
    )
    return (
        f'(module (import "{MODULE}" "{name}" (func $f (param {params}) (result i32)))'
        f' (memory (export "memory") 1) (data (i32.const {AT}) "\\ff\\ff\\ff\\ff\\ff\\ff\\ff\\ff")'
        f' (func (export "run") (result i32) (call $f {numbers})))'
    )


@pytest.fixture(scope="module")
def engine() -> wasmtime.Engine:
    return make_engine(LIMITS)


class State:
    """The state of the host functions."""

    guest: Guest


def run(engine: wasmtime.Engine, name: str, *arguments: int) -> tuple[int, bytes]:
    """Calls a function of WASI; returns its result, and the 24 bytes at ``AT`` after the call."""
    module = wasmtime.Module(engine, bytes(wasmtime.wat2wasm(called(name, *arguments))))
    state = State()
    guest = state.guest = Guest(Template(make_linker(engine, WASI), module, engine), state, LIMITS)
    result = guest.call(guest.function("run"), 60.0, name)
    written = guest.read(AT, 24)
    guest.close()
    return result, written


@pytest.mark.parametrize("name", ["args_sizes_get", "environ_sizes_get"])
def test_there_are_no_arguments_and_there_is_no_environment(
    engine: wasmtime.Engine, name: str
) -> None:
    result, written = run(engine, name, AT, AT + 4)
    assert (result, written[:8]) == (OK, bytes(8))
    assert run(engine, name.replace("_sizes", ""), AT, AT)[0] == OK


def test_the_standard_streams_are_character_devices(engine: wasmtime.Engine) -> None:
    for descriptor in (0, 1, 2):
        result, written = run(engine, "fd_fdstat_get", descriptor, AT)
        assert (result, written) == (OK, bytes([CHARACTER_DEVICE]) + bytes(23))
    assert run(engine, "fd_fdstat_get", 3, AT)[0] == BADF


def test_random_bytes_are_zeros_and_the_clock_is_constant(engine: wasmtime.Engine) -> None:
    result, written = run(engine, "random_get", AT, 5)
    assert (result, written[:8]) == (OK, bytes(5) + b"\xff\xff\xff")
    for clock in (0, 1):
        result, written = run(engine, "clock_time_get", clock, 1, AT)
        assert (result, int.from_bytes(written[:8], "little")) == (OK, CLOCK_NS)


def test_yielding_and_syncing_succeed(engine: wasmtime.Engine) -> None:
    assert run(engine, "sched_yield")[0] == OK
    assert run(engine, "fd_sync", 1)[0] == OK


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_function_returns_bad_descriptor(engine: wasmtime.Engine, name: str) -> None:
    zeros = [0] * len(WASI[MODULE, name].params)
    assert run(engine, name, *zeros) == (BADF, b"\xff" * 8 + bytes(16))


def test_a_write_to_another_descriptor_is_refused(engine: wasmtime.Engine) -> None:
    assert run(engine, "fd_write", 3, AT, 0, AT)[0] == BADF
