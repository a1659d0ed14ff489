"""A worker gets no further request while it has not taken many bytes of earlier requests. Further
requests wait in the queues."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.in_flight import ASK_BYTES, MAX_IN_FLIGHT_BYTES
from tokenbus.protocol.header import Header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Claimed

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check

MB = 2**20
SIZE = 8 * MB
"""Bytes of the buffer that the requests name."""
MOST = MAX_IN_FLIGHT_BYTES // SIZE
"""Number of requests that a worker gets before it has taken one."""


@pytest.fixture
def bench() -> Bench:
    bench = Bench(max_queued_bytes=1024 * MB)
    bench.worker("a", capacity=512)
    store(bench, "c")
    return bench


def store(bench: Bench, client: str, size: int = SIZE) -> None:
    frames = [b"BUFFER", msgspec.json.encode({"name": "b"}), bytes(size)]
    bench.broker.on_client(peer_of(client), frames, bench.now)


def send(bench: Bench, client: str, count: int, kind: str = "GENERATE", **fields: Any) -> None:
    """Sends requests with the stream ids from 1 to ``count`` that name the client's buffer."""
    for stream in range(1, count + 1):
        bench.client(client, kind, {"stream_id": stream, "buffers": ["b"], **fields})
    check(bench.broker)


def received(bench: Bench, kind: str = "GENERATE") -> list[Header]:
    """The headers of the requests that the worker has received since the last call."""
    return [header for each, header in bench.to_worker("a") if each == kind]


def take(bench: Bench) -> None:
    """The worker answers the CLAIM that it has received, after it has taken all requests."""
    bench.send("a", "CLAIMED", Claimed(session=0))
    check(bench.broker)


def end(bench: Bench, header: Header, stream: int) -> None:
    entry = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="length")
    bench.tokens("a", header, entry, final=True)
    check(bench.broker)


def test_large_requests_wait_until_the_worker_has_taken_the_earlier_ones(bench: Bench) -> None:
    send(bench, "c", 3 * MOST)
    assert len(received(bench)) == MOST
    take(bench)
    # The first CLAIM followed the first request, so the worker has taken at least this request.
    assert len(received(bench)) == 1
    take(bench)
    assert len(received(bench)) == MOST - 1
    assert bench.broker.state.num_queued == MOST


def test_the_worker_is_asked_again_while_it_has_no_room(bench: Bench) -> None:
    store(bench, "d", SIZE - 1000)
    send(bench, "c", 1)  # A CLAIM follows this request.
    send(bench, "d", 3, buffers=["b", "b"])
    store(bench, "e")
    send(bench, "e", 1)
    store(bench, "f", SIZE - 1000)
    send(bench, "f", 2, buffers=["b", "b"])
    assert len(received(bench)) == 6
    take(bench)
    # The requests after the CLAIM still fill the bound.
    assert received(bench) == []
    take(bench)
    assert len(received(bench)) == 1


def test_a_request_that_ends_makes_room_without_a_claimed(bench: Bench) -> None:
    send(bench, "c", MOST + 2)
    headers = received(bench)
    end(bench, headers[-1], MOST)
    assert len(received(bench)) == 1
    # The request counts once, although the CLAIM that followed it is answered later.
    end(bench, headers[0], 1)
    take(bench)
    assert len(received(bench)) == 1


def test_all_taken_requests_leave_nothing_in_flight(bench: Bench) -> None:
    send(bench, "c", MOST)
    take(bench)
    take(bench)
    [worker] = bench.broker.state.workers.values()
    assert worker.in_flight.bytes == 0
    assert len(received(bench)) == MOST


def test_the_rule_for_the_first_request_of_a_key_does_not_exceed_the_bound(bench: Bench) -> None:
    send(bench, "c", MOST)
    assert len(received(bench)) == MOST
    for number in range(8):
        store(bench, f"other {number}", 4)
        send(bench, f"other {number}", 1)
    assert received(bench) == []
    assert bench.broker.state.num_queued == 8


def test_the_bytes_that_wait_are_shared_among_clients() -> None:
    bench = Bench(max_queued_bytes=8 * SIZE)
    bench.worker("a", capacity=512)
    store(bench, "c")
    send(bench, "c", MOST)
    assert received(bench)
    answers = []
    for stream in range(MOST + 1, MOST + 9):
        answers += bench.client("c", "GENERATE", {"stream_id": stream, "buffers": ["b"]})
    assert {body["code"] for kind, body in answers if kind == "ERROR"} == {"client_limit"}
    bench.client("d", "GENERATE", generate(1))
    assert [r.session.peer for r in bench.broker.state.requests.values()][-1] == peer_of("d")


def test_a_request_may_exceed_what_is_left_of_the_bound(bench: Bench) -> None:
    store(bench, "c", SIZE - 10_000)
    send(bench, "c", MOST + 2)
    assert len(received(bench)) == MOST + 1


def test_small_requests_cause_no_claim(bench: Bench) -> None:
    store(bench, "d", 1000)
    send(bench, "d", 400)
    assert ASK_BYTES > 400 * 1000
    assert {kind for kind, _ in bench.to_worker("a")} == {"GENERATE"}


def test_a_lost_worker_has_nothing_in_flight_when_it_returns(bench: Bench) -> None:
    send(bench, "c", 2 * MOST)
    assert len(received(bench)) == MOST
    bench.send("a", "UNREGISTER", {"reason": "leaves"})
    bench.worker("a", capacity=512)
    check(bench.broker)
    assert len(received(bench)) == MOST


@pytest.mark.parametrize("kind", ["MODEL_INFO", "TOKENIZER", "EMBED"])
def test_only_requests_with_a_field_for_buffers_carry_them(bench: Bench, kind: str) -> None:
    bench.client("c", kind, {"stream_id": 1, "buffers": ["b"], "inputs": ["x"]})
    [request] = bench.broker.state.requests.values()
    assert len(request.frames) == 1
