"""Each request ends for its client exactly once, even if the client's connections are lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.request import Request
from tokenbus.broker.session import Session
from tokenbus.protocol.header import Flag, Header, encode_header
from tokenbus.protocol.messages import Token

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check, check_empty

HELLO = {"capabilities": ["ping", "ack", "recover"]}


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(expiry_s=10_000.0, session_expiry_s=10_000.0)
    bench.worker("a", capacity=9)
    yield bench
    check(bench.broker)


def opened(bench: Bench, name: str = "c", **fields: Any) -> str:
    """Opens a session; returns the session's token."""
    [(_, welcome)] = bench.client(name, "HELLO", HELLO | fields)
    token: str = welcome["session"]
    return token


def begun(bench: Bench, stream: int = 1, client: str = "c", worker: str = "a") -> Header:
    """Begins a stream; returns the header that its worker received."""
    bench.client(client, "GENERATE", generate(stream))
    [(_, header)] = [m for m in bench.to_worker(worker) if m[0] == "GENERATE"]
    return header


def entry(token: int, stream: int = 1, reason: Any = None) -> Token:
    return Token(token=token, stream_id=stream, logprob=0.0, finish_reason=reason)


def gone(bench: Bench, name: str, side: Side = Side.FRONT) -> None:
    bench.sent += bench.broker.on_gone(side, peer_of(name), bench.now)


def back(bench: Bench, token: str, name: str = "d") -> list[int]:
    """Takes the session over on a new connection; returns the streams that WELCOME lists."""
    [(_, welcome)] = bench.client(name, "HELLO", HELLO | {"session": token})
    assert welcome["resumed"]
    streams: list[int] = welcome["streams"]
    return streams


def attach(bench: Bench, received: int, stream: int = 1, name: str = "d") -> list[tuple[str, Any]]:
    body = {"stream_id": stream, "received": received}
    return [(k, b) for k, b in bench.client(name, "ATTACH", body) if k != "SYSTEM"]


def ping(bench: Bench, ack: int = 0, name: str = "d") -> int:
    """Sends a PING; returns the position in the PONG."""
    _, pong = bench.client(name, "PING", {"ack": ack})[-1]
    position: int = pong.get("position", 0)
    return position


def ids(entries: list[dict[str, Any]]) -> list[int]:
    return [e["token"] for e in entries]


