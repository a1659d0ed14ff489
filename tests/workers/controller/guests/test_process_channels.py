"""Requests to a guest process share its channels, which count towards its tenant's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import wasmtime
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.guest_memory import GuestMemory
from tokenbus.workers.controller.guests import process as process_module
from tokenbus.workers.controller.guests import remote
from tokenbus.workers.controller.guests.channel import AREA_BYTES, SHARED_BYTES, ChannelFiles
from tokenbus.workers.controller.guests.messages import Prompt
from tokenbus.workers.controller.guests.process import (
    MAX_CHANNELS,
    ChannelShares,
    GuestDied,
    GuestProcess,
)
from tokenbus.workers.controller.pool import Pool, locked
from tokenbus.workers.controller.wasm.compiled_modules import Loaded

from ....processes import until
from ..played import engine
from ..wasm.guests import compile_guest
from .remote_guests import CALM, Runtime, Sequence, running, stop

pytestmark = pytest.mark.process


def take(process: GuestProcess, count: int) -> None:
    """Takes ``count`` channels at the same time, and gives them back."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(process.channel())


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with running() as made:
        yield made


def test_the_watchdog_does_not_wait_for_a_process_that_takes_no_channels(runtime: Runtime) -> None:
    sequence = Sequence(runtime.program(CALM, "channels", "channels"))
    process = sequence.controller._process  # type: ignore[attr-defined]
    stop(sequence)
    ended = threading.Event()

    def take_all() -> None:
        with pytest.raises(GuestDied):
            take(process, MAX_CHANNELS)
        ended.set()

    threading.Thread(target=take_all, daemon=True).start()
    until(lambda: len(process._channels) > MAX_CHANNELS - 50, 60, "the channels are sent")
    killing = threading.Thread(target=process.kill, args=("the test is over",), daemon=True)
    killing.start()
    killing.join(60)
    assert not killing.is_alive()
    assert ended.wait(60)


def test_a_request_without_a_channel_leaves_its_slot_to_those_that_have_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "MAX_CHANNELS", 1)
    made = runtime.program(CALM, "one channel")
    one, two = Sequence(made), Sequence(made)
    process = one.controller._process  # type: ignore[attr-defined]
    pid = stop(one)
    pool = Pool(1)
    pool.submit([one.round])
    until(lambda: bool(process._running), 60, "the request has the channel")
    pool.submit([two.round])
    until(lambda: pool.waiting_jobs == 2, 60, "both requests wait")
    os.kill(pid, signal.SIGCONT)
    until(lambda: not pool.busy, 60, "both requests end")
    assert one.allowed() == two.allowed() == [2]
    pool.close()


def test_a_request_waits_for_a_channel_if_the_worker_has_no_descriptors(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runtime.program(CALM, "no descriptors")
    one, two = Sequence(made), Sequence(made)
    process = one.controller._process  # type: ignore[attr-defined]
    pid = stop(one)
    refused = threading.Event()

    def refuse() -> ChannelFiles:
        refused.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ChannelFiles, "make", refuse)
    with ThreadPoolExecutor(2) as pool:
        rounds = [pool.submit(one.round)]
        until(lambda: bool(process._running), 60, "the request has the channel")
        rounds.append(pool.submit(two.round))
        assert refused.wait(60)
        os.kill(pid, signal.SIGCONT)
        for each in rounds:
            each.result(60)
    assert one.allowed() == two.allowed() == [2]


def test_a_process_whose_end_is_not_reported_yet_takes_no_request(runtime: Runtime) -> None:
    sequence = Sequence(runtime.program(CALM, "unreported"))
    process = sequence.controller._process  # type: ignore[attr-defined]
    launcher = runtime.table._launcher
    os.kill(launcher.pid, signal.SIGSTOP)
    try:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GuestDied, match="its socket is closed"):
            take(process, MAX_CHANNELS)
        assert process.dead
    finally:
        os.kill(launcher.pid, signal.SIGCONT)
    sequence.round()
    assert sequence.allowed() == [2]


def test_the_memory_of_a_process_returns_to_its_tenant(runtime: Runtime) -> None:
    memory = GuestMemory(64 * 1024 * 1024)
    sequences: list[Sequence] = []
    with pytest.raises(ControllerError, match="a client may not use more memory than"):
        _fill(sequences, runtime, memory, 200)
    assert sequences
    process = sequences[0].controller._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGKILL)
    for sequence in sequences:
        sequence.controller.close()
    until(lambda: memory.used == 0, 60, "the memory of the process is free")


