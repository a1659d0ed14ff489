"""A defect or a malformed message affects as few requests as possible. Timers still run, and other
messages are handled."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tokenbus.broker.outgoing import Side
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.header import Flag, Header, encode_header, encode_token_header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register

from ..processes import until
from ..worlds.broker import Bench, generate, peer_of

Socket = zmq.Socket[bytes]
WAIT_MS = 300_000


def fail_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``original`` whose first call raises."""
    calls = []

    def call(*args: Any, **given: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return original(*args, **given)

    return call


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- on sockets -----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    """A broker with its sockets, on its own thread."""
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        settings = BrokerSettings(expiry_s=600, tick_s=0.02, drain_s=0, recover_s=0)
        front, back = f"ipc://{folder}/front.sock", f"ipc://{folder}/back.sock"
        server = BrokerServer(front, back, settings)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=(server.run(),))
        thread.start()
        yield server
        loop.call_soon_threadsafe(server.stop)
        thread.join(300)
        loop.close()
        assert not Path(f"{folder}/front.sock").exists()


def connect(endpoint: str) -> Socket:
    """A DEALER socket whose receive times out after five minutes."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = WAIT_MS
    socket.connect(endpoint)
    return socket


def register(endpoint: str) -> Socket:
    """A worker that serves the model ``m`` and never sends a heartbeat."""
    worker = connect(endpoint)
    body = Register(name="w", role="gpu", version=1, pid=1, host="h", capacity=9, patterns=["m"])
    worker.send_multipart(pack([b"REGISTER", encode_header(), encode_body(body, "msgpack")]))
    assert unpack(worker.recv_multipart())[0] == b"REGISTERED"
    return worker


def send(client: Socket, kind: bytes, body: dict[str, Any]) -> None:
    client.send_multipart([kind, msgspec.json.encode(body)])


def error_of(client: Socket) -> dict[str, Any]:
    """The body of the next ERROR that the client receives."""
    while True:
        kind, body = client.recv_multipart()
        if kind == b"ERROR":
            error: dict[str, Any] = msgspec.json.decode(body)
            return error


def test_a_tick_that_fails_is_not_the_last_one(server: BrokerServer) -> None:
    worker, client = register(server.back_endpoint), connect(server.front_endpoint)
    server.core.tick = fail_once(server.core.tick)  # type: ignore[method-assign]
    until(lambda: server.core.state.counters.internal_errors == 1, 300.0, "a tick failed")
    send(client, b"GENERATE", generate(1, timeout_s=0.001))
    # Only a later tick notices that the deadline has passed.
    while unpack(worker.recv_multipart())[0] != b"CANCEL":
        pass
    worker.close()
    client.close()


def test_a_message_that_fails_is_answered_and_those_behind_it_are_served(
    server: BrokerServer,
) -> None:
    client = connect(server.front_endpoint)
    server.core.dispatcher.submit = fail_once(server.core.dispatcher.submit)  # type: ignore[method-assign]
    for stream in (1, 2):
        send(client, b"GENERATE", generate(stream))
    errors = {e["stream_id"]: e["code"] for e in (error_of(client), error_of(client))}
    assert errors == {1: "internal", 2: "no_worker"}
    assert server.core.state.counters.internal_errors == 1
    client.close()


def test_full_pipes_are_tried_again_after_a_failure(server: BrokerServer) -> None:
    worker, client = register(server.back_endpoint), connect(server.front_endpoint)
    server._to_front.flush = fail_once(server._to_front.flush)  # type: ignore[method-assign]
    send(client, b"GENERATE", generate(1))
    while unpack(worker.recv_multipart())[0] != b"GENERATE":
        pass
    # Not all of these messages fit into the client's pipe, because the client does not read yet.
    head = encode_token_header([next(iter(server.core.state.sessions)).id])
    count = 3000
    for i in range(count):
        worker.send_multipart(pack([b"TOKEN", head, b"%d" % i]))
    got: list[int] = []
    while len(got) < count:
        kind, body = client.recv_multipart()
        if kind == b"TOKEN":
            got.append(int(body))
    assert got == list(range(count))
    worker.close()
    client.close()


# --- in the core ----------------------------------------------------------------------------------


def test_a_request_that_fails_leaves_nothing_behind(bench: Bench) -> None:
    worker = bench.worker("a")
    dispatcher = bench.broker.dispatcher
    dispatcher._start = fail_once(dispatcher._start)  # type: ignore[method-assign]
    [(kind, error)] = bench.client("c", "GENERATE", generate(1))
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "internal", 1)
    assert bench.broker.state.requests == {}
    assert bench.client("c", "GENERATE", generate(1)) == []
    assert len(bench.broker.state.workers[worker.worker].requests) == 1


def test_a_part_of_a_tick_that_fails_does_not_keep_the_others_from_running(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1, timeout_s=1.0))
    bench.to_worker("a")
    broken = bench.broker.dispatcher
    bench.worker("b", role="controller", patterns=["*"])
    broken.remove = fail_once(broken.remove)  # type: ignore[method-assign]
    bench.pass_time(1.5)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    # Ending the lease of one of the two silent workers fails. The lease of the other worker still
    # ends.
    bench.pass_time(5.0)
    assert len(bench.broker.state.workers) == 1
    assert bench.broker.state.counters.internal_errors == 1


def test_a_session_that_cannot_be_ended_does_not_keep_others_from_expiring(bench: Bench) -> None:
    bench.worker("a")
    for name in ("c", "d"):
        bench.client(name, "HELLO", {"capabilities": ["ping"]})
        bench.client(name, "GENERATE", generate(1))
    dispatcher = bench.broker.dispatcher
    dispatcher.abandon = fail_once(dispatcher.abandon)  # type: ignore[method-assign]
    bench.pass_time(45.0)
    assert len(bench.broker.state.sessions) == 0


@pytest.mark.parametrize("frames", [[b"TOKEN"], [b"TOKEN", b"x"], [b"TOKEN", encode_header()]])
def test_a_worker_whose_tokens_cannot_be_read_loses_its_streams_to_others(
    bench: Bench, frames: list[bytes]
) -> None:
    # The streams of these tokens are unknown, so all streams of the worker move.
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    bench.to_worker("a")
    bench.sent += bench.broker.on_worker(peer_of("a"), frames, bench.now)
    assert bench.sent[-1].frames[0] == b"REREGISTER"
    assert bench.broker.state.counters.bad_worker_messages == 1
    bench.worker("b")
    assert [kind for kind, _ in bench.to_worker("b")] == ["GENERATE"]
    assert bench.to_client("c") == []


def test_a_worker_whose_frames_cannot_be_distinguished_is_lost(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    head = encode_token_header([header.address])
    messages = [(peer_of("a"), [b"\x02\x00\x09\x00"]), (peer_of("a"), pack([b"TOKEN", head, b""]))]
    out = bench.broker.on_workers(messages, bench.now)
    # The next message is from a worker that is not registered any more. The broker does not request
    # another registration, because it has just sent REREGISTER.
    assert [m.frames[0] for m in out] == [b"REREGISTER"]
    assert bench.broker.state.counters.bad_worker_messages == 1
    assert bench.broker.state.workers == {}


def test_a_worker_of_another_version_is_refused_with_both_versions(bench: Bench) -> None:
    register = Register(name="w", role="gpu", version=7, pid=1, host="h", capacity=1)
    body = encode_body(register, "msgpack")
    unpacked = (peer_of("old"), [b"REGISTER", encode_header(), body])
    packed = (peer_of("new"), pack([b"REGISTER", encode_header(), body]))
    old, new = bench.broker.on_workers([unpacked, packed], bench.now)
    messages = []
    for refused in (old, new):
        assert refused.frames[0] == b"ERROR"
        error = msgspec.msgpack.decode(refused.frames[2])
        assert error["code"] == "unsupported_version"
        messages.append(error["message"])
    assert "version 1" in messages[0]
    assert "version 2 is required" in messages[0]
    assert "version 7" in messages[1]
    assert "speaks version 1" in messages[1]
    assert bench.broker.state.workers == {}


def test_a_message_that_fails_does_not_take_those_of_other_workers_with_it(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    back = bench.broker._back
    back.on_tokens = fail_once(back.on_tokens)  # type: ignore[method-assign]
    message = pack([b"TOKEN", encode_token_header([header.address]), b"body"])
    out = bench.broker.on_workers([(peer_of("a"), message)] * 2, bench.now)
    assert [m.frames[1] for m in out] == [b"body"]
    assert bench.broker.state.counters.internal_errors == 1


def test_a_request_that_cannot_be_forgotten_does_not_keep_those_that_ended_with_it(
    bench: Bench,
) -> None:
    bench.worker("a")
    for stream in (1, 2):
        bench.client("c", "GENERATE", generate(stream))
    headers = [header for _, header in bench.to_worker("a")]
    dispatcher = bench.broker.dispatcher
    dispatcher.forget = fail_once(dispatcher.forget)  # type: ignore[method-assign]
    head = encode_token_header([headers[0].address], [header.request for header in headers])
    end = [Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop") for stream in (1, 2)]
    bench.broker.on_worker(peer_of("a"), [b"TOKEN", head, encode_body(end, "json")], bench.now)
    assert headers[1].request not in bench.broker.state.requests
    assert bench.broker.state.counters.internal_errors == 1


@pytest.mark.parametrize("kind", [b"ERROR", b"MSG", b"START", b"BUFFER"])
def test_a_malformed_message_about_a_stream_ends_it_with_an_error(
    bench: Bench, kind: bytes
) -> None:
    bench.worker("a")
    bench.worker("b", role="controller", patterns=["*"])
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("a")
    bench.sent += bench.broker.on_worker(
        peer_of("a"), [kind, encode_header(header.request, header.address)], bench.now
    )
    [(sent, error)] = bench.to_client("c")
    assert (sent, error["code"], error["stream_id"]) == ("ERROR", "internal", 1)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    assert bench.broker.state.counters.bad_worker_messages == 1


def test_a_malformed_message_does_not_end_the_streams_of_another_worker(bench: Bench) -> None:
    bench.worker("a")
    bench.worker("b", patterns=["n"])
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.broker.on_worker(peer_of("b"), [b"MSG", encode_header(header.request)], bench.now)
    assert bench.to_client("c") == []
    entry = Token(token=1, stream_id=1, logprob=0.0, finish_reason=None)
    bench.tokens("a", Header(header.request, header.address), entry)
    assert bench.to_client("c")[0][0] == "TOKEN"


def test_a_connection_that_closes_while_the_broker_fails_is_forgotten(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    dispatcher = bench.broker.dispatcher
    dispatcher.abandon = fail_once(dispatcher.abandon)  # type: ignore[method-assign]
    bench.broker.on_gone(Side.FRONT, peer_of("c"), bench.now)
    assert len(bench.broker.state.sessions) == 0
    assert bench.broker.state.counters.internal_errors == 1


def test_a_dropped_body_that_cannot_be_decoded_ends_the_streams_of_its_client(
    bench: Bench,
) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    head = encode_token_header([header.address], [])
    [out] = bench.broker.on_worker(peer_of("a"), [b"TOKEN", head, b"\xc1"], bench.now)
    bench.sent += bench.broker.on_full(out)
    errors = {e["stream_id"]: e["code"] for kind, e in bench.to_client("c") if kind == "ERROR"}
    assert errors == {1: "slow_client"}
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]


@pytest.mark.parametrize("columns", [False, True])
def test_a_stream_whose_last_tokens_do_not_fit_ends_with_an_error(
    bench: Bench, columns: bool
) -> None:
    bench.worker("a")
    for stream in (1, 2):
        bench.client("c", "GENERATE", generate(stream))
    (_, header), _ = bench.to_worker("a")
    entries = [
        plain_entry(2, 5, -1.0, 0, 0),
        Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop"),
    ]
    body = encode_body(pack_columns(entries) if columns else entries, "msgpack")
    head = encode_token_header([header.address], [header.request])
    [out] = bench.broker.on_worker(peer_of("a"), [b"TOKEN", head, body], bench.now)
    bench.sent.clear()
    # The client's socket does not accept these messages, and the request has already been removed.
    bench.sent += bench.broker.on_full(out)
    errors = {e["stream_id"]: e["code"] for kind, e in bench.to_client("c")}
    assert errors == {1: "slow_client", 2: "slow_client"}


def test_a_client_that_reads_no_tokenizer_gets_a_bounded_number_of_bytes(bench: Bench) -> None:
    bench = Bench(max_pending_bytes=100_000)
    bench.worker("a", capacity=1000)
    large = b'{"stream_id":1,"tokenizer":"' + b"x" * 400_000 + b'"}'

    def ask(client: str) -> tuple[str, Any]:
        """Requests a tokenizer, and lets the worker answer; returns the answer that the client
        receives."""
        answers = bench.client(client, "TOKENIZER", {"stream_id": 1, "model": "m"})
        for _, (request, session, _) in bench.to_worker("a"):
            head = encode_header(request, session, Flag.FINAL)
            bench.sent += bench.broker.on_worker(peer_of("a"), [b"MSG", head, large], bench.now)
        [answer] = answers + bench.to_client(client)
        return answer

    assert [ask("c")[0] for _ in range(5)] == ["MSG"] * 4 + ["ERROR"]
    assert ask("c")[1]["code"] == "slow_client"
    assert ask("another")[0] == "MSG"
    # A new session on the same connection has the same pipe.
    bench.client("c", "BYE")
    assert ask("c")[1]["code"] == "slow_client"
    bench.broker.on_gone(Side.FRONT, peer_of("c"), bench.now)
    assert [ask("c")[0] for _ in range(5)] == ["MSG"] * 4 + ["ERROR"]
    # The pipe has room for 256 messages. After 256 further messages, all earlier ones have left it.
    for number in range(256):
        bench.client("c", "PING", {"n": number})
    assert ask("c")[0] == "MSG"


def test_a_client_waits_for_a_bounded_number_of_tokenizers(bench: Bench) -> None:
    bench.worker("a", capacity=1000)
    answers = []
    for stream in range(6):
        answers += bench.client("c", "TOKENIZER", {"stream_id": stream, "model": "m"})
    assert [error["code"] for _, error in answers] == ["client_limit"] * 2
    assert len(bench.to_worker("a")) == 4


def test_all_sessions_of_a_key_wait_for_a_bounded_number_of_tokenizers(bench: Bench) -> None:
    bench.worker("a", capacity=1000)

    def ask(client: str, key: str) -> list[tuple[str, Any]]:
        return bench.client(client, "TOKENIZER", {"stream_id": 1, "model": "m"}, key)

    answers = [answer for number in range(20) for answer in ask(f"eve {number}", "eve")]
    assert [error["code"] for _, error in answers] == ["client_limit"] * 4
    sent = bench.to_worker("a")
    assert len(sent) == 16
    assert ask("ann", "ann") == []
    # The end of a session does not make room, because the worker still has the session's request.
    bench.client("eve 0", "BYE", key="eve")
    [(_, error)] = ask("eve again", "eve")
    assert error["code"] == "client_limit"
    _, (request, session, _) = sent[0]
    head = encode_header(request, session, Flag.FINAL)
    bench.broker.on_worker(peer_of("a"), [b"MSG", head, b'{"stream_id":1}'], bench.now)
    assert ask("eve again", "eve") == []


def test_answers_to_requests_that_were_sent_at_once_are_bounded_in_bytes() -> None:
    bench = Bench(max_pending_bytes=100_000)
    bench.worker("k", role="controller", patterns=["*"], default="", capacity=1000)
    for stream in range(8):
        assert bench.client("c", "TAGS", {"stream_id": stream}) == []
    for _, (request, session, _) in bench.to_worker("k"):
        head = encode_header(request, session, Flag.FINAL)
        large = b'{"result":"' + b"x" * 400_000 + b'"}'
        bench.sent += bench.broker.on_worker(peer_of("k"), [b"MSG", head, large], bench.now)
    answers = bench.to_client("c")
    assert [kind for kind, _ in answers] == ["MSG"] * 4 + ["ERROR"] * 4
    assert {error["code"] for _, error in answers[4:]} == {"slow_client"}
