"""Fences discard messages about attempts that the broker has given up. They end with a CLAIMED or a
JOURNAL."""

from __future__ import annotations

import pytest
from tokenbus.broker.fences import NO_SESSION, Fences
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.header import Flag, Header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Claimed, LiveRequest

from ..worlds.broker import Bench, generate, peer_of
from .test_several_brokers import REQUEST, SESSION, claimed, entry, hello, journal, kinds


def test_each_claimed_ends_the_fences_of_its_claim() -> None:
    fences = Fences()
    first, second = fences.add(1, 7, 1), fences.add(2, 7, 2)
    assert fences.unasked(7) == [first, second]
    fences.asked([first], 1.0)
    fences.asked([], 2.0)
    fences.asked([second], 3.0)
    assert (fences.unasked(7), fences.all_unasked(), fences.waited_s(5.0)) == ([], [], 4.0)
    fences.answered(NO_SESSION, 0.0)
    assert fences.by_session == {7: {2: [second]}}
    assert fences.waited_s(5.0) == 3.0
    fences.answered(NO_SESSION, 0.0)
    assert fences
    fences.answered(NO_SESSION, 0.0)
    assert not fences
    assert fences.by_session == {}
    with pytest.raises(RequestError, match="without a CLAIM"):
        fences.answered(NO_SESSION, 0.0)


def test_a_claimed_ends_the_fences_of_its_own_session() -> None:
    fences = Fences()
    fences.asked([fences.add(1, 7, 1)], 1.0, 7)
    void = fences.add(2, 8, 1)
    void.void = fences.asked([void], 1.0)
    with pytest.raises(RequestError, match="CLAIMED of session 8 came without a CLAIM"):
        fences.answered(8, 2.0)
    fences.answered(NO_SESSION, 2.0)
    assert fences.of(7, 1)
    assert not fences.is_void(2)
    fences.answered(7, 2.0)
    assert not fences


def test_a_report_restarts_the_time_limit_of_answers() -> None:
    fences = Fences()
    fences.asked([], 1.0)
    fences.progressed(3.0)
    assert fences.waited_s(5.0) == 2.0
    fences.asked([], 4.0)
    fences.answered(NO_SESSION, 4.5)
    assert fences.waited_s(5.0) == 0.5


def test_a_fence_that_begins_anew_ends_with_the_later_claimed() -> None:
    fences = Fences()
    fences.asked([fences.add(1, 7, 1)], 1.0)
    fences.asked([fences.add(1, 7, 1)], 2.0)
    fences.answered(NO_SESSION, 0.0)
    assert fences.of(7, 1)
    fences.answered(NO_SESSION, 0.0)
    assert not fences.of(7, 1)


def test_messages_are_void_until_the_order_to_drop_is_confirmed() -> None:
    fences = Fences()
    fence = fences.add(1, 7, 1)
    fence.void = fences.asked([fence], 1.0)
    # In the meantime, the client has connected to another broker and come back, so a second fence
    # is added.
    fences.add(1, 7, 1)
    assert fences.is_void(1)
    fences.answered(NO_SESSION, 0.0)
    assert not fences.is_void(1)
    assert fences.of(7, 1)
    fences.reported(1)
    assert not fences


def test_streams_with_one_number_have_a_fence_each() -> None:
    fences = Fences()
    for request in (1, 2):
        fences.asked([fences.add(request, 7, 1)], 1.0)
    fences.answered(NO_SESSION, 0.0)
    assert [fence.request for fence in fences.of(7, 1)] == [2]


@pytest.fixture
def bench() -> Bench:
    """A broker with two workers."""
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0)
    for name in ("a", "b"):
        bench.worker(name)
    return bench


def test_a_stream_that_goes_on_at_its_worker_has_no_fence_after_its_report(bench: Bench) -> None:
    """The stream's tokens reach the client, although the worker has not answered the CLAIM yet."""
    hello(bench, "d", encodings=["msgpack"])
    journal(bench, "a", 1)
    claimed(bench, "a", "b")
    hello(bench, encodings=["msgpack"])
    bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
    to = Header(REQUEST, SESSION, Flag.MSGPACK)
    bench.tokens("a", to, entry(1))
    assert bench.to_client("c") == []
    journal(bench, "a", 2)
    [_, (_, [missed])] = bench.to_client("c")
    assert missed["token"] == 101
    bench.tokens("a", to, entry(2))
    [(_, [new])] = bench.to_client("c")
    assert new["token"] == 102


def test_a_worker_that_registers_again_ends_its_fences() -> None:
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0, recover_s=30.0)
    live = [LiveRequest(request=REQUEST, session=SESSION, stream_id=1)]
    bench.worker("a", live=live)
    journal(bench, "a", 1)
    bench.worker("b")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("a"), bench.now)
    assert kinds(bench, "b") == ["GENERATE"]
    bench.worker("a", live=live)
    assert kinds(bench, "a") == ["CLAIM"]
    [worker] = [w for w in bench.broker.state.workers.values() if w.name == "a"]
    assert worker.fences
    bench.send("a", "CLAIMED", Claimed(session=0))
    assert not worker.fences


def test_a_session_that_began_here_adopts_no_stream() -> None:
    """A worker that was cut off may report an earlier stream of the session, which the session does
    not adopt."""
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0, recover_s=30.0)
    bench.worker("a")
    bench.client("c", "HELLO", {"capabilities": ["recover", "ping"]})
    bench.client("c", "GENERATE", generate(2))
    [session] = bench.broker.state.sessions
    live = [LiveRequest(request=REQUEST, session=session.id, stream_id=1)]
    bench.worker("b", live=live)
    journal(bench, "b", 3, session=session.id)
    assert session.streams.keys() == {2}
    assert kinds(bench, "b") == ["CLAIM"]
    token = Token(token=5, stream_id=1, logprob=0.0, finish_reason=None)
    bench.to_client("c")
    bench.tokens("b", Header(REQUEST, session.id, 0), token)
    assert bench.to_client("c") == []