def test_the_channels_of_a_process_count_towards_the_memory_of_its_tenant(
    runtime: Runtime,
) -> None:
    memory = GuestMemory(8 * SHARED_BYTES + 16 * 1024 * 1024)
    sequence = Sequence(runtime.program(CALM, "counted"), memory=memory)
    process = sequence.controller._process  # type: ignore[attr-defined]
    before = memory.used
    with process.channel(), process.channel():
        assert memory.used == before + SHARED_BYTES
        waiting = threading.Event()

        def take_all() -> None:
            with contextlib.suppress(GuestDied):
                take(process, 9)
            waiting.set()

        threading.Thread(target=take_all, daemon=True).start()
        until(lambda: len(process._channels) >= 3, 60, "further channels")
        assert len(process._channels) < 9
        assert not waiting.is_set()
        process.kill("the test ends it")
        assert waiting.wait(60)
    sequence.controller.close()
    until(lambda: memory.used == 0, 60, "the memory of the process is free")


def test_a_long_message_that_a_process_does_not_read_occupies_no_slot(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tenants whose processes did not read long messages could occupy all slots for a
    minute."""
    monkeypatch.setattr(process_module, "MAX_WALL_S", 3600.0)
    sequence = Sequence(runtime.program(CALM, "does not read"))
    process = sequence.controller._process  # type: ignore[attr-defined]
    stop(sequence)
    pool = Pool(1)
    request = Prompt(1, [1 << 20] * AREA_BYTES)

    def send() -> None:
        with pytest.raises(GuestDied), process.channel() as channel:
            process.request(channel, request, 1.0)

    pool.submit([send])
    other = threading.Event()
    until(lambda: bool(process._running), 60, "the message is sent")
    pool.submit([other.set])
    try:
        assert other.wait(60)
    finally:
        process.kill("the test ends it")
    until(lambda: not pool.busy, 60, "the request ends")
    pool.close()


def test_calls_that_need_the_same_module_load_it_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call serialized the module, which may have 256 MiB, and sent it to the process."""
    compiled = wasmtime.Module(engine, compile_guest(CALM, "-Wno-unused-parameter"))
    loads: list[int] = []
    came = threading.Semaphore(0)

    def noted(lock: threading.Lock) -> contextlib.AbstractContextManager[None]:
        came.release()
        return locked(lock)

    def load() -> Loaded:
        loads.append(1)
        for _ in range(4):
            assert came.acquire(timeout=60), "not all calls need the module"
        return Loaded("native", compiled)

    monkeypatch.setattr(remote, "locked", noted)

    programs = [runtime.runtime.program("loads once", "module", load) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for each in pool.map(Sequence, programs):
            each.controller.close()
    assert len(loads) == 1


def test_tenants_share_the_descriptors_of_channels(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels keep their descriptors until their process ends. The calls of a few tenants could
    take all descriptors of the worker, and other tenants could not start a program."""
    monkeypatch.setattr(runtime.table, "_channels", ChannelShares(9))
    sequence = Sequence(runtime.program(CALM, "many calls", "shared"))
    process = sequence.controller._process  # type: ignore[attr-defined]
    ended = threading.Event()

    def take_all() -> None:
        with contextlib.suppress(GuestDied):
            take(process, 6)
        ended.set()

    threading.Thread(target=take_all, daemon=True).start()
    until(lambda: len(process._channels) == 5, 60, "the tenant has its share")
    others = [Sequence(runtime.program(CALM, f"other {n}", "shared")) for n in range(6)]
    for other in others:
        other.round()
        other.controller.close()
    assert len(process._channels) == 5
    assert not ended.is_set()
    process.kill("the test ends it")
    assert ended.wait(60)
    sequence.controller.close()
    for pid in runtime.table.pids():
        with contextlib.suppress(ProcessLookupError):  # The table may still have an ended process.
            os.kill(pid, signal.SIGKILL)
    until(lambda: runtime.table._channels._shares.total == 0, 60, "all channels are given back")


def _fill(sequences: list[Sequence], runtime: Runtime, memory: GuestMemory, count: int) -> None:
    """Appends new sequences until ``count`` are begun, or until the memory does not suffice."""
    program = runtime.program(CALM, "memory")
    sequences.extend(Sequence(program, memory=memory) for _ in range(count))
