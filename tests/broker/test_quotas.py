"""The quotas of a tenant apply to all of its sessions together, and do not affect other tenants."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns
from tokenbus.protocol.header import Header, encode_header, encode_token_header
from tokenbus.protocol.keys import Allowed
from tokenbus.protocol.messages import Token
from tokenbus.protocol.packing import pack
from tokenbus.protocol.tenants import Tenant
from tokenbus.protocol.worker_messages import Heartbeat

from ..worlds.broker import Bench, generate, peer_of

ANN, BEN = "a" * 64, "b" * 64
WORKER = "c" * 64


def tenants(bench: Bench, **quotas: int) -> None:
    """Gives Ann these quotas, and Ben no quotas."""
    clients = {"ann": Allowed(public=ANN, **quotas), "ben": Allowed(public=BEN)}  # type: ignore[arg-type]
    bench.broker.on_keys(clients, {"w": Allowed(public=WORKER)}, bench.now)


def code_of(answers: list[tuple[str, Any]]) -> str:
    """The code of the error that answers a request; empty if the answer is not an error."""
    return next((body["code"] for kind, body in answers if kind == "ERROR"), "")


def error_of(answers: list[tuple[str, Any]]) -> dict[str, Any]:
    [(_, error)] = [a for a in answers if a[0] == "ERROR"]
    found: dict[str, Any] = error
    return found


def send_tokens(bench: Bench, to: Header, number: int, columns: bool) -> None:
    """Sends ``number`` tokens of a stream through the broker, as a worker with a key does."""
    entries = [
        Token(token=n, stream_id=1, logprob=-1.0, finish_reason=None, pos=n) for n in range(number)
    ]
    body = encode_body(
        pack_columns(entries) if columns else list(entries), "msgpack" if columns else "json"
    )
    head = encode_token_header([to.address])
    message = (peer_of("w"), pack([b"TOKEN", head, body]), WORKER)
    bench.sent += bench.broker.on_keyed_workers([message], bench.now)


def test_live_streams_are_bounded_over_all_sessions_of_a_tenant() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=9)
    tenants(bench, streams=2)
    for client in ("one", "two"):
        assert not code_of(bench.client(client, "GENERATE", generate(1), ANN))
    error = error_of(bench.client("three", "GENERATE", generate(1), ANN))
    assert error["code"] == "client_limit"
    assert "the quota streams of this key is used up: 2 streams are live" in error["message"]
    assert error["retry_after_s"] > 0
    assert not code_of(bench.client("other", "GENERATE", generate(1), BEN))
    # After the end of a stream, there is room for another one.
    (_, first), *_ = bench.to_worker("w")
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("w", first, end, final=True)
    assert not code_of(bench.client("three", "GENERATE", generate(2), ANN))
    assert code_of(bench.client("one", "GENERATE", generate(2), ANN)) == "client_limit"


def test_the_streams_of_a_session_that_ends_do_not_count() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=9)
    tenants(bench, streams=1)
    assert not code_of(bench.client("one", "GENERATE", generate(1), ANN))
    bench.client("one", "BYE", {}, ANN)
    assert not code_of(bench.client("two", "GENERATE", generate(1), ANN))


@pytest.mark.parametrize("columns", [False, True])
def test_tokens_of_a_minute_are_bounded(columns: bool) -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=9)
    tenants(bench, tokens_per_minute=60)
    if columns:
        hello = {"encodings": ["msgpack"], "capabilities": ["columns"]}
        bench.client("one", "HELLO", hello, ANN)
    assert not code_of(bench.client("one", "GENERATE", generate(1), ANN))
    [(_, header)] = bench.to_worker("w")
    send_tokens(bench, header, 40, columns)
    assert not code_of(bench.client("two", "GENERATE", generate(1), ANN))
    send_tokens(bench, header, 50, columns)
    error = error_of(bench.client("two", "GENERATE", generate(2), ANN))
    assert error["code"] == "client_limit"
    assert "the quota tokens_per_minute of this key is used up: 90 tokens" in error["message"]
    assert "the quota is 60" in error["message"]
    assert error["retry_after_s"] == 31.0
    assert not code_of(bench.client("other", "GENERATE", generate(1), BEN))
    # The running stream continues. Its further tokens delay new streams too.
    send_tokens(bench, header, 1, columns)
    bench.pass_time(30.0)
    assert code_of(bench.client("two", "GENERATE", generate(2), ANN)) == "client_limit"
    bench.pass_time(2.0)
    assert not code_of(bench.client("two", "GENERATE", generate(2), ANN))


def test_cpu_time_of_controllers_is_bounded_as_workers_report_it() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=9)
    bench.worker("c", role="controller", patterns=["*"], capacity=9)
    tenants(bench, sandbox_ms_per_minute=600)

    def beat(**cpu_ms: int) -> None:
        body = Heartbeat(sandbox_ms={ANN: cpu_ms["ann"], BEN: cpu_ms["ben"]})
        message = [b"HEARTBEAT", encode_header(), encode_body(body, "msgpack")]
        bench.sent += bench.broker.on_worker(peer_of("c"), message, bench.now)

    beat(ann=500, ben=5_000)
    assert not code_of(bench.client("one", "GENERATE", generate(1, controller="m"), ANN))
    # A worker reports totals. They are counted once, even if the worker has a new lease.
    bench.worker("c", role="controller", patterns=["*"], capacity=9)
    beat(ann=500, ben=5_000)
    beat(ann=1_200, ben=5_000)
    error = error_of(bench.client("one", "GENERATE", generate(2, controller="m"), ANN))
    assert error["code"] == "client_limit"
    assert "the quota sandbox_ms_per_minute of this key is used up: 1200 ms" in error["message"]
    assert error["retry_after_s"] == pytest.approx(60.1)
    assert not code_of(bench.client("one", "GENERATE", generate(3), ANN))
    assert not code_of(bench.client("other", "GENERATE", generate(1, controller="m"), BEN))
    bench.pass_time(61.0)
    assert not code_of(bench.client("one", "GENERATE", generate(4, controller="m"), ANN))


def test_a_controller_worker_learns_the_quota_of_the_store() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("c", role="controller", patterns=["*"], capacity=9)
    tenants(bench, upload_bytes=1_000)
    for client, key in (("one", ANN), ("other", BEN)):
        bench.client(client, "TAGS", {"stream_id": 1}, key)
    sent = [Tenant.decode(m.frames[-1]) for m in bench.sent if m.frames[0] == b"TAGS"]
    assert sent == [Tenant(ANN, 1_000), Tenant(BEN, None)]


def test_the_state_worker_learns_the_quota_of_variables() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=9)
    bench.worker("c", role="controller", patterns=["*"], capacity=9)
    bench.worker("s", role="state", patterns=[], capacity=9)
    tenants(bench, variable_bytes=5_000)
    for client, key in (("one", ANN), ("other", BEN)):
        bench.client(client, "GENERATE", generate(1, controller="m"), key)
    for _, header in bench.to_worker("w"):
        message = [b"VARIABLE", encode_header(header.request), b"op"]
        bench.sent += bench.broker.on_worker(peer_of("c"), message, bench.now)
    sent = [m.frames[2:] for m in bench.sent if m.frames[0] == b"VARIABLE"]
    assert sent == [
        (b"op", Tenant(key, quota).encode()) for key, quota in ((ANN, 5_000), (BEN, None))
    ]


def test_a_quota_that_is_changed_holds_at_once() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=9)
    tenants(bench, streams=1)
    assert not code_of(bench.client("one", "GENERATE", generate(1), ANN))
    assert code_of(bench.client("one", "GENERATE", generate(2), ANN)) == "client_limit"
    tenants(bench, streams=2)
    assert not code_of(bench.client("one", "GENERATE", generate(2), ANN))
