"""More requests than the workers can serve: which requests may wait, which are refused, and when a
client should try again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.broker.queue_bounds import room_for
from tokenbus.protocol.pace import BOUNDS_S, RETRY_AFTER_S, Pace
from tokenbus.protocol.shares import fits_share

from ..worlds.broker import Bench, generate
from .test_queues import end, started


def refusals(answers: list[tuple[str, Any]]) -> list[str]:
    return [body["code"] for kind, body in answers if kind == "ERROR"]


def fill(bench: Bench, client: str, count: int, first: int = 1, **fields: Any) -> list[str]:
    """Sends ``count`` requests of a client; returns the error codes of the refused requests."""
    answers = []
    for stream in range(first, first + count):
        answers += bench.client(client, "GENERATE", generate(stream, **fields))
    return refusals(answers)


def serve(bench: Bench, worker: str, seconds: float, each_s: float) -> list[int]:
    """For ``seconds``, the worker ends its running stream every ``each_s``; returns the streams
    that it has begun."""
    order = []
    for _ in range(round(seconds / each_s)):
        bench.now += each_s
        for number in started(bench, worker):
            order.append(number)
            end(bench, worker, number)
        bench.sent += bench.broker.tick(bench.now)
    return order


# --- shares ---------------------------------------------------------------------------------------


def test_one_client_cannot_fill_the_queue_for_the_others() -> None:
    bench = Bench(max_queued=80)
    bench.worker("a", capacity=1)
    assert fill(bench, "greedy", 1) == []
    refused = fill(bench, "greedy", 60, first=2)
    # The queue has 70 places for requests of this priority. The client gets half of them, and each
    # new client still gets one place.
    assert refused == ["client_limit"] * 25
    for name in "bcdefghij":
        assert fill(bench, name, 1) == []


def test_the_queued_bytes_of_one_client_leave_room_for_others() -> None:
    bench = Bench(max_queued_bytes=100_000)
    bench.worker("a", capacity=1)
    fill(bench, "c", 1)
    assert fill(bench, "c", 20, first=2, controller_arg="x" * 10_000) == ["client_limit"] * 16
    assert fill(bench, "d", 1, controller_arg="x" * 10_000) == []


def test_a_client_that_ends_its_streams_may_wait_again() -> None:
    bench = Bench(max_queued=16)
    bench.worker("a", capacity=1)
    assert fill(bench, "c", 9)[:1] == ["client_limit"]
    session = next(iter(bench.broker.state.sessions))
    assert session.queued == 7
    for stream in range(2, 9):
        bench.client("c", "CANCEL", {"stream_id": stream})
    assert (session.queued, session.queued_bytes) == (0, 0)
    assert fill(bench, "c", 7, first=20) == []


def test_a_full_queue_has_room_for_what_is_more_urgent() -> None:
    bench = Bench(max_queued=16, max_streams=1000)
    bench.worker("a", capacity=1)
    for number in range(30):
        fill(bench, f"c{number}", 1)
    assert bench.broker.state.num_queued == 14
    assert fill(bench, "low", 1, priority=-1) == ["queue_full"]
    assert fill(bench, "urgent", 1, priority=1) == []
    assert started(bench, "a") == [1]
    [worker] = bench.broker.state.workers.values()
    [running] = worker.requests.values()
    bench.client("c0", "CANCEL", {"stream_id": running.stream_id})
    end(bench, "a", running.stream_id) if running.id in worker.requests else None
    [urgent] = worker.requests.values()
    assert urgent.priority == 1


@given(
    most=st.integers(1, 40),
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200),
)
def test_shares_always_leave_room_and_never_exceed_it(
    most: int, arrivals: list[tuple[int, bool]]
) -> None:
    own = dict.fromkeys(range(7), 0)
    for client, comes in arrivals:
        total = sum(own.values())
        if not comes:
            own[client] = max(0, own[client] - 1)
        elif fits_share(own[client], total, most):
            own[client] += 1
        assert sum(own.values()) <= most
        # If a single client has all of the taken places, about the same number of places are free,
        # so a new client gets a place.
        if most > 13 and max(own.values()) == sum(own.values()):
            assert fits_share(own[6], sum(own.values()), most)


@given(st.integers(-100, 100), st.integers(1, 10**9))
def test_room_grows_with_priority(priority: int, most: int) -> None:
    assert 1 <= room_for(min(priority, 0), most) <= room_for(priority, most) <= most


# --- users of one session -------------------------------------------------------------------------


def test_users_of_one_session_take_turns() -> None:
    bench = Bench()
    bench.worker("a", capacity=1)
    fill(bench, "gateway", 1)
    fill(bench, "gateway", 3, first=10, by="ann")
    fill(bench, "gateway", 2, first=20, by="bob")
    fill(bench, "gateway", 1, first=30, by="cyd")
    [queue] = bench.broker.state.queues.values()
    places = [r.stream_id for r, _ in queue.places()]
    assert places == [10, 20, 30, 11, 21, 12]
    assert serve(bench, "a", 7.0, 1.0) == [1, *places]


# --- when to try again ----------------------------------------------------------------------------


def test_a_refusal_says_when_as_fast_as_the_queue_was_served() -> None:
    bench = Bench(max_queued=8, max_streams=1000)
    bench.worker("a", capacity=1)
    for number in range(8):
        fill(bench, f"c{number}", 1)
    # Until a first request has been served, the broker cannot estimate the wait.
    [(_, error)] = bench.client("x", "GENERATE", generate(1))
    assert (error["code"], error["retry_after_s"]) == ("queue_full", RETRY_AFTER_S)
    for number in range(20):
        serve(bench, "a", 0.5, 0.5)
        fill(bench, f"d{number}", 1)
    times = []
    for name in "xyz":
        [(_, error)] = bench.client(name, "GENERATE", generate(1))
        times.append(error["retry_after_s"])
    # A place becomes free every half second. Each refused client is sent the time of a different
    # place.
    assert times == pytest.approx([0.5, 1.0, 1.5], rel=0.3)


def test_a_client_with_too_many_streams_is_asked_to_wait_for_one_of_its_own() -> None:
    bench = Bench(max_streams=4)
    bench.worker("a", capacity=4)
    fill(bench, "c", 4)
    for number in range(10):
        bench.now += 2.0
        end(bench, "a", started(bench, "a")[0]) if number == 0 else end(bench, "a", 90 + number)
        fill(bench, "c", 1, first=91 + number)
    [(_, error)] = bench.client("c", "GENERATE", generate(500))
    assert error["code"] == "client_limit"
    assert error["retry_after_s"] == pytest.approx(2.0, rel=0.3)


@given(st.lists(st.floats(0.001, 100.0), min_size=4, max_size=60), st.floats(0, 1000))
def test_the_time_to_try_again_is_bounded(gaps: list[float], later: float) -> None:
    pace, now = Pace(), 0.0
    for gap in gaps:
        now += gap
        pace.note(now)
    least, most = BOUNDS_S
    for _ in range(20):
        assert least <= pace.retry_after_s(now + later) <= most


@given(st.floats(0.01, 1000.0), st.integers(20, 300))
def test_a_steady_pace_is_measured(rate: float, count: int) -> None:
    pace = Pace()
    for number in range(count):
        pace.note(number / rate)
    assert pace.per_s((count - 1) / rate) == pytest.approx(rate)


# --- deadlines ------------------------------------------------------------------------------------


def test_a_request_whose_time_is_over_when_its_turn_comes_is_not_computed() -> None:
    bench = Bench()
    bench.worker("a", capacity=1)
    fill(bench, "c", 1)
    fill(bench, "c", 1, first=2, timeout_s=5.0)
    fill(bench, "c", 1, first=3)
    bench.now += 5.1  # The broker does not tick meanwhile.
    end(bench, "a", 1)
    assert started(bench, "a") == [1, 3]
    [entry] = [e for kind, body in bench.to_client("c") if kind == "TOKEN" for e in body][-1:]
    assert (entry["stream_id"], entry["finish_reason"]) in [(2, "timeout"), (1, "stop")]
    assert bench.broker.state.num_queued == 0


def test_a_request_that_would_spend_its_time_waiting_is_refused_at_once() -> None:
    bench = Bench()
    bench.worker("a", capacity=1)
    fill(bench, "c", 60)
    serve(bench, "a", 20.0, 1.0)
    # 40 requests of this client wait, and one is served each second. Another session waits only for
    # its turn.
    assert fill(bench, "c", 1, first=100, timeout_s=60.0) == ["queue_full"]
    assert fill(bench, "c", 1, first=100, timeout_s=200.0) == []
    assert fill(bench, "d", 1, timeout_s=10.0) == []
    assert fill(bench, "c", 1, first=200, timeout_s=10.0, priority=1) == []
    [(_, error)] = bench.client("c", "GENERATE", generate(300, timeout_s=60.0))
    assert 2 <= error["retry_after_s"] <= 30


def test_at_ten_times_the_load_what_is_served_is_served_in_time() -> None:
    """Each request needs one second of the worker and has a time-out of ten seconds. Almost as many
    requests end in time as the worker can serve."""
    bench = Bench()
    bench.worker("a", capacity=1)
    ended = 0
    for step in range(600):
        bench.now += 0.1
        fill(bench, f"c{step % 7}", 1, first=step, timeout_s=10.0)
        if step % 10 == 9:
            [worker] = bench.broker.state.workers.values()
            for request in list(worker.requests.values()):
                if request.deadline is not None and request.deadline > bench.now:
                    ended += 1
                end(bench, "a", request.stream_id)
        bench.broker.tick(bench.now)
        bench.sent.clear()
    assert ended >= 58
    assert bench.broker.state.num_queued <= 12