def test_the_last_tokens_into_a_dead_connection_are_sent_again(bench: Bench) -> None:
    token = opened(bench)
    header = begun(bench)
    bench.tokens("a", header, entry(5), entry(6))
    bench.tokens("a", header, entry(7), entry(8, reason="stop"), final=True)
    # The broker has sent all tokens, and has not noticed that the connection is dead.
    assert bench.broker.state.requests == {}
    assert back(bench, token) == [1]
    [(kind, answer), (_, rest)] = attach(bench, received=1)
    assert (kind, answer["attached"], ids(rest)) == ("MSG", 1, [6, 7, 8])
    assert rest[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("known", [True, False])
def test_an_error_reaches_a_client_whose_connection_is_dead(bench: Bench, known: bool) -> None:
    token = opened(bench)
    header = begun(bench)
    bench.tokens("a", header, entry(5), entry(6))
    if known:
        gone(bench, "c")
    error = {"code": "quarantined", "message": "m", "stream_id": 1}
    bench.send("a", "ERROR", error, Header(header.request, header.address, Flag.FINAL))
    assert back(bench, token) == [1]
    [(_, answer), (_, rest), (kind, body)] = attach(bench, received=1)
    assert (answer["attached"], ids(rest)) == (1, [6])
    assert (kind, body["code"], body["stream_id"]) == ("ERROR", "quarantined", 1)
    assert attach(bench, received=1)[0][1]["code"] == "unknown_stream", "the end is sent once"


@pytest.mark.parametrize("kind", ["ERROR", "TOKEN"])
def test_a_client_without_acknowledgements_gets_an_end_that_came_while_it_was_not_connected(
    bench: Bench, kind: str
) -> None:
    [(_, welcome)] = bench.client("c", "HELLO", {"capabilities": ["ping"]})
    header = begun(bench)
    bench.tokens("a", header, entry(5))
    gone(bench, "c")
    if kind == "ERROR":
        error = {"code": "internal", "message": "m", "stream_id": 1}
        bench.send("a", "ERROR", error, Header(header.request, header.address, Flag.FINAL))
    else:
        bench.tokens("a", header, entry(6, reason="stop"), final=True)
    assert back(bench, welcome["session"]) == [1]
    _, (_, [first, *_]), *_ = answers = attach(bench, received=0)
    assert first["token"] == 5
    end, body = answers[-1]
    assert end == kind
    assert kind == "ERROR" or body[-1]["finish_reason"] == "stop"


def test_an_error_that_the_broker_makes_waits_for_its_client(bench: Bench) -> None:
    token = opened(bench)
    begun(bench)
    gone(bench, "c")
    for left, other in ("ab", "be", "ef"):
        bench.worker(other, capacity=9)
        gone(bench, left, Side.BACK)
    assert bench.broker.state.requests == {}
    assert back(bench, token) == [1]
    kinds = [(k, b.get("code")) for k, b in attach(bench, received=0)]
    assert kinds[-1] == ("ERROR", "quarantined")


@pytest.mark.parametrize("known", [True, False])
def test_an_answer_reaches_a_client_whose_connection_is_dead(bench: Bench, known: bool) -> None:
    token = opened(bench)
    bench.client("c", "TOKENIZER", {"stream_id": 1, "model": "m"})
    [(_, header)] = bench.to_worker("a")
    if known:
        gone(bench, "c")
    body = b'{"stream_id":1,"result":[1]}'
    head = encode_header(header.request, header.address, Flag.FINAL)
    bench.sent += bench.broker.on_worker(peer_of("a"), [b"MSG", head, body], bench.now)
    assert back(bench, token) == [1]
    assert attach(bench, received=0) == [("MSG", {"stream_id": 1, "result": [1]})]


def test_an_answer_is_sent_in_the_encoding_of_the_connection_that_gets_it(bench: Bench) -> None:
    token = opened(bench)
    bench.client("c", "TOKENIZER", {"stream_id": 1, "model": "m"})
    [(_, header)] = bench.to_worker("a")
    gone(bench, "c")
    head = encode_header(header.request, header.address, Flag.FINAL)
    body = b'{"stream_id":1,"result":[1]}'
    bench.sent += bench.broker.on_worker(peer_of("a"), [b"MSG", head, body], bench.now)
    bench.client("d", "HELLO", HELLO | {"session": token, "encodings": ["msgpack"]})
    out = bench.broker.on_client(peer_of("d"), [b"ATTACH", b'{"stream_id":1,"received":0}'], 200.0)
    assert msgspec.msgpack.decode(out[0].frames[1]) == {"stream_id": 1, "result": [1]}


def test_an_answer_that_is_too_large_to_be_kept_is_an_error_that_can_be_retried(
    bench: Bench,
) -> None:
    token = opened(bench)
    bench.client("c", "TOKENIZER", {"stream_id": 1, "model": "m"})
    [(_, header)] = bench.to_worker("a")
    head = encode_header(header.request, header.address, Flag.FINAL)
    body = b'{"stream_id":1,"result":"' + b"x" * 2_000_000 + b'"}'
    bench.sent += bench.broker.on_worker(peer_of("a"), [b"MSG", head, body], bench.now)
    assert back(bench, token) == [1]
    [(kind, error)] = attach(bench, received=0)
    assert (kind, error["code"]) == ("ERROR", "connection_lost")


@pytest.mark.parametrize("connected", [True, False])
def test_a_deadline_that_passes_ends_a_stream_for_a_client_that_comes_back(
    bench: Bench, connected: bool
) -> None:
    token = opened(bench)
    bench.worker("b", capacity=1, patterns=["n"])
    bench.client("c", "GENERATE", generate(1, model="n"))
    bench.client("c", "GENERATE", generate(2, model="n", timeout_s=1.0))
    if not connected:
        gone(bench, "c")
    bench.pass_time(2.0)
    assert sorted(back(bench, token)) == [1, 2]
    [(_, answer), (_, [end])] = attach(bench, received=0, stream=2)
    assert (answer["attached"], end["finish_reason"]) == (0, "timeout")


def test_an_end_that_its_client_has_acknowledged_is_not_kept(bench: Bench) -> None:
    opened(bench)
    for stream in (1, 2):
        bench.tokens("a", begun(bench, stream), entry(5, stream, "stop"), final=True)
    position = ping(bench, name="c")
    assert position == 2
    bench.tokens("a", begun(bench, 3), entry(5, 3, "stop"), final=True)
    [session] = bench.broker.state.sessions
    assert ping(bench, ack=position, name="c") == 3
    assert list(session.log.ends) == [3]
    ping(bench, ack=3, name="c")
    check_empty(bench.broker)


def test_an_acknowledgement_applies_only_to_what_its_own_connection_was_sent(
    bench: Bench,
) -> None:
    token = opened(bench)
    bench.tokens("a", begun(bench), entry(5, reason="stop"), final=True)
    ping(bench, name="c")
    assert back(bench, token) == [1]
    # The client has not received the end, because it sends its first PING before its ATTACH.
    ping(bench, ack=ping(bench))
    assert [k for k, _ in attach(bench, received=0)] == ["MSG", "TOKEN"]
    # The client has not acknowledged an end on this connection either, so the end is kept.
    assert back(bench, token, "e") == [1]
    assert [k for k, _ in attach(bench, received=0, name="e")] == ["MSG", "TOKEN"]
    ping(bench, ack=ping(bench, name="e"), name="e")
    check_empty(bench.broker)


def test_a_client_that_does_not_need_an_end_cancels_it(bench: Bench) -> None:
    token = opened(bench)
    bench.tokens("a", begun(bench), entry(5, reason="stop"), final=True)
    assert back(bench, token) == [1]
    bench.client("d", "CANCEL", {"stream_id": 1})
    check_empty(bench.broker)


def test_an_end_without_an_attach_after_a_takeover_is_dropped_in_time(bench: Bench) -> None:
    token = opened(bench)
    bench.tokens("a", begun(bench), entry(5, reason="stop"), final=True)
    gone(bench, "c")
    back(bench, token)
    for _ in range(35):
        ping(bench)
        bench.pass_time(1.0)
    assert len(bench.broker.state.sessions) == 1
    check_empty(bench.broker)


def test_a_stream_that_ends_between_hello_and_attach_is_answered_once(bench: Bench) -> None:
    token = opened(bench)
    header = begun(bench)
    bench.tokens("a", header, entry(5))
    assert back(bench, token) == [1]
    error = {"code": "internal", "message": "m", "stream_id": 1}
    bench.send("a", "ERROR", error, Header(header.request, header.address, Flag.FINAL))
    assert [k for k, _ in attach(bench, received=0)] == ["MSG", "TOKEN", "ERROR"]


def test_a_stream_that_fails_before_its_worker_answers_an_attach_still_answers_the_attach(
    bench: Bench,
) -> None:
    token = opened(bench)
    header = begun(bench)
    bench.tokens("a", header, entry(5))
    back(bench, token)
    assert attach(bench, received=0) == []
    error = {"code": "internal", "message": "m", "stream_id": 1}
    bench.send("a", "ERROR", error, Header(header.request, header.address, Flag.FINAL))
    assert [k for k, _ in bench.to_client("d")] == ["MSG", "TOKEN", "ERROR"]


# --- full pipes -----------------------------------------------------------------------------------


def dropped(bench: Bench, out: list[Outgoing]) -> None:
    """Reports to the broker that these messages do not fit into the queues of their peers."""
    for message in out:
        bench.sent = [m for m in bench.sent if m is not message]
        bench.sent += bench.broker.on_full(message)


def test_an_answer_that_was_dropped_ends_its_request_with_an_error(bench: Bench) -> None:
    bench.client("c", "TOKENIZER", {"stream_id": 1, "model": "m"})
    [(_, header)] = bench.to_worker("a")
    head = encode_header(header.request, header.address, Flag.FINAL)
    frames = [b"MSG", head, b'{"stream_id":1,"result":[1]}']
    dropped(bench, bench.broker.on_worker(peer_of("a"), frames, bench.now))
    bench.pass_time(0.5)
    [(kind, error)] = bench.to_client("c")
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "slow_client", 1)
    check_empty(bench.broker)


