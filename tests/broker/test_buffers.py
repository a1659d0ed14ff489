"""Buffers of a session: they are stored, requests name them, and their number and size are bounded.
A ``save`` that does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.broker.buffers import MAX_NAMED, MAX_NAMED_BYTES
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.keys import Allowed
from tokenbus.protocol.messages import Buffer, Token

from ..worlds.broker import Bench, generate, peer_of

ANN, EVE = "a" * 64, "e" * 64


def buffer(bench: Bench, client: str, name: str, **fields: Any) -> list[str]:
    """Sends a ``BUFFER``; returns the codes of the errors that answer it."""
    answers = bench.client(client, "BUFFER", {"name": name, **fields})
    return [body["code"] for _, body in answers]


def test_a_save_that_is_too_large_ends_its_stream_with_an_error() -> None:
    bench = Bench(max_buffer_bytes=20)
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1, save="out"))
    [(_, header)] = bench.to_worker("a")
    head = encode_header(header.request, header.address)
    frames = [b"BUFFER", head, encode_body(Buffer(name="out"), "msgpack"), b"t" + bytes(40)]
    bench.sent += bench.broker.on_worker(peer_of("a"), frames, bench.now)
    [(kind, error)] = bench.to_client("c")
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "too_large", 1)
    assert error["path"] == "$.save"
    assert "out" in error["message"]
    assert bench.broker.state.counters.bad_worker_messages == 0
    # The worker ends the stream as usual, and the broker then has no record of the request.
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("a", header, end, final=True)
    assert bench.broker.state.requests == {}


def test_a_session_has_a_bounded_number_of_buffers() -> None:
    bench = Bench(max_buffers=2)
    assert buffer(bench, "c", "a", text="") == buffer(bench, "c", "b", text="") == []
    assert buffer(bench, "c", "c", text="") == ["too_large"]
    assert buffer(bench, "c", "b", text="other") == []
    assert buffer(bench, "c", "a") == []
    assert buffer(bench, "c", "c", text="") == []


def test_all_sessions_together_have_a_bounded_number_of_bytes() -> None:
    bench = Bench(max_total_buffer_bytes=100)
    assert buffer(bench, "c", "a", text="x" * 90) == []
    assert buffer(bench, "d", "a", text="x" * 90) == ["queue_full"]
    assert buffer(bench, "c", "a", text="y" * 95) == []
    bench.broker.on_gone(Side.FRONT, peer_of("c"), bench.now)
    assert buffer(bench, "d", "a", text="x" * 90) == []


def test_a_key_with_many_sessions_leaves_room_for_the_buffers_of_other_keys() -> None:
    bench = Bench(max_total_buffer_bytes=1_000)
    clients = {"ann": Allowed(public=ANN), "eve": Allowed(public=EVE)}
    bench.broker.on_keys(clients, {}, bench.now)
    codes = []
    for number in range(12):
        fields = {"name": "a", "text": "x" * 99}
        answers = bench.client(f"eve {number}", "BUFFER", fields, EVE)
        codes.append([body["code"] for _, body in answers])
    assert codes == [[]] * 5 + [["client_limit"]] * 7
    assert bench.client("ann", "BUFFER", {"name": "a", "text": "x" * 99}, ANN) == []
    for number in range(12):
        bench.broker.on_gone(Side.FRONT, peer_of(f"eve {number}"), bench.now)
    assert bench.client("eve", "BUFFER", {"name": "a", "text": "x" * 99}, EVE) == []


@pytest.mark.parametrize("fields", [{"text": "x" * 30}, {"tokens": [1] * 9}])
def test_a_buffer_that_is_refused_leaves_the_one_of_its_name(fields: dict[str, Any]) -> None:
    bench = Bench(max_buffer_bytes=20)
    bench.worker("a")
    assert buffer(bench, "c", "b", text="kept") == []
    assert buffer(bench, "c", "b", **fields) == ["too_large"]
    bench.client("c", "GENERATE", generate(1, buffers=["b"]))
    [message] = [m for m in bench.sent if m.frames[0] == b"GENERATE"]
    assert message.frames[-1] == b"skept"


@pytest.mark.parametrize(
    ("size", "times"), [(1, MAX_NAMED + 1), (MAX_NAMED_BYTES // 2 + 1, 2)], ids=["number", "bytes"]
)
def test_a_request_that_names_a_buffer_very_often_is_refused(size: int, times: int) -> None:
    bench = Bench()
    bench.worker("a")
    assert buffer(bench, "c", "b", text="x" * size) == []
    [(kind, error)] = bench.client("c", "GENERATE", generate(1, buffers=["b"] * times))
    assert (kind, error["code"], error["path"]) == ("ERROR", "too_large", "$.buffers")
    assert bench.to_worker("a") == []
    bench.client("c", "GENERATE", generate(1, buffers=["b"] * (times - 1)))
    kind, _ = bench.to_worker("a")[0]
    assert kind == "GENERATE"
