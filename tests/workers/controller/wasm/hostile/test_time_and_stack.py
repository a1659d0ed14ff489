"""Hostile guests that loop, recurse or trap, in each phase and many at once."""

from __future__ import annotations

import threading

import pytest
from tokenbus.clients import ControllerError

from .....worlds.hostile_guests import INIT_MS, System
from .guests import FREE, INBOX_SIZE, LIST, LOOP, RECURSE, N, call, guest, set_word

pytestmark = pytest.mark.process

INITIALIZE = f'(func (export "_initialize") {LOOP})'
START = "(func $begin %s) (start $begin)"
LOOPS = {
    "start": ({"more": START % LOOP}, INIT_MS),
    "_initialize": ({"more": INITIALIZE}, INIT_MS),
    "tokenbus_abi_v1": ({"abi": LOOP}, INIT_MS),
    "tokenbus_grow": ({"grow": LOOP}, INIT_MS),
    "init_prompt": ({"init": LOOP}, INIT_MS),
    "pre_process": ({"pre": LOOP}, 1),
    "mid_process": ({"mid": LOOP}, 20),
    "post_process": ({"post": LOOP}, 1),
}


@pytest.mark.parametrize("phase", LOOPS)
def test_an_endless_loop_is_stopped_in_each_phase(system: System, phase: str) -> None:
    calls, limit_ms = LOOPS[phase]
    # This argument does not fit into the inbox, so the inbox grows.
    error = system.fails(guest(**calls), controller_arg="x" * 5000 if "grow" in calls else "")
    assert type(error) is ControllerError
    assert error.code == "controller_timeout"
    assert error.message == f"{phase} ran for longer than its {limit_ms:g} ms"


@pytest.mark.parametrize(
    "body",
    [
        "(call $log (i32.const 0) (i32.const 0))",
        "(drop (call $var_get (i32.const 512) (i32.const 4) (i32.const 0) (i32.const 0) "
        "(i32.const 0)))",
        "(drop (call $tokenize (i32.const 0) (i32.const 60000) (i32.const 0) (i32.const 0)))",
        "(drop (call $trie_read (i32.const 0) (i32.const 0) (i32.const 4096)))",
    ],
    ids=["log", "var_get", "tokenize", "trie_read"],
)
def test_time_in_the_host_counts_too(system: System, body: str) -> None:
    error = system.fails(guest(mid=f"(loop $ever {body} (br $ever))"))
    assert error.code == "controller_timeout"
    assert error.message == "mid_process ran for longer than its 20 ms"


TOKENIZE_1_MIB = f"(drop {call('tokenize', 65_536, 1_048_576, 0, 0)})"


@pytest.mark.parametrize(
    ("phase", "calls", "limit_ms"),
    [
        ("init_prompt", {"init": TOKENIZE_1_MIB * 12, "pages": 20}, INIT_MS),
        ("pre_process", {"pre": "(drop (call $seq_id))" * 20_000}, 1),
        (
            "tokenbus_grow",
            {
                "pre": set_word(N, 2)
                + set_word(LIST, FREE)
                + set_word(INBOX_SIZE, 0)
                + "(return (i32.const 4))",
                "grow": LOOP,
            },
            1,
        ),
    ],
    ids=["large calls", "many calls", "an inbox that is too small"],
)
def test_time_in_the_host_counts_without_a_loop(
    system: System, phase: str, calls: dict[str, str], limit_ms: float
) -> None:
    """Ticks stop a guest in its loops and functions. These guests have neither."""
    error = system.fails(guest(**calls))
    assert (error.code, error.message) == (
        "controller_timeout",
        f"{phase} ran for longer than its {limit_ms:g} ms",
    )


@pytest.mark.parametrize(
    ("phase", "limit_ms", "most"), [("pre", 1, 16_384), ("mid", 20, 83_886), ("post", 1, 16_384)]
)
def test_a_text_that_takes_longer_than_the_call_is_not_tokenized(
    system: System, phase: str, limit_ms: int, most: int
) -> None:
    error = system.controller_error(guest(**{phase: TOKENIZE_1_MIB}, pages=20))
    assert error == (
        f"{phase}_process: the text to tokenize has 1048576 bytes; at most {most} are allowed in "
        f"a call of {limit_ms} ms"
    )


@pytest.mark.parametrize(
    ("phase", "calls"),
    [
        ("start", {"more": START % RECURSE}),
        ("tokenbus_abi_v1", {"abi": RECURSE}),
        ("init_prompt", {"init": RECURSE}),
        ("pre_process", {"pre": RECURSE}),
        ("mid_process", {"mid": RECURSE}),
        ("post_process", {"post": RECURSE}),
    ],
)
def test_an_endless_recursion_is_stopped_in_each_phase(
    system: System, phase: str, calls: dict[str, str]
) -> None:
    assert system.controller_error(guest(**calls)).startswith(
        f"{phase}: its stack of 524288 bytes overflowed, in recurse < recurse"
    )


@pytest.mark.parametrize(
    ("phase", "calls"),
    [
        ("start", {"more": START % "unreachable"}),
        ("tokenbus_abi_v1", {"abi": "unreachable"}),
        ("init_prompt", {"init": "unreachable"}),
        ("pre_process", {"pre": "unreachable"}),
        ("mid_process", {"mid": "unreachable"}),
        ("post_process", {"post": "unreachable"}),
    ],
)
def test_a_trap_is_reported_with_its_phase(
    system: System, phase: str, calls: dict[str, str]
) -> None:
    assert system.controller_error(guest(**calls)).startswith(f"{phase}: it trapped (unreachable")


def test_twelve_hostile_requests_at_once_hold_nobody_up(system: System) -> None:
    """The hostile requests use as much of the machine as they can, but the stream receives tokens
    meanwhile."""
    names = [system.upload(guest(**calls)) for calls, _ in LOOPS.values() if "grow" not in calls]
    ended: list[str] = []
    during: list[int] = []

    def one(name: str) -> None:
        with pytest.raises(ControllerError) as caught:
            system.run(name)
        ended.append(caught.value.code)

    def all_of_them() -> None:
        threads = [threading.Thread(target=one, args=(names[i % len(names)],)) for i in range(12)]
        before = system.neighbour.received
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        during.append(system.neighbour.received - before)

    system.undisturbed(all_of_them)
    assert ended == ["controller_timeout"] * 12
    # The hostile requests take seconds of CPU time. A stream that waited for them would get one or
    # two tokens.
    assert during[0] > 5
