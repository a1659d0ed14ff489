"""Hostile guests that write endless logs."""

from __future__ import annotations

import pytest

from .....worlds.hostile_guests import System
from .guests import FREE, GROW, WASI, call, guest, times

pytestmark = pytest.mark.process


def test_ten_gigabytes_of_log_are_counted_and_64_kib_kept(system: System) -> None:
    size = 64 * 1024 * 1024
    wasm = guest(init=GROW, mid=times(160, call("log", 0, size)))
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.finish_reason == "length"
    dropped = 160 * size - 65536
    assert sequence.logs.count(f"\n[{dropped} more bytes of log were dropped]\n") == 5
    assert len(sequence.logs) < 5 * 70_000


def test_ten_gigabytes_through_wasi_are_counted_too(system: System) -> None:
    # Each of 10 calls writes 16 buffers, each with the whole memory.
    size = 64 * 1024 * 1024
    pieces = f"""(local.set $i (i32.const 16)) (loop $again
      (i32.store (i32.add (i32.const {FREE}) (i32.mul (local.get $i) (i32.const 8)))
        (i32.const 0))
      (i32.store (i32.add (i32.const {FREE + 4}) (i32.mul (local.get $i) (i32.const 8)))
        (i32.const {size}))
      (br_if $again (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))"""
    wasm = guest(
        imports=WASI["fd_write"],
        init=GROW + pieces,
        mid=times(10, f"(drop {call('fd_write', 1, FREE + 8, 16, FREE)})"),
    )
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.finish_reason == "length"
    assert f"[{160 * size - 65536} more bytes of log were dropped]" in sequence.logs


def test_a_log_in_small_pieces_runs_out_of_time(system: System) -> None:
    error = system.fails(guest(mid=f"(loop $ever {call('log', 512, 1)} (br $ever))"))
    assert error.code == "controller_timeout"


def test_the_log_of_a_whole_stream_is_bounded(system: System) -> None:
    wasm = guest(mid=call("log", 0, 65536))
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name, max_tokens=100))
    assert len(sequence.tokens) == 100
    assert len(sequence.logs) < 2 * 1024 * 1024
