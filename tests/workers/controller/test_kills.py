"""Processes die or clients disconnect while controllers steer streams. No stream hangs, and nothing
is left of an ended stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients import ControllerError
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller import variable_calls
from tokenbus.workers.controller.variable_calls import VariableCalls

from ...processes import Bus, Process, children, clean_environment, until
from ...worlds.killed_workers import (
    BOUND_S,
    PROMPT,
    Reader,
    System,
)

CLIENT = f"""
import sys
from tokenbus.clients import Client
with Client(sys.argv[1]) as client:
    while True:
        for _ in client.generate({PROMPT!r}, controller="calm", max_tokens=900, ignore_eos=True):
            print(end=".", flush=True)
"""
"""A client that reads streams until it is killed, and writes a byte for each token."""

PATIENT = """
import sys
from tokenbus.workers.controller import variable_calls
from tokenbus.workers.controller.__main__ import main
variable_calls.GIVE_UP_S = 3600.0
sys.exit(main())
"""
"""A controller worker whose guests wait for the state worker for up to an hour."""


@pytest.fixture(scope="module")
def system(processes: None) -> Iterator[System]:
    with Bus(heartbeat_s=0.2, session_grace_s=0.5, expiry_s=5) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        with bus.client() as client:
            yield System(bus, client)


# --- controller workers ---------------------------------------------------------------------------


def test_the_streams_of_a_killed_controller_worker_go_on_at_the_next_one(system: System) -> None:
    system.with_controllers(1)
    readers = system.streams(10, retry_s=0)
    system.controllers[0].kill()
    system.with_controllers(1)
    system.check_ends(*readers)
    system.wait_until_free()


def test_two_controller_workers_share_the_load_and_one_takes_over_the_others_part(
    system: System,
) -> None:
    system.with_controllers(2)
    # All guests wait for the state worker, so that no stream ends before the requests are counted.
    system.state.send(signal.SIGSTOP)
    try:
        readers = [Reader(system.stream("counts", retry_s=0)) for _ in range(12)]
        until(
            lambda: sorted(w.requests for w in system.of("controller")) == [6, 6],
            BOUND_S,
            "six requests at each worker",
        )
    finally:
        system.state.send(signal.SIGCONT)
    for reader in readers:
        assert reader.began.wait(BOUND_S), "a stream has not begun"
    system.controllers[0].kill()
    system.check_ends(*readers)
    system.wait_until_free()


def test_a_suspended_sequence_is_suspended_at_the_next_controller_worker_too(
    system: System,
) -> None:
    system.with_controllers(1)
    while True:
        [reader] = system.streams(1, "forks", retry_s=0, max_tokens=900)
        until(lambda r=reader: len(r.stream.sequences) == 2, BOUND_S, "two sequences")  # type: ignore[misc]
        system.controllers[0].kill()
        system.with_controllers(1)
        before = len(reader.tokens)
        if before < 800:
            break
        # The stream had almost ended when the worker was killed, so the test tries again.
        reader.stream.close()
    until(lambda: len(reader.tokens) > before + 5, BOUND_S, "the stream continues")
    assert len(reader.stream.sequences[1].tokens) <= 1
    reader.stream.close()
    system.wait_until_free()


# --- the state worker -----------------------------------------------------------------------------


def test_a_killed_state_worker_loses_no_write_and_doubles_none(system: System) -> None:
    system.with_controllers(1)
    [reader] = system.streams(1, "counts", max_tokens=100)
    until(lambda: len(reader.tokens) >= 20, BOUND_S, "20 tokens")
    system.state.kill()
    system.start_state()
    assert reader.end() is None
    [sequence] = reader.stream.sequences
    assert sequence.tokens == system.reference.tokens[:100]
    assert [ord(c) for c in sequence.logs] == [n for n in range(1, 101) for _ in range(2)]
    assert len(sequence.storage) == 100
    system.wait_until_free()


def test_guests_that_wait_for_the_state_worker_delay_no_other_stream(system: System) -> None:
    for worker in system.controllers:
        worker.kill()
    (system.bus.folder / "patient_controller.py").write_text(PATIENT)
    environment = system.bus.environment | {"TOKENBUS_CONTROLLER_THREADS": "2"}
    patient = Process("patient_controller", system.bus.folder / "patient.log", environment)
    system.bus.others.append(patient)
    system.controllers = [patient]
    until(lambda: [w.pid for w in system.of("controller")] == [patient.pid], BOUND_S, "the worker")
    long: dict[str, Any] = {"max_tokens": 1500, "timeout_s": 100 * BOUND_S}
    in_rounds = system.streams(4, "counts", **long)
    system.state.send(signal.SIGSTOP)
    try:
        _until_waiting(system, 4)
        assert system.stream(max_tokens=20).wait()[0].tokens == system.reference.tokens[:20]
        begun: list[int] = []

        def settled() -> bool:
            """Whether no token has arrived since the last call."""
            known, begun[:] = list(begun), [len(reader.tokens) for reader in in_rounds]
            return known == begun

        until(settled, BOUND_S, "no more tokens arrive")
        at_start = [Reader(system.stream("counts", **long)) for _ in range(12)]
        _until_waiting(system, 4 + 8)
        assert system.stream(max_tokens=20).wait()[0].tokens == system.reference.tokens[:20]
        assert [len(reader.tokens) for reader in in_rounds] == begun
        assert not any(reader.began.is_set() for reader in at_start)
    finally:
        system.state.send(signal.SIGCONT)
    for reader, tokens in zip([*in_rounds, *at_start], [*begun, *[0] * 12], strict=True):
        until(lambda r=reader, n=tokens: len(r.tokens) > n, BOUND_S, "a token")  # type: ignore[misc]
        reader.stream.close()
    system.wait_until_free()


def _until_waiting(system: System, guests: int) -> None:
    """Waits until at least this many guests wait for the state worker."""

    def enough() -> bool:
        return system.of("controller")[0].load.get("waiting", 0) >= guests

    until(enough, BOUND_S, f"{guests} guests wait")


def test_a_state_worker_that_stays_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_calls, "GIVE_UP_S", 1.0)
    posted: list[list[bytes]] = []
    calls = variable_calls.VariableCalls(lambda frames, link: posted.append(frames))
    with pytest.raises(ControllerError) as caught:
        calls.perform(Variable(1, 0, 1, "get", "name"))
    assert len(posted) == 2
    assert caught.value.code == "controller_failed"
    assert caught.value.message == (
        "the state worker did not answer within 1 s; variables need a running state worker"
    )


def test_an_attempt_that_ends_leaves_the_same_operation_of_the_next_attempt_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both attempts wait for the same operation. The second begins to wait before the first has
    stopped."""
    monkeypatch.setattr(variable_calls, "GIVE_UP_S", 60.0)
    operation = Variable(1, 0, 1, "get", "name")
    done = VariableAnswer(1, 0, 1, version=1)
    posted = threading.Event()
    calls = VariableCalls(lambda frames, link: posted.set())
    answers: list[VariableAnswer] = []
    later = threading.Thread(target=lambda: answers.append(calls.perform(operation)))

    def ended() -> bool:
        later.start()
        return posted.wait(BOUND_S)

    with pytest.raises(ControllerError, match="has ended"):
        calls.perform(operation, ended)
    calls.on_answer(encode_body(done, "msgpack"))
    later.join()
    assert answers == [done]


