"""The broker chooses controller workers, relays messages between workers, and reports the ends of
requests."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Header, decode_header, encode_header
from tokenbus.protocol.messages import MAX_MODULE_BYTES, Token
from tokenbus.protocol.worker_messages import (
    End,
    FetchModule,
    Heartbeat,
    LiveRequest,
    Lost,
    ModuleBytes,
    ModuleTable,
    Result,
    Start,
    Step,
    Variable,
    VocabularyName,
)

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check

START = Start(
    controller="mine",
    prompt=[1],
    max_tokens=5,
    model="m",
    vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
)
VARIABLE = Variable(1, 0, 1, "get", "x")


def controller_worker(bench: Bench, name: str, *patterns: str, capacity: int = 4) -> int:
    """Registers a controller worker; returns its id."""
    given = {"patterns": list(patterns or ["*"]), "default": "", "capacity": capacity}
    return bench.worker(name, role="controller", **given).worker


def begun(bench: Bench, stream: int = 1, **fields: Any) -> Header:
    """Begins a request, for which the GPU worker then sends START; returns the request's header."""
    bench.client("c", "GENERATE", generate(stream, controller="mine", **fields))
    [(_, header)] = [m for m in bench.to_worker("gpu") if m[0] == "GENERATE"]
    bench.send("gpu", "START", START, Header(header.request))
    return header


def bodies(bench: Bench, name: str, message_type: str, kind: Any) -> list[Any]:
    """The bodies of messages of one type to a worker."""
    mine = [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of(name)]
    found = [m for m in mine if m.frames[0] == message_type.encode()]
    return [msgspec.msgpack.decode(m.frames[2], type=kind) for m in found]


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.gpu = made.worker("gpu", capacity=8).worker  # type: ignore[attr-defined]
    return made


def test_without_a_controller_worker_the_request_is_refused_at_once(bench: Bench) -> None:
    [(kind, body)] = bench.client("c", "GENERATE", generate(1, controller="mine"))
    assert (kind, body["code"]) == ("ERROR", "no_worker")
    assert "controller worker" in body["message"]
    assert bench.client("c", "GENERATE", generate(1)) == []


def test_a_start_goes_to_the_least_filled_controller_worker_with_its_sender_and_the_tenant(
    bench: Bench,
) -> None:
    a, b = controller_worker(bench, "a"), controller_worker(bench, "b")
    bench.client("c", "GENERATE", generate(1, controller="mine"), key="tenant-key")
    [(_, header)] = bench.to_worker("gpu")
    [out] = bench.send("gpu", "START", START, Header(header.request))
    assert out.peer == peer_of("a")
    assert decode_header(out.frames[1]) == Header(header.request, bench.gpu)  # type: ignore[attr-defined]
    assert out.frames[3] == b"tenant-key"
    begun(bench, 2)
    workers = bench.broker.state.workers
    assert [len(workers[w].steers) for w in (a, b)] == [1, 1]


def test_one_that_serves_the_name_goes_before_those_that_take_any_module(bench: Bench) -> None:
    controller_worker(bench, "any")
    controller_worker(bench, "python", "mine")
    begun(bench)
    assert [w for w, _ in bench.to_worker("python")] == ["START"]
    assert bench.to_worker("any") == []


def test_an_unknown_controller_is_refused_with_the_names_that_are_served(bench: Bench) -> None:
    controller_worker(bench, "python", "other")
    [(kind, body)] = bench.client("c", "GENERATE", generate(1, controller="mine"))
    assert (kind, body["code"]) == ("ERROR", "unknown_controller")
    assert "other" in body["message"]


@pytest.mark.parametrize(("lost", "left"), [("mine", "*"), ("*", "other")])
def test_a_controller_whose_last_worker_was_lost_a_moment_ago_is_not_unknown(
    bench: Bench, lost: str, left: str
) -> None:
    """The remaining worker serves other controllers. It would refuse this controller, but the
    broker does not send it the START."""
    controller_worker(bench, "lost", lost)
    controller_worker(bench, "left", left)
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("gpu")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("lost"), bench.now)
    assert bench.client("c", "GENERATE", generate(2, controller="mine")) == []
    [(_, second)] = bench.to_worker("gpu")
    for request in (header.request, second.request):
        bench.send("gpu", "START", START, Header(request))
    bench.pass_time(1.0)
    assert bench.to_worker("left") == bench.to_worker("gpu") == []
    controller_worker(bench, "back", lost)
    assert [kind for kind, _ in bench.to_worker("back")] == ["START", "START"]


