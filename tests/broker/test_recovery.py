"""Requests that arrive at a restarted broker before its workers have registered: they wait for
these workers, and are refused when the broker stops waiting."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Header, encode_header
from tokenbus.protocol.worker_messages import (
    ANY_MODULE,
    Heartbeat,
    Lost,
    Refused,
    Start,
    VocabularyName,
)

from ..worlds.broker import Bench, generate, peer_of

START = Start(
    controller="mine",
    prompt=[1],
    max_tokens=5,
    model="m",
    vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
)


@pytest.fixture
def bench() -> Bench:
    """A restarted broker. A heartbeat of a worker that was registered with the earlier broker has
    arrived."""
    made = Bench(recover_s=30.0)
    asked = made.send("known", "HEARTBEAT", Heartbeat())
    assert [message.frames[0] for message in asked] == [b"REREGISTER"]
    made.sent.clear()
    return made


def controller_worker(bench: Bench, name: str, *patterns: str) -> None:
    bench.worker(name, role="controller", patterns=[*patterns], default="", capacity=8)


def wait(bench: Bench, seconds: float, *workers: str) -> None:
    """Lets time pass in which these workers keep their leases."""
    for _ in range(int(seconds)):
        bench.pass_time(1.0)
        for name in workers:
            bench.send(name, "HEARTBEAT", Heartbeat())


def errors(answers: list[tuple[str, Any]]) -> dict[int, str]:
    return {body["stream_id"]: body["code"] for kind, body in answers if kind == "ERROR"}


def kinds(bench: Bench, worker: str) -> list[str]:
    return [kind for kind, _ in bench.to_worker(worker)]


def test_a_request_waits_for_the_workers_of_the_earlier_run(bench: Bench) -> None:
    [(kind, notice)] = bench.client("c", "GENERATE", generate(1))
    assert (kind, notice["event"], notice["place"]) == ("SYSTEM", "queued", 1)
    bench.client("c", "SCORE", {"stream_id": 2, "prompt": [1], "scored": [2], "model": "m"})
    bench.client("c", "TOKENIZER", {"stream_id": 3, "model": "m"})
    bench.pass_time(25.0)
    assert errors(bench.to_client("c")) == {}
    bench.worker("a", capacity=8)
    assert kinds(bench, "a") == ["GENERATE", "SCORE", "TOKENIZER"]


def test_it_is_refused_when_no_worker_is_awaited_any_more(bench: Bench) -> None:
    bench.client("c", "GENERATE", generate(1))
    bench.pass_time(29.5)
    assert errors(bench.to_client("c")) == {}
    bench.pass_time(1.0)
    assert errors(bench.to_client("c")) == {1: "no_worker"}
    assert errors(bench.client("c", "GENERATE", generate(2))) == {2: "no_worker"}
    assert bench.broker.state.requests == {}


def test_where_nothing_shows_an_earlier_run_it_waits_for_as_long_as_a_worker_may_be_silent() -> (
    None
):
    bench = Bench(recover_s=30.0, expiry_s=5.0)
    bench.client("c", "GENERATE", generate(1))
    bench.pass_time(4.5)
    assert errors(bench.to_client("c")) == {}
    bench.pass_time(1.0)
    assert errors(bench.to_client("c")) == {1: "no_worker"}


def begun(bench: Bench, *streams: int) -> None:
    """Begins requests with a controller, for which the GPU worker then sends START."""
    for stream in streams:
        bench.client("c", "GENERATE", generate(stream, controller="mine"))
    for kind, header in bench.to_worker("gpu"):
        assert kind == "GENERATE"
        bench.send("gpu", "START", START, Header(header.request))


def lost(bench: Bench) -> list[Lost]:
    """The messages to the GPU worker about controllers that cannot begin."""
    mine = [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of("gpu")]
    found = [message for message in mine if message.frames[0] == b"LOST"]
    return [msgspec.msgpack.decode(message.frames[2], type=Lost) for message in found]


def test_a_controller_is_awaited_for_no_longer_than_its_worker() -> None:
    bench = Bench(recover_s=30.0, expiry_s=5.0)
    bench.worker("gpu", capacity=8)
    begun(bench, 1, 2)
    wait(bench, 4, "gpu")
    assert lost(bench) == []
    wait(bench, 2, "gpu")
    assert [one.code for one in lost(bench)] == ["no_worker", "no_worker"]
    wanted = "no controller worker is running; if one is starting, try again in a moment"
    assert all(wanted in one.message for one in lost(bench))


def test_a_controller_whose_worker_registers_in_time_begins() -> None:
    bench = Bench(recover_s=30.0, expiry_s=5.0)
    bench.worker("gpu", capacity=8)
    begun(bench, 1)
    wait(bench, 4, "gpu")
    controller_worker(bench, "late", "*")
    assert kinds(bench, "late") == ["START"]
    wait(bench, 4, "gpu", "late")
    assert lost(bench) == []


def test_a_full_controller_worker_is_waited_for_longer() -> None:
    """The worker registers in time, but does not have room for all waiting controllers."""
    bench = Bench(recover_s=30.0, expiry_s=5.0)
    bench.worker("gpu", capacity=16)
    begun(bench, *range(1, 10))
    controller_worker(bench, "late", "*")
    assert kinds(bench, "late") == ["START"] * 8
    wait(bench, 10, "gpu", "late")
    assert lost(bench) == []


def test_where_nothing_shows_an_earlier_run_an_unknown_name_is_refused_at_once() -> None:
    bench = Bench(recover_s=30.0)
    bench.worker("gpu")
    assert errors(bench.client("c", "GENERATE", generate(1, model="n"))) == {1: "unknown_model"}
    controller_worker(bench, "other", "regex")
    refused = bench.client("c", "GENERATE", generate(2, controller="mine"))
    assert errors(refused) == {2: "unknown_controller"}


def test_a_client_that_comes_with_its_session_shows_an_earlier_run() -> None:
    bench = Bench(recover_s=30.0)
    hello = {"session": "0" * 32, "capabilities": ["recover"]}
    [(_, welcome)] = bench.client("d", "HELLO", hello)
    assert welcome["recovering"]
    bench.client("c", "GENERATE", generate(1))
    bench.pass_time(29.0)
    assert errors(bench.to_client("c")) == {}


def test_a_model_whose_worker_has_not_registered_yet_is_not_unknown(bench: Bench) -> None:
    bench.worker("a", patterns=["m"])
    bench.client("c", "GENERATE", generate(1, model="n"))
    bench.client("c", "GENERATE", generate(2, model="o"))
    wait(bench, 10.0, "a")
    bench.worker("b", patterns=["n"], default="n")
    assert kinds(bench, "b") == ["GENERATE"]
    wait(bench, 21.0, "a", "b")
    assert errors(bench.to_client("c")) == {2: "unknown_model"}
    assert kinds(bench, "a") == []


def test_a_request_after_the_loss_of_all_workers_waits_for_them() -> None:
    """A broker that was stopped loses all workers at once, because their connections have
    closed."""
    bench = Bench(expiry_s=5.0)
    for name in ("a", "b"):
        bench.worker(name, capacity=8)
        bench.sent += bench.broker.on_gone(Side.BACK, peer_of(name), bench.now)
    for stream in (1, 2):
        [(kind, notice)] = bench.client("c", "GENERATE", generate(stream))
        assert (kind, notice["event"]) == ("SYSTEM", "queued")
    bench.worker("a", capacity=8)
    assert kinds(bench, "a") == ["GENERATE", "GENERATE"]
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    bench.client("c", "GENERATE", generate(3))
    bench.pass_time(4.5)
    assert errors(bench.to_client("c")) == {}
    bench.pass_time(1.0)
    assert errors(bench.to_client("c")) == {3: "no_worker"}
    assert errors(bench.client("c", "GENERATE", generate(4))) == {4: "no_worker"}


def test_an_unknown_model_is_refused_at_once_after_the_loss_of_a_controller_worker() -> None:
    bench = Bench(expiry_s=60.0)
    bench.worker("gpu", patterns=["m"], default="m")
    controller_worker(bench, "python", "mine")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("python"), bench.now)
    assert errors(bench.client("c", "GENERATE", generate(1, model="n"))) == {1: "unknown_model"}
    assert errors(bench.client("c", "GENERATE", generate(2, controller="mine"))) == {}


def test_what_waits_counts_as_queued() -> None:
    bench = Bench(recover_s=30.0, max_queued=1)
    bench.client("c", "GENERATE", generate(1))
    assert errors(bench.client("d", "GENERATE", generate(2))) == {2: "queue_full"}


def test_what_waits_ends_by_its_time_or_by_its_client(bench: Bench) -> None:
    bench.client("c", "GENERATE", generate(1, timeout_s=2.0))
    bench.client("c", "GENERATE", generate(2))
    [(_, [end])] = bench.client("c", "CANCEL", {"stream_id": 2})[-1:]
    assert (end["stream_id"], end["finish_reason"]) == (2, "cancelled")
    bench.pass_time(2.5)
    [(_, [end])] = [m for m in bench.to_client("c") if m[0] == "TOKEN"]
    assert (end["stream_id"], end["finish_reason"]) == (1, "timeout")
    bench.worker("a")
    assert kinds(bench, "a") == []


def test_a_worker_that_is_lost_again_leaves_what_waits_for_it_as_any_other(bench: Bench) -> None:
    bench.client("c", "GENERATE", generate(1))
    bench.client("c", "GENERATE", generate(2))
    bench.worker("a", capacity=1)
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    bench.pass_time(60.0)
    assert errors(bench.to_client("c")) == {}
    bench.worker("b", capacity=2)
    assert kinds(bench, "b") == ["GENERATE", "GENERATE"]


@pytest.mark.parametrize("others", [[], ["regex"]])
def test_a_controller_waits_for_its_worker(bench: Bench, others: list[str]) -> None:
    """Either no controller worker runs, or the only controller worker serves other controllers."""
    bench.worker("gpu")
    if others:
        controller_worker(bench, "other", *others)
    assert errors(bench.client("c", "GENERATE", generate(1, controller="mine"))) == {}
    [(kind, header)] = bench.to_worker("gpu")
    assert kind == "GENERATE"
    bench.send("gpu", "START", START, Header(header.request))
    wait(bench, 10.0, "gpu", *(["other"] if others else []))
    controller_worker(bench, "python", "mine")
    assert kinds(bench, "python") == ["START"]


def test_a_controller_that_no_worker_serves_is_refused_in_the_end(bench: Bench) -> None:
    bench.worker("gpu")
    controller_worker(bench, "other", "regex")
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("gpu")
    bench.send("gpu", "START", START, Header(header.request))
    bench.sent.clear()
    wait(bench, 31.0, "gpu", "other")
    lost = [m for m in bench.sent if m.peer == peer_of("gpu") and m.frames[0] == b"LOST"]
    [body] = [msgspec.msgpack.decode(message.frames[2], type=Lost) for message in lost]
    assert (body.requests, body.code) == ([header.request], "unknown_controller")


def test_a_name_goes_to_a_worker_for_modules_once_all_that_serve_it_may_have_registered(
    bench: Bench,
) -> None:
    bench.worker("gpu")
    controller_worker(bench, "any", ANY_MODULE)
    for stream in (1, 2):
        bench.client("c", "GENERATE", generate(stream, controller=f"mine {stream}"))
    for _, header in bench.to_worker("gpu"):
        bench.send("gpu", "START", START, Header(header.request))
    wait(bench, 1.0, "gpu", "any")
    assert kinds(bench, "any") == []
    controller_worker(bench, "python", "mine 1")
    assert kinds(bench, "python") == ["START"]
    wait(bench, 5.0, "gpu", "any")
    assert kinds(bench, "any") == ["START"]


def test_an_upload_waits_for_a_worker_that_takes_modules(bench: Bench) -> None:
    controller_worker(bench, "python", "mine")
    assert errors(bench.client("c", "UPLOAD", {"stream_id": 1})) == {}
    controller_worker(bench, "any", ANY_MODULE)
    assert kinds(bench, "any") == ["UPLOAD"]


@pytest.mark.parametrize("comes", [True, False])
def test_a_controller_that_a_worker_for_modules_does_not_know_waits_for_its_worker(
    bench: Bench, comes: bool
) -> None:
    """The worker that serves the controller needs longer than a lease to register."""
    bench.worker("gpu")
    controller_worker(bench, "any", ANY_MODULE)
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("gpu")
    bench.send("gpu", "START", START, Header(header.request))
    wait(bench, 10.0, "gpu", "any")
    assert kinds(bench, "any") == ["START"]
    refused = encode_body(Refused(type="START", unknown="unknown controller 'mine'"), "msgpack")
    body = encode_body(START, "msgpack")
    frames = [b"REFUSED", encode_header(header.request), refused, body, b"", b"1"]
    bench.sent += bench.broker.on_worker(peer_of("any"), frames, bench.now)
    assert kinds(bench, "any") == ["END"]
    wait(bench, 10.0, "gpu", "any")
    assert (kinds(bench, "any"), lost(bench)) == ([], [])
    if comes:
        controller_worker(bench, "python", "mine")
        assert kinds(bench, "python") == ["START"]
    wait(bench, 11.0, "gpu", "any", *(["python"] if comes else []))
    wanted = [] if comes else [("unknown_controller", "unknown controller 'mine'", "$.controller")]
    assert [(one.code, one.message, one.path) for one in lost(bench)] == wanted
    # Later requests are refused without a wait.
    bench.client("c", "GENERATE", generate(2, controller="yours"))
    [(_, header)] = [one for one in bench.to_worker("gpu") if one[0] == "GENERATE"]
    bench.send("gpu", "START", START, Header(header.request))
    frames[1] = encode_header(header.request)
    bench.sent += bench.broker.on_worker(peer_of("any"), frames, bench.now)
    assert lost(bench)[-1].requests == [header.request]