def test_an_attempt_that_has_ended_does_not_take_the_answer_of_the_next_attempt() -> None:
    """The next attempt already waits for the same operation when the ended one begins it."""
    operation = Variable(1, 0, 1, "get", "name")
    done = VariableAnswer(1, 0, 1, version=1)
    posted = threading.Event()
    calls = VariableCalls(lambda frames, link: posted.set())
    answers: list[VariableAnswer] = []
    later = threading.Thread(target=lambda: answers.append(calls.perform(operation)))
    later.start()
    assert posted.wait(BOUND_S)
    with pytest.raises(ControllerError, match="has ended"):
        calls.perform(operation, lambda: True)
    calls.on_answer(encode_body(done, "msgpack"))
    later.join()
    assert answers == [done]


def test_an_operation_that_may_succeed_later_is_sent_again_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variable_calls, "AGAIN_S", 0.01)
    monkeypatch.setattr(variable_calls, "GIVE_UP_S", 0.1)
    operation = Variable(1, 0, 1, "set", "name", b"x")
    full = VariableAnswer(1, 0, 1, error="the state worker cannot write its log", again=True)
    done = VariableAnswer(1, 0, 1, version=1, written=True)

    def perform(*answers: VariableAnswer) -> tuple[VariableCalls, list[list[bytes]]]:
        left, posted = list(answers), list[list[bytes]]()

        def post(frames: list[bytes], link: int) -> None:
            posted.append(frames)
            calls.on_answer(encode_body(left.pop(0) if len(left) > 1 else left[0], "msgpack"))

        calls = VariableCalls(post)
        return calls, posted

    calls, posted = perform(full, full, done)
    assert calls.perform(operation) == done
    assert len(posted) == 3
    calls, posted = perform(full)
    with pytest.raises(ControllerError, match="cannot write its log"):
        calls.perform(operation)
    assert len(posted) == 10