@pytest.mark.parametrize("acks", [True, False])
def test_an_error_that_was_dropped_is_sent_again_until_it_fits(bench: Bench, acks: bool) -> None:
    opened(bench, capabilities=["ack"] if acks else [])
    header = begun(bench)
    error = {"code": "quarantined", "message": "m", "stream_id": 1}
    out = bench.send("a", "ERROR", error, Header(header.request, header.address, Flag.FINAL))
    dropped(bench, out)
    for _ in range(3):
        assert bench.to_client("c") == []
        bench.now += 0.25
        dropped(bench, [m for m in bench.broker.tick(bench.now) if m.side is Side.FRONT])
    position = ping(bench, name="c") if acks else 0
    ping(bench, ack=position, name="c")
    bench.pass_time(0.5)
    [(kind, body)] = bench.to_client("c")
    assert (kind, body["code"], body["stream_id"]) == ("ERROR", "quarantined", 1)
    bench.pass_time(0.5)
    assert bench.to_client("c") == []


# --- memory ---------------------------------------------------------------------------------------


def test_ends_without_entries_count_towards_the_bound_of_all_journals() -> None:
    """Clients that do not acknowledge their ends keep at most as many ends as fit into the
    bound."""
    bench = Bench(expiry_s=10_000.0, session_expiry_s=10_000.0, max_total_journal_bytes=64 * 1024)
    bench.worker("a", capacity=9)
    for number in range(10):
        opened(bench, f"c{number}", keep_s=3600)
        for stream in range(30):
            header = begun(bench, stream, f"c{number}")
            bench.tokens("a", header, entry(5, stream, "stop"), final=True)
        gone(bench, f"c{number}")
    bench.pass_time(1.0)
    sessions = list(bench.broker.state.sessions)
    assert len(sessions) == 10
    assert 0 < sum(len(session.log.ends) for session in sessions) <= 128
    check(bench.broker)


@pytest.mark.parametrize("capabilities", [["ack", "recover"], []])
def test_clients_that_crash_leave_nothing_in_memory(bench: Bench, capabilities: list[str]) -> None:
    gc.collect()
    gc.disable()
    try:
        for number in range(50):
            name = f"c{number}"
            opened(bench, name, capabilities=capabilities)
            header = begun(bench, 1, name)
            begun(bench, 2, name)
            gone(bench, name)
            bench.tokens("a", header, entry(5, reason="stop"), final=True)
            bench.pass_time(6.0)
            for kind, to in bench.to_worker("a"):
                if kind == "CANCEL":
                    end = Token(token=None, stream_id=2, logprob=None, finish_reason="cancelled")
                    bench.tokens("a", to, end, final=True)
            bench.sent.clear()
        bench.pass_time(0.5)
        check_empty(bench.broker)
        # The broker keeps the last manifest of the worker, which names a session.
        bench.tokens("a", Header())
        left = [one for one in gc.get_objects() if isinstance(one, Session | Request)]
        assert left == []
    finally:
        gc.enable()