def test_a_new_request_for_such_a_controller_is_refused_in_the_end(bench: Bench) -> None:
    """The error is ``no_worker``, not ``unknown_controller``, so the client may send the request
    again."""
    controller_worker(bench, "lost", "mine")
    controller_worker(bench, "left", "*")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("lost"), bench.now)
    for _ in range(6):
        bench.pass_time(1.0)
        for name in ("gpu", "left"):
            bench.send(name, "HEARTBEAT", Heartbeat())
    [(kind, body)] = bench.client("c", "GENERATE", generate(1, controller="mine"))
    assert (kind, body["code"]) == ("ERROR", "no_worker")
    assert body["retry_after_s"] > 0


def test_a_controller_whose_last_worker_was_lost_long_ago_is_unknown() -> None:
    bench = Bench(move_wait_s=5.0)
    bench.worker("gpu", capacity=8)
    controller_worker(bench, "lost", "mine")
    controller_worker(bench, "left", "other")
    bench.broker.on_gone(Side.BACK, peer_of("lost"), bench.now)
    for _ in range(5):
        bench.pass_time(1.0)
        for name in ("gpu", "left"):
            bench.send(name, "HEARTBEAT", Heartbeat())
    [(kind, body)] = bench.client("c", "GENERATE", generate(1, controller="mine"))
    assert (kind, body["code"]) == ("ERROR", "unknown_controller")


def test_full_controller_workers_are_a_reason_to_try_later(bench: Bench) -> None:
    controller_worker(bench, "a", capacity=1)
    begun(bench)
    [(kind, body)] = bench.client("c", "GENERATE", generate(2, controller="mine"))
    assert (kind, body["code"]) == ("ERROR", "queue_full")
    assert body["retry_after_s"] > 0


def test_the_first_controller_of_another_client_gets_a_place_above_the_capacity() -> None:
    bench = Bench()
    bench.worker("gpu", capacity=99)
    controller_worker(bench, "a", capacity=16)
    for stream in range(16):
        assert not bench.client("ann", "GENERATE", generate(stream, controller="mine"), "a" * 64)
    [(_, error)] = bench.client("ann", "GENERATE", generate(16, controller="mine"), "a" * 64)
    assert error["code"] == "queue_full"
    bench.to_worker("gpu")
    assert not bench.client("ben", "GENERATE", generate(1, controller="mine"), "b" * 64)
    [(_, header)] = bench.to_worker("gpu")
    assert start(bench, header) == "a:START"
    # A client has one such place, until its request ends.
    [(_, error)] = bench.client("ben", "GENERATE", generate(2, controller="mine"), "b" * 64)
    assert error["code"] == "queue_full"
    ended(bench, 1, header)
    bench.to_client("ben")
    assert not bench.client("ben", "GENERATE", generate(2, controller="mine"), "b" * 64)
    # An eighth of the capacity is for such places, and half of it for users of clients.
    by_user = generate(1, controller="mine") | {"by": "user"}
    [(_, error)] = bench.client("cleo", "GENERATE", by_user, "c" * 64)
    assert error["code"] == "queue_full"
    assert not bench.client("cleo", "GENERATE", generate(1, controller="mine"), "c" * 64)
    [(_, error)] = bench.client("dan", "GENERATE", generate(1, controller="mine"), "d" * 64)
    assert error["code"] == "queue_full"
    check(bench.broker)