# --- clients --------------------------------------------------------------------------------------


def test_a_cancelled_stream_frees_its_controller_and_the_memory_of_it(system: System) -> None:
    system.with_controllers(1)
    pid = system.controllers[0].pid
    system.stream().wait()
    before = resident(pid)
    readers: list[Reader] = []

    def held() -> bool:
        """Whether the guests of six streams use their memory. If a stream has ended, closes all
        streams and begins six new ones first."""
        if not readers or any(reader.ended for reader in readers):
            for reader in readers:
                reader.stream.close()
            readers[:] = system.streams(6, "large", max_tokens=1500)
        return resident(pid) > before + 180 * 2**20

    until(held, BOUND_S, "the memory of six streams")
    for reader in readers:
        reader.stream.close()
    system.wait_until_free()
    until(lambda: resident(pid) < before + 80 * 2**20, BOUND_S, "the memory is free again")


def test_cancelling_frees_what_is_suspended_or_in_a_round(system: System) -> None:
    system.with_controllers(1)
    streams = [system.stream("forks", max_tokens=1500) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    # The next streams are cancelled while they begin.
    streams += [system.stream("calm") for _ in range(8)]
    for stream in streams:
        stream.close()
    system.wait_until_free()
    assert system.stream().wait()[0].tokens == system.reference.tokens


def test_a_client_that_disappears_frees_its_controllers(system: System) -> None:
    system.with_controllers(1)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, system.bus.front],
        env=clean_environment(),
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert len(client.stdout.read(10)) == 10
    # The client begins one stream after another.
    until(lambda: system.of("controller")[0].requests == 1, BOUND_S, "the client's stream")
    client.kill()
    client.wait()
    system.wait_until_free()


# --- the GPU worker -------------------------------------------------------------------------------


def test_the_streams_of_a_killed_gpu_worker_go_on_at_another(system: System) -> None:
    system.with_controllers(2)
    readers = system.streams(10, retry_s=0)
    suspended = system.streams(2, "forks", retry_s=0, max_tokens=1500)
    [killed] = system.bus.workers
    killed.kill()
    system.bus.workers.clear()
    system.bus.start_worker()
    system.check_ends(*readers)
    for reader in suspended:
        reader.stream.close()
    until(
        lambda: all(w.load.get("sessions") == 0 for w in system.of("controller")),
        BOUND_S,
        "no sequence has a controller",
    )
    system.wait_until_free()


def resident(pid: int) -> int:
    """The memory of a process and its descendants, in bytes. A page that several of these processes
    share counts for each of them."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, children(pid)))
