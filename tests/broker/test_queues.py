"""Requests that wait for a worker start in the right order, and none of them waits forever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.header import Header
from tokenbus.protocol.messages import MAX_TIMEOUT_S, ModelInfo, Token
from tokenbus.protocol.worker_messages import Heartbeat, Register

from ..worlds.broker import Bench, generate, peer_of


@pytest.fixture
def bench() -> Bench:
    return Bench()


def started(bench: Bench, worker: str) -> list[int]:
    """The streams that a worker received since the last call, in order."""
    mine = [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of(worker)]
    bench.sent = [m for m in bench.sent if m not in mine]
    requests = [m for m in mine if m.frames[0] == b"GENERATE"]
    return [msgspec.json.decode(m.frames[2])["stream_id"] for m in requests]


def end(bench: Bench, worker: str, stream: int) -> None:
    """A worker ends the only running stream with the number ``stream``."""
    [request] = [
        r for r in bench.broker.state.requests.values() if r.stream_id == stream and r.worker
    ]
    entry = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop")
    bench.tokens(worker, Header(request.id, request.session.id), entry, final=True)


def beat(bench: Bench, worker: str, **fields: Any) -> None:
    bench.send(worker, "HEARTBEAT", Heartbeat(**fields))


def test_a_worker_whose_hung_step_ended_takes_what_waits_before_newcomers(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    beat(bench, "a", step_age_s=100.0)
    for stream in (1, 2):
        bench.client("c", "GENERATE", generate(stream))
    assert started(bench, "a") == []
    beat(bench, "a", step_age_s=0.01)
    bench.client("c", "GENERATE", generate(3))
    assert started(bench, "a") == [1, 2, 3]


def test_more_capacity_in_an_updated_registration_takes_what_waits(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    for stream in (1, 2, 3):
        bench.client("c", "GENERATE", generate(stream))
    updated = Register(name="a", role="gpu", version=1, pid=1, host="h", capacity=3, patterns=["m"])
    updated.update = True
    bench.send("a", "REGISTER", updated)
    assert started(bench, "a") == [1, 2, 3]


def test_when_the_default_model_changes_its_new_worker_takes_what_waits(bench: Bench) -> None:
    info = {"vocab_size": 9, "context_length": 9, "eos_token_ids": [0], "fingerprint": ""}
    models = {name: ModelInfo(name=name, **info) for name in ("embedded", "big")}  # type: ignore[arg-type]
    bench.worker("e", capacity=1, models=[models["embedded"]], patterns=[], default="embedded")
    bench.worker("b", capacity=8, models=[models["big"]], patterns=[], default="big")
    for stream in (1, 2):
        bench.client("c", "GENERATE", {"stream_id": stream, "prompt": [1]})
    assert started(bench, "e") == [1]
    # Without the worker of "embedded", "big" is the only default model.
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("e"), bench.now)
    assert started(bench, "b") == [2]


def test_a_default_that_becomes_ambiguous_refuses_what_waits_for_it(bench: Bench) -> None:
    bench.worker("a", capacity=1, default="m")
    for stream in (1, 2):
        bench.client("c", "GENERATE", {"stream_id": stream, "prompt": [1]})
    bench.worker("b", patterns=["n"], default="n")
    [error] = [body for kind, body in bench.to_client("c") if kind == "ERROR"]
    assert (error["code"], error["stream_id"]) == ("unknown_model", 2)


def test_models_that_share_a_worker_take_turns(bench: Bench) -> None:
    bench.worker("a", capacity=1, patterns=["*"], default="")
    bench.client("c", "GENERATE", generate(1, model="x"))
    for stream in (2, 3, 4):
        bench.client("c", "GENERATE", generate(stream, model="x"))
    for stream in (5, 6):
        bench.client("c", "GENERATE", generate(stream, model="y"))
    bench.client("c", "GENERATE", generate(7, model="y", priority=1))
    order = started(bench, "a")
    while bench.broker.state.requests:
        end(bench, "a", order[-1])
        order += started(bench, "a")
    assert order == [1, 7, 2, 5, 3, 6, 4]


def test_waiting_requests_are_bounded_in_bytes() -> None:
    bench = Bench(max_queued_bytes=1200)
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    bench.client("c", "GENERATE", generate(2, controller_arg="x" * 800))
    [(_, error)] = bench.client("c", "GENERATE", generate(3, controller_arg="x" * 800))
    assert (error["code"], error["stream_id"]) == ("queue_full", 3)
    end(bench, "a", 1)
    bench.to_client("c")
    assert bench.client("c", "GENERATE", generate(3, controller_arg="x" * 800))[0][0] == "SYSTEM"


def test_deadlines_go_with_their_requests(bench: Bench) -> None:
    bench.worker("a")
    deadlines = bench.broker.state.deadlines
    bench.client("c", "GENERATE", generate(0, timeout_s=2.0))
    for stream in range(1, 2000):
        bench.client("c", "GENERATE", generate(stream, timeout_s=3600.0))
        end(bench, "a", stream)
        bench.sent.clear()
    assert len(deadlines) < 200
    # The deadline of the request that has not ended is still in the table.
    bench.to_worker("a")
    bench.pass_time(2.5)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]


@pytest.mark.parametrize("kind", ["GENERATE", "SCORE"])
def test_a_timeout_beyond_the_maximum_is_refused_by_its_name(bench: Bench, kind: str) -> None:
    bench.worker("a")
    [(_, error)] = bench.client("c", kind, generate(1, timeout_s=MAX_TIMEOUT_S + 1))
    assert (error["code"], error["path"]) == ("invalid_field", "$.timeout_s")
    assert str(int(MAX_TIMEOUT_S)) in error["message"]
    frames = [kind.encode(), msgspec.msgpack.encode(generate(1, timeout_s=float("inf")))]
    [out] = bench.broker.on_client(peer_of("c"), frames, bench.now)
    assert msgspec.json.decode(out.frames[1])["path"] == "$.timeout_s"
    assert bench.client("c", kind, generate(1, timeout_s=MAX_TIMEOUT_S)) == []


def finish_reasons(bench: Bench) -> dict[int, str]:
    """The finish reasons of the streams of client ``c``, from its TOKEN entries."""
    entries = [entry for kind, body in bench.to_client("c") if kind == "TOKEN" for entry in body]
    return {e["stream_id"]: e["finish_reason"] for e in entries}


def test_a_worker_that_does_not_act_on_a_cancel_does_not_keep_the_client_waiting() -> None:
    bench = Bench(expiry_s=1000.0)
    bench.worker("a", capacity=8)
    bench.client("c", "GENERATE", generate(1, timeout_s=2.0))
    bench.client("c", "GENERATE", generate(2, timeout_s=900.0))
    bench.client("c", "GENERATE", generate(3))
    beat(bench, "a", step_age_s=50.0)
    bench.client("c", "CANCEL", {"stream_id": 2})
    bench.pass_time(9.0)
    assert finish_reasons(bench) == {}
    bench.pass_time(4.0)
    assert finish_reasons(bench) == {1: "timeout", 2: "cancelled"}
    # The ended requests count towards the worker's load until the worker reports their ends.
    [worker] = bench.broker.state.workers.values()
    assert len(worker.requests) == 3


def test_a_cancel_that_a_worker_answers_is_answered_once(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1, timeout_s=900.0))
    bench.client("c", "CANCEL", {"stream_id": 1})
    end(bench, "a", 1)
    assert finish_reasons(bench) == {1: "stop"}
    bench.pass_time(20.0)
    assert bench.to_client("c") == []
