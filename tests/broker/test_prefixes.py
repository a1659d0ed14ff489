"""A request is sent to a worker whose cache has the beginning of the request's prompt, unless this
worker has much more load than another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.prefixes import MAX_EXPECTED, MAX_PAGES, REQUEST_TOKENS, _beginning
from tokenbus.protocol.bodies import encode_body, pack_tokens
from tokenbus.protocol.header import Header, encode_header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.pages import PAGE_BYTES, PAGE_TOKENS, first_key, join_keys, page_keys
from tokenbus.protocol.worker_messages import Pages

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check

LONG = [n % 997 for n in range(4 * PAGE_TOKENS)]
OTHER = [n % 991 + 1 for n in range(4 * PAGE_TOKENS)]


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for name in ("a", "b"):
        bench.worker(name, capacity=100)
    return bench


def _send(bench: Bench, stream: int, prompt: list[int] | str, **fields: Any) -> str:
    """Sends a request; returns the name of the worker that receives it, or an empty string if it is
    queued."""
    body = generate(stream) | fields
    del body["prompt"]
    frames = (
        [b"GENERATE", b"", pack_tokens(prompt)] if isinstance(prompt, list) else [b"GENERATE", b""]
    )
    if isinstance(prompt, str):
        body["prompt"] = prompt
    frames[1] = msgspec.json.encode(body)
    bench.sent += bench.broker.on_client(peer_of("c"), frames, bench.now)
    check(bench.broker)
    session = bench.broker.state.sessions.by_peer[peer_of("c")]
    worker = session.streams[stream].worker
    return worker.name if worker is not None else ""


def _report(
    bench: Bench, name: str, came: list[int], went: list[int] | None = None, reset: bool = False
) -> None:
    keys = [
        join_keys(list(page_keys(first_key("m"), pack_tokens(tokens), 99)))
        for tokens in (came, went or [])
    ]
    body = encode_body(Pages(reset=reset), "msgpack")
    bench.broker.on_worker(peer_of(name), [b"PAGES", encode_header(), body, *keys], bench.now)


def _finish(bench: Bench, stream: int) -> None:
    session = bench.broker.state.sessions.by_peer[peer_of("c")]
    request = session.streams[stream]
    assert request.worker is not None
    end = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop", live=0)
    bench.tokens(request.worker.name, Header(request.id, session.id, 0), end, final=True)


def test_a_request_goes_to_the_worker_of_an_earlier_request_with_the_same_beginning(
    bench: Bench,
) -> None:
    first = _send(bench, 1, LONG)
    assert _send(bench, 2, OTHER) != first
    assert _send(bench, 3, [*LONG, 1, 2, 3]) == first
    assert _send(bench, 4, [*LONG[: 2 * PAGE_TOKENS], *OTHER]) == first


def test_a_request_goes_to_the_worker_that_reports_most_of_its_prompt(bench: Bench) -> None:
    _report(bench, "a", LONG[:PAGE_TOKENS])
    _report(bench, "b", LONG[: 3 * PAGE_TOKENS])
    assert _send(bench, 1, LONG) == "b"


def test_load_outweighs_cached_tokens(bench: Bench) -> None:
    _report(bench, "b", LONG)
    most = len(LONG) // REQUEST_TOKENS
    names = [_send(bench, stream, LONG) for stream in range(most + 2)]
    assert names[:most] == ["b"] * most
    assert "a" in names


def test_pages_that_a_worker_has_dropped_attract_no_request(bench: Bench) -> None:
    _report(bench, "b", LONG)
    _report(bench, "b", [], went=LONG)
    assert _send(bench, 1, LONG) == "a"


def test_a_reset_drops_the_pages_that_were_reported_before(bench: Bench) -> None:
    _report(bench, "b", LONG)
    _report(bench, "b", OTHER, reset=True)
    assert _send(bench, 1, LONG) == "a"
    assert _send(bench, 2, OTHER) == "b"


def test_a_full_worker_and_one_of_another_model_get_nothing(bench: Bench) -> None:
    bench.worker("full", capacity=1)
    bench.worker("else", capacity=100, patterns=["n"], default="m")
    _report(bench, "full", LONG)
    _report(bench, "else", LONG)
    assert _send(bench, 1, LONG) == "full"
    assert _send(bench, 2, LONG) in ("a", "b")


def test_a_text_goes_to_the_worker_of_a_text_with_the_same_beginning(bench: Bench) -> None:
    text = "the same words again and again; " * 200
    first = _send(bench, 1, text)
    _send(bench, 2, "other words, " * 500)
    assert _send(bench, 3, text + "and an end") == first


def test_a_prompt_goes_to_the_worker_of_an_earlier_prompt_with_the_same_buffer(
    bench: Bench,
) -> None:
    for name, tokens in (("x", LONG), ("y", OTHER)):
        frames = [b"BUFFER", msgspec.json.encode({"name": name}), pack_tokens(tokens)]
        bench.broker.on_client(peer_of("c"), frames, bench.now)
    first = _send(bench, 1, [7] * 9, buffers=["x"])
    assert _send(bench, 2, [7] * 9, buffers=["y"]) != first
    assert _send(bench, 3, [8] * 9, buffers=["x"]) == first


def test_a_stream_that_moves_goes_to_a_worker_that_has_its_prompt(bench: Bench) -> None:
    bench.worker("z", capacity=100)
    first = _send(bench, 1, LONG)
    others = sorted({"a", "b", "z"} - {first})
    _report(bench, others[1], LONG)
    bench.broker.on_worker(
        peer_of(first), [b"UNREGISTER", encode_header(), encode_body({}, "msgpack")], bench.now
    )
    check(bench.broker)
    session = bench.broker.state.sessions.by_peer[peer_of("c")]
    worker = session.streams[1].worker
    assert worker is not None
    assert worker.name == others[1]


def test_the_pages_of_a_lost_worker_are_removed(bench: Bench) -> None:
    prefixes = bench.broker.prefixes
    for name in ("a", "b"):
        _report(bench, name, LONG)
    _send(bench, 1, OTHER)
    _finish(bench, 1)
    assert prefixes.size == 12
    for name in ("a", "b"):
        leave = [b"UNREGISTER", encode_header(), encode_body({}, "msgpack")]
        bench.broker.on_worker(peer_of(name), leave, bench.now)
    assert prefixes.size == 0


def test_the_number_of_expected_pages_is_bounded(bench: Bench) -> None:
    prefixes = bench.broker.prefixes
    for stream in range(2 * MAX_EXPECTED // 100 + 2):
        _send(bench, stream, [stream] * (100 * PAGE_TOKENS))
        _finish(bench, stream)
    assert prefixes.size <= 2 * MAX_EXPECTED


def test_without_the_setting_requests_go_to_the_least_loaded_worker() -> None:
    bench = Bench(route_by_prefix=False)
    for name in ("a", "b"):
        bench.worker(name, capacity=100)
    assert _send(bench, 1, LONG) != _send(bench, 2, LONG)
    assert bench.broker.prefixes.size == 0


def test_a_report_without_its_attachments_is_dropped(bench: Bench) -> None:
    frames = [b"PAGES", encode_header(), encode_body(Pages(), "msgpack")]
    bench.broker.on_worker(peer_of("a"), frames, bench.now)
    assert bench.broker.state.counters.bad_worker_messages == 1
    check(bench.broker)


def test_many_large_buffers_are_copied_only_up_to_the_maximum_number_of_pages() -> None:
    most = MAX_PAGES * PAGE_BYTES
    parts = [bytes([n]) * size for n, size in enumerate((most - 7, 0, 5, most, most))]
    assert _beginning(parts) == b"".join(parts)[:most]
    assert _beginning(parts[:3]) == b"".join(parts[:3])


def test_a_large_buffer_routes_like_its_beginning(bench: Bench) -> None:
    bench.client("c", "HELLO")
    for name, byte in (("x", b"x"), ("y", b"y")):
        content = byte * (2 * MAX_PAGES * PAGE_BYTES)
        frames = [b"BUFFER", msgspec.json.encode({"name": name}), content]
        bench.broker.on_client(peer_of("c"), frames, bench.now)
    first = _send(bench, 1, "", buffers=["x", "y"])
    assert _send(bench, 2, "", buffers=["y", "x"]) != first
    assert _send(bench, 3, "", buffers=["x", "x"]) == first