def test_a_message_between_workers_arrives_with_its_sender(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    begun(bench)
    bench.to_worker("a")
    gpu: int = bench.gpu  # type: ignore[attr-defined]
    bench.send("gpu", "STEP", Step(sequences=[]), Header(0, a))
    assert bench.to_worker("a") == [("STEP", Header(0, gpu))]
    bench.send("a", "RESULT", Result(sequences=[]), Header(0, gpu))
    assert bench.to_worker("gpu") == [("RESULT", Header(0, a))]


def test_attachments_and_bodies_are_relayed_as_they_are(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    frames = [b"STEP", encode_header(0, a), b"whatever this is", b"mask", b"mask"]
    [out] = bench.broker.on_worker(peer_of("gpu"), frames, bench.now)
    assert list(out.frames[2:]) == [b"whatever this is", b"mask", b"mask"]


def test_a_message_for_a_worker_that_is_gone_is_dropped(bench: Bench) -> None:
    assert bench.send("gpu", "STEP", Step(sequences=[]), Header(0, 12345)) == []


def test_variables_go_to_the_state_worker_and_their_answers_back(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    assert bench.send("a", "VARIABLE", VARIABLE, Header(1)) == []
    state = bench.worker("state", role="state", patterns=[], default="").worker
    bench.send("a", "VARIABLE", VARIABLE, Header(1))
    assert bench.to_worker("state") == [("VARIABLE", Header(1, a))]
    bench.send("state", "VARIABLE_ANSWER", [1, 0, 1], Header(1, a))
    assert bench.to_worker("a") == [("VARIABLE_ANSWER", Header(1, state))]


def test_tables_of_modules_go_to_the_state_worker_and_their_answers_back(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    table = ModuleTable(1, "ann")
    assert bench.send("a", "MODULE_TABLE", table) == []
    state = bench.worker("state", role="state", patterns=[], default="").worker
    bench.send("a", "MODULE_TABLE", table)
    assert bench.to_worker("state") == [("MODULE_TABLE", Header(0, a))]
    bench.send("state", "MODULE_TABLE_ANSWER", [1], Header(0, a))
    assert bench.to_worker("a") == [("MODULE_TABLE_ANSWER", Header(0, state))]


def test_who_has_a_module_is_asked_of_all_others_that_run_modules_and_then_of_one(
    bench: Bench,
) -> None:
    a, b, c = (controller_worker(bench, name) for name in "abc")
    controller_worker(bench, "python", "mine")
    asked = FetchModule(module="f" * 64)
    bench.send("a", "FETCH_MODULE", asked)
    assert bench.to_worker("b") == bench.to_worker("c") == [("FETCH_MODULE", Header(0, a))]
    assert bench.to_worker("a") == bench.to_worker("python") == []
    bench.send("c", "MODULE_BYTES", ModuleBytes(module=asked.module), Header(0, a))
    assert bench.to_worker("a") == [("MODULE_BYTES", Header(0, c))]
    bench.send("a", "FETCH_MODULE", FetchModule(module=asked.module, send=True), Header(0, b))
    assert bench.to_worker("b") == [("FETCH_MODULE", Header(0, a))]
    assert bench.to_worker("c") == []


def test_the_end_of_a_request_is_reported_to_its_controller_and_to_the_state_worker(
    bench: Bench,
) -> None:
    a = controller_worker(bench, "a")
    bench.worker("state", role="state", patterns=[], default="")
    header = begun(bench)
    bench.sent.clear()
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("gpu", header, end, final=True)
    assert bodies(bench, "a", "END", End) == [End(requests=[header.request])]
    assert bodies(bench, "state", "END", End) == [End(requests=[header.request])]
    assert not bench.broker.state.workers[a].steers


def test_the_end_of_a_request_without_a_controller_is_not_reported(bench: Bench) -> None:
    controller_worker(bench, "a")
    bench.worker("state", role="state", patterns=[], default="")
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("gpu")
    bench.sent.clear()
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("gpu", header, end, final=True)
    assert bodies(bench, "a", "END", End) == bodies(bench, "state", "END", End) == []


def test_a_request_that_moves_keeps_its_controller_worker_and_its_variables(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    bench.worker("state", role="state", patterns=[], default="")
    header = begun(bench)
    bench.to_worker("a")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("gpu"), bench.now)
    controller_worker(bench, "b")
    bench.worker("other")
    [(_, again)] = bench.to_worker("other")
    assert again.request == header.request
    [out] = bench.send("other", "START", START, Header(header.request))
    assert (out.frames[0], out.peer) == (b"START", peer_of("a"))
    assert bodies(bench, "a", "END", End) == bodies(bench, "state", "END", End) == []
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("other", again, end, final=True)
    assert bodies(bench, "a", "END", End) == [End(requests=[header.request])]
    assert bodies(bench, "state", "END", End) == [End(requests=[header.request])]
    assert not bench.broker.state.workers[a].steers


def test_a_lost_controller_worker_is_reported_to_the_gpu_workers_of_its_requests(
    bench: Bench,
) -> None:
    controller_worker(bench, "a")
    first, second = begun(bench, 1), begun(bench, 2)
    bench.sent.clear()
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    [lost] = bodies(bench, "gpu", "LOST", Lost)
    assert lost.requests == [first.request, second.request]
    assert lost.code == "worker_lost"
    # The controllers start again at another worker.
    controller_worker(bench, "b")
    assert [start(bench, header) for header in (first, second)] == ["b:START"] * 2


def test_a_start_that_finds_no_worker_any_more_waits_for_one(bench: Bench) -> None:
    controller_worker(bench, "a")
    header = accepted(bench)
    bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    start_waits(bench, header)
    controller_worker(bench, "b")
    assert bench.to_worker("b") == [("START", Header(header.request, bench.gpu))]  # type: ignore[attr-defined]


def test_a_start_that_finds_no_worker_for_long_is_answered_with_why() -> None:
    bench = Bench(expiry_s=1000.0, move_wait_s=5.0)
    bench.worker("gpu")
    controller_worker(bench, "a")
    header = accepted(bench)
    bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    bench.send("gpu", "START", START, Header(header.request))
    bench.pass_time(4.5)
    assert bodies(bench, "gpu", "LOST", Lost) == []
    bench.pass_time(1.0)
    [lost] = bodies(bench, "gpu", "LOST", Lost)
    assert (lost.requests, lost.code) == ([header.request], "no_worker")


def test_a_controller_that_has_begun_is_not_started_by_one_of_another_kind(bench: Bench) -> None:
    controller_worker(bench, "python", "mine")
    header = begun(bench)
    bench.broker.on_gone(Side.BACK, peer_of("python"), bench.now)
    controller_worker(bench, "any")
    start_waits(bench, header)
    controller_worker(bench, "again", "mine")
    assert [kind for kind, _ in bench.to_worker("again")] == ["START"]
    assert bench.to_worker("any") == []


def test_a_start_of_a_request_that_is_over_or_of_another_worker_is_dropped(bench: Bench) -> None:
    controller_worker(bench, "a")
    bench.worker("other", patterns=["n"], default="n")
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("gpu")
    assert bench.send("other", "START", START, Header(header.request)) == []
    assert bench.send("gpu", "START", START, Header(99)) == []


def test_uploads_go_to_workers_that_take_modules_and_carry_the_tenant(bench: Bench) -> None:
    controller_worker(bench, "python", "mine")
    [(_, refused)] = bench.client("c", "UPLOAD", {"stream_id": 1})
    assert refused["code"] == "no_worker"
    controller_worker(bench, "any")
    frames = [b"UPLOAD", msgspec.json.encode({"stream_id": 1}), b"wasm"]
    [out] = bench.broker.on_client(peer_of("d"), frames, bench.now, "key of d")
    assert out.peer == peer_of("any")
    assert list(out.frames[3:]) == [b"wasm", b"key of d"]


def test_uploads_do_not_take_the_places_of_controllers(bench: Bench) -> None:
    controller_worker(bench, "a", capacity=2)
    for stream in (1, 2, 3):
        bench.client("mallory", "UPLOAD", {"stream_id": stream})
    assert [kind for kind, _ in bench.to_worker("a")] == ["UPLOAD", "UPLOAD", "UPLOAD"]
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("gpu")
    bench.send("gpu", "START", START, Header(header.request))
    assert [kind for kind, _ in bench.to_worker("a")] == ["START"]


def test_an_upload_that_is_too_large_goes_no_further(bench: Bench) -> None:
    controller_worker(bench, "any")
    frames = [b"UPLOAD", msgspec.json.encode({"stream_id": 1}), bytes(MAX_MODULE_BYTES + 1)]
    [out] = bench.broker.on_client(peer_of("c"), frames, bench.now)
    body = msgspec.json.decode(out.frames[1])
    assert (body["code"], body["path"], body["stream_id"]) == ("too_large", "$.data", 1)
    assert "16777216" in body["message"]


def test_a_state_worker_keeps_only_the_requests_that_still_live() -> None:
    bench = Bench(recover_s=1.0)
    bench.pass_time(1.0)
    bench.worker("gpu", capacity=8)
    controller_worker(bench, "a")
    header = begun(bench)
    live = [
        LiveRequest(request=header.request, session=0, stream_id=0),
        LiveRequest(request=77, session=0, stream_id=0),
    ]
    answer = bench.worker("state", role="state", patterns=[], default="", live=live)
    assert answer.unknown == [77]


def test_clients_cannot_speak_as_workers(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    for kind in (b"START", b"STEP", b"RESULT", b"VARIABLE", b"MODULE_TABLE", b"END", b"LOST"):
        frames = [kind, encode_header(1, a), encode_body(VARIABLE, "msgpack")]
        [out] = bench.broker.on_client(peer_of("c"), frames, bench.now)
        assert msgspec.json.decode(out.frames[1])["code"] == "unknown_type"
    assert bench.to_worker("a") == []


# --- reservations: the controller worker is chosen when the request goes to its GPU worker --------


def accepted(bench: Bench, stream: int = 1) -> Header:
    """Begins a request with a controller, for which the GPU worker does not send START yet; returns
    the request's header."""
    assert bench.client("c", "GENERATE", generate(stream, controller="mine")) == []
    [(_, header)] = [m for m in bench.to_worker("gpu") if m[0] == "GENERATE"]
    return header


def start(bench: Bench, header: Header) -> str:
    """The GPU worker sends START; returns the name and the message type of the broker's next START
    or LOST."""
    [out] = [
        m
        for m in bench.send("gpu", "START", START, Header(header.request))
        if m.frames[0] in (b"START", b"LOST")
    ]
    return out.peer[1:].decode() + ":" + out.frames[0].decode()


def start_waits(bench: Bench, header: Header) -> None:
    """The GPU worker sends START, of which the broker only notifies the client."""
    [out] = bench.send("gpu", "START", START, Header(header.request))
    assert (out.side, out.peer, out.frames[0]) == (Side.FRONT, peer_of("c"), b"SYSTEM")


def test_the_worker_that_was_reserved_gets_the_start(bench: Bench) -> None:
    controller_worker(bench, "a", capacity=2)
    headers = [accepted(bench, 1), accepted(bench, 2)]
    # Worker b now has free places, but the requests already have places at worker a.
    controller_worker(bench, "b", capacity=2)
    assert [start(bench, h) for h in headers] == ["a:START", "a:START"]


def test_a_reservation_counts_towards_the_load(bench: Bench) -> None:
    a, b = controller_worker(bench, "a", capacity=2), controller_worker(bench, "b", capacity=2)
    for stream in range(4):
        accepted(bench, stream)
    workers = bench.broker.state.workers
    assert [len(workers[w].steers) for w in (a, b)] == [2, 2]
    # All places are reserved, so the broker refuses a further request. It never refuses the START
    # of an accepted request.
    [(_, error)] = bench.client("c", "GENERATE", generate(9, controller="mine"))
    assert error["code"] == "queue_full"


def ended(bench: Bench, stream: int, header: Header) -> None:
    """The GPU worker reports the end of a request."""
    end = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop")
    bench.tokens("gpu", header, end, final=True)


def test_a_request_that_is_queued_reserves_nothing_until_it_runs() -> None:
    bench = Bench()
    bench.worker("gpu", capacity=1)
    a = controller_worker(bench, "a", capacity=2)
    first = accepted(bench, 1)
    steers = bench.broker.state.workers[a].steers
    for stream in (2, 3, 4):
        [(kind, notice)] = bench.client("c", "GENERATE", generate(stream, controller="mine"))
        assert (kind, notice["event"]) == ("SYSTEM", "queued")
    assert list(steers) == [first.request]
    ended(bench, 1, first)
    [(_, second)] = [m for m in bench.to_worker("gpu") if m[0] == "GENERATE"]
    assert list(steers) == [second.request]
    assert start(bench, second) == "a:START"


def test_a_queued_request_that_finds_no_free_place_when_it_runs_waits_for_one() -> None:
    bench = Bench()
    bench.worker("gpu", capacity=1)
    bench.worker("other", capacity=1, patterns=["n"], default="n")
    a = controller_worker(bench, "a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, first)] = bench.to_worker("gpu")
    [(kind, _)] = bench.client("c", "GENERATE", generate(2, controller="mine"))
    assert kind == "SYSTEM"
    assert bench.client("c", "GENERATE", generate(3, controller="mine") | {"model": "n"}) == []
    [(_, third)] = bench.to_worker("other")
    ended(bench, 1, first)
    [(_, second)] = [m for m in bench.to_worker("gpu") if m[0] == "GENERATE"]
    assert second.request not in bench.broker.state.workers[a].steers
    start_waits(bench, second)
    end = Token(token=1, stream_id=3, logprob=0.0, finish_reason="stop")
    bench.tokens("other", third, end, final=True)
    assert [(kind, h.request) for kind, h in bench.to_worker("a")] == [("START", second.request)]


def test_a_request_that_ends_before_its_start_releases_its_reservation(bench: Bench) -> None:
    a = controller_worker(bench, "a", capacity=1)
    bench.worker("state", role="state", patterns=[], default="")
    header = accepted(bench)
    end = Token(token=None, stream_id=1, logprob=None, finish_reason="cancelled")
    bench.sent.clear()
    bench.tokens("gpu", header, end, final=True)
    assert not bench.broker.state.workers[a].steers
    # Neither the controller worker nor the state worker has received a message about the request,
    # so neither gets an END.
    assert bodies(bench, "a", "END", End) == bodies(bench, "state", "END", End) == []
    bench.to_client("c")
    accepted(bench, 2)


def test_a_request_that_is_refused_reserves_nothing(bench: Bench) -> None:
    a = controller_worker(bench, "a")
    for fields in ({"model": "unknown"}, {"buffers": ["none"]}):
        [(kind, _)] = bench.client("c", "GENERATE", generate(1, controller="mine", **fields))
        assert kind == "ERROR"
    accepted(bench, 1)
    [(_, error)] = bench.client("c", "GENERATE", generate(1, controller="mine"))
    assert error["code"] == "duplicate_stream"
    assert len(bench.broker.state.workers[a].steers) == 1


def test_when_the_reserved_worker_is_lost_before_the_start_another_is_chosen(bench: Bench) -> None:
    controller_worker(bench, "a")
    header = accepted(bench)
    controller_worker(bench, "b")
    bench.sent.clear()
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    assert bodies(bench, "gpu", "LOST", Lost) == []
    assert start(bench, header) == "b:START"


def test_when_the_reserved_worker_drains_before_the_start_another_is_chosen(bench: Bench) -> None:
    controller_worker(bench, "a")
    begun(bench, 1)
    header = accepted(bench, 2)
    controller_worker(bench, "b")
    bench.send("a", "DRAIN", {"reason": "restart"})
    assert start(bench, header) == "b:START"
    # The controller that already runs at the draining worker stays there.
    [draining] = [w for w in bench.broker.state.workers.values() if w.name == "a"]
    assert len(draining.steers) == 1


def test_a_second_start_of_a_request_is_ignored(bench: Bench) -> None:
    controller_worker(bench, "a")
    header = begun(bench)
    assert bench.send("gpu", "START", START, Header(header.request)) == []


# --- STARTs that wait -----------------------------------------------------------------------------


def waiting_starts(number: int) -> tuple[Bench, list[Header]]:
    """A broker with ``number`` STARTs, and the headers of their requests. The controller worker
    ``b`` has one place, and runs the controller of the first START. The other STARTs wait."""
    bench = Bench(expiry_s=1000.0)
    bench.worker("gpu", capacity=number)
    controller_worker(bench, "a", capacity=number)
    headers = [accepted(bench, stream) for stream in range(number)]
    bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    for header in headers:
        start_waits(bench, header)
    controller_worker(bench, "b", capacity=1)
    return bench, headers


def started(bench: Bench, name: str = "b") -> list[int]:
    return [header.request for kind, header in bench.to_worker(name) if kind == "START"]


def calls_of_an_end(number: int) -> int:
    """The number of function calls in the broker when a request ends and the next START takes its
    place."""
    bench, headers = waiting_starts(number)
    assert started(bench) == [headers[0].request]
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    end = Token(token=None, stream_id=0, logprob=None, finish_reason="cancelled")
    sys.setprofile(count)
    try:
        bench.tokens("gpu", headers[0], end, final=True)
    finally:
        sys.setprofile(None)
    assert started(bench) == [headers[1].request]
    assert calls["Controllers.end"] == 1
    return calls.total()


def test_a_request_that_ends_costs_the_same_however_many_starts_wait() -> None:
    calls_of_an_end(4)  # A combination of flags is made and cached when it is first needed.
    assert calls_of_an_end(400) == calls_of_an_end(4)


def test_a_client_is_notified_once_of_each_start_that_waits() -> None:
    bench, headers = waiting_starts(3)
    notices = bench.to_client("c")
    message = "waiting for a controller worker"
    assert [kind for kind, _ in notices] == ["SYSTEM"] * 3
    assert [notice for _, notice in notices] == [
        {"event": "queued", "message": message, "stream_id": stream, "model": "m"}
        for stream in range(3)
    ]
    bench.pass_time(5.0)
    end = Token(token=None, stream_id=0, logprob=None, finish_reason="cancelled")
    bench.tokens("gpu", headers[0], end, final=True)
    assert started(bench) == [headers[0].request, headers[1].request]
    assert [kind for kind, _ in bench.to_client("c")] == ["TOKEN"]


def test_starts_that_wait_go_on_in_their_order_one_for_each_free_place() -> None:
    bench, headers = waiting_starts(6)
    for number, header in enumerate(headers):
        assert started(bench) == [header.request]
        end = Token(token=None, stream_id=number, logprob=None, finish_reason="cancelled")
        bench.pass_time(1.0)
        bench.tokens("gpu", header, end, final=True)
    assert started(bench) == []


def test_a_start_that_waits_for_a_name_goes_to_the_worker_that_registers_it() -> None:
    """The START first waits for a worker that runs any module. A worker that registers the
    controller's name is preferred to such a worker."""
    bench, headers = waiting_starts(3)
    controller_worker(bench, "named", "mine", capacity=1)
    assert started(bench, "named") == [headers[1].request]
    end = Token(token=None, stream_id=0, logprob=None, finish_reason="cancelled")
    bench.tokens("gpu", headers[0], end, final=True)
    assert started(bench) == [headers[0].request], "the place at worker b stays free"
    end = Token(token=None, stream_id=1, logprob=None, finish_reason="cancelled")
    bench.tokens("gpu", headers[1], end, final=True)
    assert started(bench, "named") == [headers[2].request]


def test_a_worker_with_fewer_controllers_of_other_brokers_takes_what_waits() -> None:
    bench, headers = waiting_starts(3)
    end = Token(token=None, stream_id=0, logprob=None, finish_reason="cancelled")
    bench.send("b", "HEARTBEAT", Heartbeat(elsewhere=1))
    bench.tokens("gpu", headers[0], end, final=True)
    assert started(bench) == [headers[0].request]
    bench.send("b", "HEARTBEAT", Heartbeat(elsewhere=0))
    assert started(bench) == [headers[1].request]
