"""Draining workers hand their streams over if other workers can continue them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.broker.drains import MAX_ASKED
from tokenbus.protocol.header import Flag, Header
from tokenbus.protocol.messages import ModelInfo, Token
from tokenbus.protocol.worker_messages import Drain, Heartbeat, Unregister

from ..worlds.broker import Bench, generate
from .test_controllers import START, controller_worker


@pytest.fixture
def bench() -> Bench:
    return Bench(expiry_s=1000.0)


def kinds(bench: Bench, name: str) -> list[str]:
    return [kind for kind, _ in bench.to_worker(name)]


def begun(bench: Bench, worker: str, stream: int = 1, **fields: Any) -> Header:
    bench.client("c", "GENERATE", generate(stream, **fields))
    [(_, header)] = bench.to_worker(worker)
    return header


def events(bench: Bench) -> list[tuple[str, int]]:
    """The event and the stream of each message to the client, which must be a SYSTEM."""
    return [(body["event"], body["stream_id"]) for _, body in bench.to_client("c")]


def test_a_worker_that_drains_hands_its_streams_over(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.worker("b")
    bench.send("a", "DRAIN", Drain())
    assert kinds(bench, "a") == ["HANDOVER"]
    last = Token(token=1, stream_id=1, logprob=0.0, finish_reason=None)
    bench.tokens("a", header, last)
    bench.send("a", "UNREGISTER", Unregister(reason="the signal SIGTERM"))
    [(_, moved)] = bench.to_worker("b")
    assert moved.request == header.request
    assert moved.flags & Flag.MOVED


def test_a_worker_whose_system_ends_hands_over_to_another_machine_only(bench: Bench) -> None:
    bench.worker("a", host="one")
    begun(bench, "a")
    bench.worker("b", host="one")
    bench.send("a", "DRAIN", Drain(system_ends=True))
    assert kinds(bench, "a") == []
    bench.worker("c", host="two")
    assert kinds(bench, "a") == ["HANDOVER"]


def test_where_no_other_worker_is_there_it_keeps_them_until_one_registers(bench: Bench) -> None:
    bench.worker("a")
    begun(bench, "a")
    bench.send("a", "DRAIN", Drain())
    assert kinds(bench, "a") == []
    bench.worker("other model", patterns=["n"], default="n")
    assert kinds(bench, "a") == []
    bench.worker("b")
    assert kinds(bench, "a") == ["HANDOVER"]


def test_a_worker_that_has_a_successor_hands_over_though_it_is_the_only_one(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    assert kinds(bench, "a") == ["HANDOVER"]
    bench.send("a", "UNREGISTER", Unregister(reason="SIGTERM"))
    bench.worker("the next one")
    [(kind, moved)] = bench.to_worker("the next one")
    assert (kind, moved.request) == ("GENERATE", header.request)
    assert moved.flags & Flag.MOVED


def test_what_cannot_move_is_finished_before_a_successor_comes() -> None:
    bench = Bench(expiry_s=1000.0, max_journal_bytes=0)
    bench.worker("a")
    header = begun(bench, "a")
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    bench.pass_time(1.0)
    assert "HANDOVER" not in kinds(bench, "a")
    bench.tokens("a", header, final=True)
    assert bench.broker.state.requests == {}


def test_a_worker_hands_over_as_soon_as_what_cannot_move_has_ended(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a", stream=1)
    begun(bench, "a", stream=2)
    bench.broker.state.requests[header.request].frames = []
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    assert kinds(bench, "a") == []
    bench.tokens("a", header, final=True)
    bench.pass_time(1.0)
    assert "HANDOVER" in kinds(bench, "a")


def test_a_controller_worker_that_has_a_successor_hands_over_too(bench: Bench) -> None:
    bench.worker("gpu")
    controller_worker(bench, "a", "mine")
    header = begun(bench, "gpu", controller="mine")
    bench.send("gpu", "START", START, Header(header.request))
    assert kinds(bench, "a") == ["START"]
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    assert kinds(bench, "a") == ["HANDOVER"]
    bench.send("a", "UNREGISTER", Unregister(reason="SIGTERM"))
    assert kinds(bench, "gpu") == ["LOST"]
    bench.send("gpu", "START", START, Header(header.request))
    controller_worker(bench, "the next one", "mine")
    assert kinds(bench, "the next one") == ["START"]


def test_new_requests_wait_for_the_successor_of_the_only_controller_worker() -> None:
    """The successor needs longer than a lost worker to register, because it has to start."""
    bench = Bench(expiry_s=5.0, move_wait_s=120.0)
    bench.worker("gpu")
    controller_worker(bench, "a", "mine")
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    first = begun(bench, "gpu", stream=1, controller="mine")
    bench.send("gpu", "START", START, Header(first.request))
    assert events(bench) == [("queued", 1)]
    bench.send("a", "UNREGISTER", Unregister(reason="SIGTERM"))
    for _ in range(50):
        bench.pass_time(1.0)
        bench.send("gpu", "HEARTBEAT", Heartbeat())
    second = begun(bench, "gpu", stream=2, controller="mine")
    bench.send("gpu", "START", START, Header(second.request))
    assert events(bench) == [("queued", 2)]
    assert kinds(bench, "gpu") == []
    controller_worker(bench, "the next one", "mine")
    assert kinds(bench, "the next one") == ["START", "START"]
    [(_, error)] = bench.client("c", "GENERATE", generate(3, controller="other"))
    assert error["code"] == "unknown_controller"


def test_requests_that_no_successor_serves_do_not_wait_for_it() -> None:
    bench = Bench(expiry_s=5.0, move_wait_s=120.0)
    bench.worker("a", patterns=["m"], default="m", capacity=8)
    bench.worker("b", patterns=["n*"], default="m", capacity=8)
    controller_worker(bench, "c1", "mine")
    controller_worker(bench, "c2", "other")
    for name in ("b", "c2"):
        bench.send(name, "DRAIN", Drain(reason="SIGTERM", successor=True))
        bench.send(name, "UNREGISTER", Unregister(reason="SIGTERM"))
    [(_, error)] = bench.client("c", "GENERATE", generate(1, model="typo"))
    assert error["code"] == "unknown_model"
    [(_, error)] = bench.client("c", "GENERATE", generate(2, controller="typo"))
    assert error["code"] == "unknown_controller"
    [(_, notice)] = bench.client("c", "GENERATE", generate(3, model="n1"))
    assert notice["event"] == "queued"
    assert bench.client("c", "GENERATE", generate(4, controller="other")) == []


def test_a_request_for_a_model_does_not_wait_for_the_successor_of_a_controller_worker() -> None:
    bench = Bench(expiry_s=5.0, move_wait_s=120.0)
    bench.worker("gpu")
    controller_worker(bench, "a", "mine")
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    for name in ("a", "gpu"):
        bench.send(name, "UNREGISTER", Unregister(reason="SIGTERM"))
    bench.client("c", "GENERATE", generate(1))
    bench.pass_time(6.0)
    [(_, error)] = bench.to_client("c")
    assert error["code"] == "no_worker"


def test_where_all_workers_drain_streams_stay_with_one_of_them(bench: Bench) -> None:
    bench.worker("a")
    begun(bench, "a")
    bench.worker("b")
    bench.send("a", "DRAIN", Drain())
    assert kinds(bench, "a") == ["HANDOVER"]
    bench.send("b", "DRAIN", Drain())
    assert kinds(bench, "b") == []
    bench.send("a", "UNREGISTER", Unregister())
    assert kinds(bench, "b") == ["GENERATE"]
    bench.worker("d", capacity=8)
    assert kinds(bench, "b") == ["HANDOVER"]


def test_a_worker_is_handed_over_to_once_it_has_the_same_model(bench: Bench) -> None:
    info = ModelInfo(name="m", vocab_size=9, context_length=9, eos_token_ids=[0], fingerprint="one")
    bench.worker("a", models=[info])
    begun(bench, "a")
    bench.worker("b")
    bench.send("a", "DRAIN", Drain())
    assert kinds(bench, "a") == []
    bench.worker("b", models=[info])
    assert kinds(bench, "a") == ["HANDOVER"]


def test_a_controller_worker_hands_over_what_another_serves(bench: Bench) -> None:
    bench.worker("gpu")
    controller_worker(bench, "a", "mine")
    header = begun(bench, "gpu", controller="mine")
    bench.send("gpu", "START", START, Header(header.request))
    controller_worker(bench, "any")
    bench.send("a", "DRAIN", Drain())
    assert kinds(bench, "a") == ["START"]
    controller_worker(bench, "b", "mine")
    assert kinds(bench, "a") == ["HANDOVER"]
    bench.send("a", "UNREGISTER", Unregister())
    assert kinds(bench, "gpu") == ["LOST"]
    bench.send("gpu", "START", START, Header(header.request))
    assert kinds(bench, "b") == ["START"]


def test_a_client_that_drains_a_worker_is_answered_when_it_has_left(bench: Bench) -> None:
    bench.worker("a")
    begun(bench, "a")
    bench.worker("b")
    assert bench.client("operator", "DRAIN", {"stream_id": 5, "worker": "a"}) == []
    assert kinds(bench, "a") == ["DRAIN"]
    bench.send("a", "DRAIN", Drain(reason="the broker drains it"))
    assert bench.to_client("operator") == []
    bench.send("a", "UNREGISTER", Unregister())
    [(kind, answer)] = bench.to_client("operator")
    assert (kind, answer["stream_id"]) == ("MSG", 5)
    assert answer["result"] == {"worker": "a", "requests": 1}


def test_so_many_wait_for_the_end_of_a_worker_and_none_whose_session_has_ended(
    bench: Bench,
) -> None:
    bench.worker("a")
    for stream in range(MAX_ASKED):
        assert bench.client("impatient", "DRAIN", {"stream_id": stream, "worker": "a"}) == []
    [(_, error)] = bench.client("c", "DRAIN", {"stream_id": 1, "worker": "a"})
    assert error["code"] == "queue_full"
    bench.client("impatient", "BYE")
    assert bench.client("c", "DRAIN", {"stream_id": 1, "worker": "a"}) == []
    bench.send("a", "UNREGISTER", Unregister())
    assert bench.to_client("impatient") == []
    assert [kind for kind, _ in bench.to_client("c")] == ["MSG"]


def test_who_may_drain_what(bench: Bench) -> None:
    bench.worker("a")
    [(_, error)] = bench.client("c", "DRAIN", {"stream_id": 1, "worker": "z"})
    assert (error["code"], error["path"]) == ("invalid_field", "$.worker")
    assert "registered workers: a" in error["message"]
    [(_, error)] = bench.client("k", "DRAIN", {"stream_id": 1, "worker": "a"}, key="a tenant")
    assert error["code"] == "not_allowed"
    assert kinds(bench, "a") == []


def test_a_gateway_cannot_drain_a_worker(bench: Bench) -> None:
    bench.worker("a")
    bench.client("g", "HELLO", {"capabilities": ["gateway"]})
    [(kind, error)] = bench.client("g", "DRAIN", {"stream_id": 1, "worker": "a"})
    assert (kind, error["code"]) == ("ERROR", "not_allowed")
    assert kinds(bench, "a") == []
    bench.client("local", "DRAIN", {"stream_id": 1, "worker": "a"})
    assert kinds(bench, "a") == ["DRAIN"]
