"""Two processes register as workers with the same name: the first process keeps the name while it
is alive and neither drains nor hangs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Drain, Heartbeat, Register

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check


@pytest.fixture
def bench() -> Bench:
    return Bench()


def register(bench: Bench, peer: str, process: int, **fields: Any) -> list[Outgoing]:
    """Registers a process with the name ``same``, as pid 1 of its container; returns the broker's
    messages to this process."""
    body = Register(
        name="same",
        role="gpu",
        version=1,
        pid=1,
        host="h",
        capacity=4,
        patterns=["m"],
        process=process,
        **fields,
    )
    out = bench.send(peer, "REGISTER", body)
    check(bench.broker)
    return [m for m in out if m.peer == peer_of(peer)]


def kinds(messages: list[Outgoing]) -> list[bytes]:
    return [m.frames[0] for m in messages]


def seconds(bench: Bench, number: int, *peers: str) -> list[Outgoing]:
    """Lets ``number`` seconds pass, in which these processes send heartbeats and register when the
    broker asks for it. Returns the answers to the registrations."""
    answers = []
    for _ in range(number):
        bench.pass_time(1.0)
        for peer in peers:
            out = bench.send(peer, "HEARTBEAT", Heartbeat())
            if b"REREGISTER" in kinds(out):
                answers += register(bench, peer, 10 + ord(peer))
    return answers


def holder(bench: Bench) -> str:
    [worker] = bench.broker.state.workers.values()
    return worker.peer.decode()[1:]


def test_two_living_processes_of_one_name_do_not_evict_each_other(bench: Bench) -> None:
    register(bench, "a", 10 + ord("a"))
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    register(bench, "b", 10 + ord("b"))
    answers = seconds(bench, 20, "a", "b")
    assert set(kinds(answers)) == {b"ERROR"}
    error = msgspec.msgpack.decode(answers[0].frames[2])
    assert "'same'" in error["message"]
    assert "process 1 on h" in error["message"]
    # The first process still runs the stream.
    assert holder(bench) == "a"
    assert bench.broker.state.counters.requests_moved == 0
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("a", header, end, final=True)
    assert [k for k, _ in bench.to_client("c")] == ["TOKEN"]


def test_a_process_that_was_restarted_gets_in_when_the_connection_of_the_last_has_closed(
    bench: Bench,
) -> None:
    register(bench, "a", 1)
    bench.client("c", "GENERATE", generate(1))
    bench.to_worker("a")
    # The broker has not noticed that the first connection has closed, so the new process waits.
    assert register(bench, "b", 2) == []
    out = bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    assert kinds([m for m in out if m.peer == peer_of("b")]) == [b"REGISTERED", b"GENERATE"]
    check(bench.broker)
    assert holder(bench) == "b"


def test_a_process_waits_for_one_whose_machine_is_gone(bench: Bench) -> None:
    register(bench, "a", 10 + ord("a"))
    assert register(bench, "b", 10 + ord("b")) == []
    assert kinds(seconds(bench, 4, "b")) == []
    seconds(bench, 3, "b")
    assert holder(bench) == "b"


def test_a_contender_that_is_gone_gets_no_name(bench: Bench) -> None:
    register(bench, "a", 1)
    register(bench, "b", 2)
    bench.broker.on_gone(Side.BACK, peer_of("b"), bench.now)
    bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    assert bench.broker.state.workers == {}


def test_the_same_process_on_a_new_connection_keeps_its_name_at_once(bench: Bench) -> None:
    register(bench, "a", 1)
    assert b"REGISTERED" in kinds(register(bench, "b", 1))
    assert holder(bench) == "b"


@pytest.mark.parametrize("state", ["drains", "hangs"])
def test_a_worker_that_drains_or_hangs_leaves_its_name(bench: Bench, state: str) -> None:
    register(bench, "a", 1)
    if state == "drains":
        bench.send("a", "DRAIN", Drain(reason="restart"))
    else:
        bench.send("a", "HEARTBEAT", Heartbeat(step_age_s=100.0))
    assert b"REGISTERED" in kinds(register(bench, "b", 2))
    # A process that hangs does not get the name of another process.
    assert register(bench, "a", 1, step_age_s=100.0) == []
    assert holder(bench) == "b"


def test_a_request_that_kills_containers_of_one_name_and_pid_is_quarantined(bench: Bench) -> None:
    """Each container's process has pid 1. Only the random number of the next process shows that the
    earlier process has died."""
    for process, peer in enumerate("abd", 1):
        register(bench, peer, process)
        if peer == "a":
            bench.client("c", "GENERATE", generate(1))
        bench.sent += bench.broker.on_gone(Side.BACK, peer_of(peer), bench.now)
    errors = [body["code"] for kind, body in bench.to_client("c") if kind == "ERROR"]
    assert errors == ["quarantined"]
