"""A broker that is replaced by another broker ends the requests that the other broker cannot adopt,
and then leaves."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.worker_messages import Drain, Heartbeat, Unregister

from ..worlds.broker import Bench, generate, peer_of


@pytest.fixture
def bench() -> Bench:
    """A broker, two workers with room for one request each, a client that can resume its session,
    and a client that cannot."""
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0)
    bench.worker("a", capacity=1)
    bench.worker("b", capacity=1)
    bench.client("returns", "HELLO", {"capabilities": ["recover"]})
    bench.client("typed", "HELLO", {})
    return bench


def codes(bench: Bench, client: str) -> list[tuple[int, Any]]:
    """The streams and codes of the errors that a client received."""
    return [(e["stream_id"], e["code"]) for kind, e in bench.to_client(client) if kind == "ERROR"]


def leave(bench: Bench) -> None:
    assert bench.broker.can_leave
    bench.sent += bench.broker.left()


def test_it_leaves_at_once_where_its_successor_adopts_what_runs(bench: Bench) -> None:
    bench.client("returns", "GENERATE", generate(1))
    bench.sent += bench.broker.leave()
    bench.client("returns", "GENERATE", generate(2))
    bench.to_client("returns")
    leave(bench)
    assert codes(bench, "returns") == []
    assert all(kind != "CANCEL" for name in "ab" for kind, _ in bench.to_worker(name))


def test_what_waits_for_a_worker_is_refused_and_may_be_sent_again(bench: Bench) -> None:
    for stream in range(4):
        bench.client("returns", "GENERATE", generate(stream))
    bench.sent += bench.broker.leave()
    bench.to_client("returns")
    leave(bench)
    errors = {e["stream_id"]: e for kind, e in bench.to_client("returns") if kind == "ERROR"}
    assert {n: e["code"] for n, e in errors.items()} == dict.fromkeys((2, 3), "shutting_down")
    assert all(e["retry_after_s"] > 0 for e in errors.values())


@pytest.mark.parametrize("finishes", [True, False])
def test_streams_of_a_client_that_cannot_come_back_are_finished(
    bench: Bench, finishes: bool
) -> None:
    bench.client("typed", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.sent += bench.broker.leave()
    assert not bench.broker.can_leave
    # This client cannot begin further streams; other clients can.
    [(_, error)] = bench.client("typed", "GENERATE", generate(2))
    assert (error["stream_id"], error["code"]) == (2, "shutting_down")
    bench.client("returns", "GENERATE", generate(1))
    assert [kind for kind, _ in bench.to_worker("b")] == ["GENERATE"]
    if finishes:
        bench.tokens("a", header, final=True)
        leave(bench)
    else:
        # The time for finishing the stream is over.
        bench.sent += bench.broker.left()
    assert codes(bench, "typed") == ([] if finishes else [(1, "shutting_down")])
    assert codes(bench, "returns") == []


def test_what_moves_goes_on_at_another_worker_first(bench: Bench) -> None:
    bench.client("returns", "GENERATE", generate(1))
    bench.client("returns", "GENERATE", generate(2))
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    bench.sent += bench.broker.leave()
    assert not bench.broker.can_leave
    bench.worker("c")
    leave(bench)
    assert codes(bench, "returns") == []


def test_where_no_worker_is_left_it_waits_for_none(bench: Bench) -> None:
    bench.client("returns", "GENERATE", generate(1))
    for name in "ab":
        bench.send(name, "UNREGISTER", Unregister())
    bench.sent += bench.broker.leave()
    leave(bench)
    assert codes(bench, "returns") == [(1, "shutting_down")]


def test_where_its_workers_are_restarted_too_their_streams_are_refused_at_once(
    bench: Bench,
) -> None:
    """If the streams were not refused, the next broker would wait for these workers for
    ``recover_s``."""
    bench.worker("steers", role="controller")
    bench.client("returns", "GENERATE", generate(1))
    bench.sent += bench.broker.leave()
    bench.send("a", "DRAIN", Drain(reason="SIGTERM", successor=True))
    assert not bench.broker.can_leave
    bench.send("b", "DRAIN", Drain(reason="SIGTERM", successor=True))
    for name in "ab":
        bench.send(name, "UNREGISTER", Unregister(reason="SIGTERM"))
    leave(bench)
    assert codes(bench, "returns") == [(1, "shutting_down")]


def test_a_worker_whose_step_began_before_may_have_a_signal_that_it_has_not_handled(
    bench: Bench,
) -> None:
    bench.client("returns", "GENERATE", generate(1))
    bench.sent += bench.broker.leave()
    signalled_at = bench.now
    bench.now += 1.0
    bench.send("a", "HEARTBEAT", Heartbeat(step_age_s=1.5))
    assert not bench.broker.stepped_since(signalled_at)
    bench.send("a", "HEARTBEAT", Heartbeat(step_age_s=0.5))
    assert bench.broker.stepped_since(signalled_at)
    bench.now += 1.0
    assert not bench.broker.stepped_since(bench.now)
    bench.now += 1.0
    bench.send("a", "HEARTBEAT", Heartbeat())
    assert bench.broker.stepped_since(bench.now - 1.0)
