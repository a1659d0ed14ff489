"""No client is served before its turn unless it has the right to, and no client takes the places of
all others."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.broker.queue_bounds import MAX_QUEUES
from tokenbus.broker.sessions import MAX_SEARCHED
from tokenbus.protocol.header import Header
from tokenbus.protocol.keys import Allowed
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Unregister

from ..worlds.broker import Bench, generate

ANN, BEN, OPERATOR = "a" * 64, "b" * 64, "d" * 64


def keyed(**settings: Any) -> Bench:
    """A broker with the keys of two tenants and of the operator, and a worker with one place."""
    bench = Bench(expiry_s=600, **settings)
    clients = {
        "ann": Allowed(public=ANN),
        "ben": Allowed(public=BEN, max_priority=3),
        "operator": Allowed(public=OPERATOR, operator=True),
    }
    bench.broker.on_keys(clients, {}, bench.now)
    bench.worker("w", capacity=1)
    return bench


def ask(bench: Bench, client: str, stream: int, key: str = "", **fields: Any) -> str:
    """Sends a request; returns the code of the error that answers it, or ``""``."""
    answers = bench.client(client, "GENERATE", generate(stream, **fields), key)
    return next((body["code"] for kind, body in answers if kind == "ERROR"), "")


def served(bench: Bench, count: int) -> list[int]:
    """The next ``count`` streams that the worker receives; each stream ends as soon as the worker
    has received it."""
    found = []
    for _ in range(count):
        [worker] = bench.broker.state.workers.values()
        [running] = worker.requests.values()
        found.append(running.stream_id)
        entry = Token(token=1, stream_id=running.stream_id, logprob=0.0, finish_reason="stop")
        bench.tokens("w", Header(running.id, running.session.id), entry, final=True)
    return found


def test_without_keys_the_setting_bounds_the_priority() -> None:
    bench = Bench(max_priority=0)
    bench.worker("w", capacity=1)
    assert ask(bench, "c", 1, priority=1) == "not_allowed"
    assert ask(bench, "c", 1, priority=0) == ""
    assert ask(bench, "c", 2, priority=-5) == ""


def test_only_a_key_with_the_right_raises_the_priority() -> None:
    bench = keyed()
    assert ask(bench, "ann", 1, ANN, priority=1) == "not_allowed"
    assert ask(bench, "ben", 1, BEN, priority=3) == ""
    assert ask(bench, "ben", 2, BEN, priority=4) == "not_allowed"
    assert ask(bench, "operator", 1, OPERATOR, priority=100) == ""


def test_keys_take_turns_however_many_sessions_they_have() -> None:
    bench = keyed()
    ask(bench, "ann 0", 1, ANN)
    for number in range(4):
        ask(bench, f"ann {number}", 10 + number, ANN)
    for stream in (20, 21):
        ask(bench, "ben", stream, BEN)
    [queue] = bench.broker.state.queues.values()
    places = [request.stream_id for request, _ in queue.places()]
    assert places == [10, 20, 11, 21, 12, 13]
    assert served(bench, 7) == [1, *places]


def test_a_key_without_a_stream_at_a_worker_waits_for_no_other_key() -> None:
    bench = keyed()
    bench.send("w", "UNREGISTER", Unregister())
    bench.worker("big", capacity=16)
    for stream in range(20):
        ask(bench, "ann", stream, ANN)
    [worker] = bench.broker.state.workers.values()
    assert len(worker.requests) == 16
    assert ask(bench, "ben", 100, BEN) == ""
    assert [r.stream_id for r in worker.requests.values()][16:] == [100]
    # The second stream of BEN waits, and another stream of ANN waits too.
    ask(bench, "ben 2", 101, BEN)
    ask(bench, "ann 2", 102, ANN)
    assert len(worker.requests) == 17


def test_a_queued_request_gets_a_place_although_others_go_above_the_capacity() -> None:
    bench = Bench()
    bench.worker("w", capacity=16)
    for stream in range(20):
        ask(bench, f"client {stream}", stream)
    [worker] = bench.broker.state.workers.values()
    assert len(worker.requests) == 18
    ended: set[int] = set()
    for _ in range(40):
        running = next(iter(worker.requests.values()))
        ended.add(running.stream_id)
        entry = Token(token=1, stream_id=running.stream_id, logprob=0.0, finish_reason="stop")
        bench.tokens("w", Header(running.id, running.session.id), entry, final=True)
        # The client whose stream has ended begins the next one at once.
        ask(bench, f"client {running.stream_id}", running.stream_id)
        assert len(worker.requests) <= 18
    assert ended == set(range(20))


def test_places_beyond_the_capacity_are_bounded_and_for_no_lower_priority() -> None:
    bench = Bench(max_priority=5)
    bench.worker("w", capacity=16)
    for stream in range(16):
        ask(bench, "c", stream)
    ask(bench, "c", 16, priority=3)
    [worker] = bench.broker.state.workers.values()
    ask(bench, "d", 1)
    assert len(worker.requests) == 16
    for client in "efg":
        ask(bench, client, 1, priority=3)
    assert len(worker.requests) == 18


def test_users_of_a_session_have_half_of_the_places_beyond_the_capacity() -> None:
    bench = Bench()
    bench.worker("w", capacity=32)
    for stream in range(34):
        ask(bench, "gateway", stream, by="eve")
    [worker] = bench.broker.state.workers.values()
    assert len(worker.requests) == 32
    for stream in range(34, 40):
        ask(bench, "gateway", stream, by=f"user {stream}")
    assert len(worker.requests) == 34
    ask(bench, "another", 1)
    assert len(worker.requests) == 35


def test_the_room_in_the_queue_is_shared_by_keys() -> None:
    bench = keyed(max_queued=16)
    ask(bench, "ann 0", 1, ANN)
    codes = [ask(bench, f"ann {number}", 2, ANN) for number in range(1, 14)]
    # The requests of this priority have 14 places. A key has half of them, even if no other key has
    # requests.
    assert codes == [""] * 7 + ["client_limit"] * 6
    assert [ask(bench, f"ben {number}", 1, BEN) for number in range(3)] == [""] * 3


def test_a_session_leaves_room_to_the_others_of_its_key() -> None:
    bench = keyed(max_queued=32)
    ask(bench, "ann 0", 1, ANN)
    # A key has at most 14 of 28 places, and one session of the key has half of these.
    assert [ask(bench, "ann 0", 2 + n, ANN) for n in range(9)].count("") == 7
    assert ask(bench, "ann 1", 1, ANN) == ""


def test_a_key_leaves_sessions_to_others() -> None:
    bench = keyed(max_sessions=8)
    for number in range(6):
        ask(bench, f"ann {number}", 1, ANN)
    assert len(bench.broker.state.sessions.of_key(ANN)) == 4
    assert ask(bench, "ann 7", 1, ANN) == "client_limit"
    assert ask(bench, "ben", 1, BEN) == ""


def test_a_key_at_its_share_loses_its_own_idle_sessions_only() -> None:
    bench = keyed(max_sessions=8)
    [(_, welcome)] = bench.client("ben", "HELLO", {}, BEN)
    for number in range(20):
        bench.client(f"ann {number}", "HELLO", {}, ANN)
    assert len(bench.broker.state.sessions.of_key(ANN)) <= 4
    assert bench.broker.state.sessions.of(welcome["session"], BEN) is not None


@pytest.mark.parametrize("key", [ANN, ""])
def test_each_client_without_a_place_searches_some_sessions_only(key: str) -> None:
    """All sessions have a live stream, except the one that the search reaches last."""
    bench = Bench(max_sessions=3 * MAX_SEARCHED)
    bench.worker("w", capacity=10_000)
    number = 3 * MAX_SEARCHED // (2 if key else 1)
    for name in range(number - 1):
        assert ask(bench, f"{name}", 1, key) == ""
    [(_, welcome)] = bench.client("idle", "HELLO", {}, key)
    sessions = bench.broker.state.sessions
    refused = 0
    while sessions.of(welcome["session"], key) is not None:
        [(verb, _)] = bench.client(f"new {refused}", "HELLO", {}, key)
        assert (verb == "ERROR") == (sessions.of(welcome["session"], key) is not None)
        refused += verb == "ERROR"
    assert refused == (number - 1) // MAX_SEARCHED


def test_no_client_makes_a_queue_for_each_of_thousands_of_models() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=1, patterns=["m", "/models/*"])
    ask(bench, "ann", 1)
    answers = [ask(bench, "ann", 10 + n, model=f"/models/{n}") for n in range(MAX_QUEUES)]
    assert answers == [""] * (MAX_QUEUES // 2) + ["client_limit"] * (MAX_QUEUES // 2)
    assert ask(bench, "ann", 2, model="/models/0") == ""
    assert ask(bench, "ben", 1, model="/models/ben") == ""


def test_the_users_of_a_gateway_divide_its_share_of_the_queues() -> None:
    bench = Bench(expiry_s=600)
    bench.worker("w", capacity=1, patterns=["m", "/models/*"])
    ask(bench, "gateway", 1, by="ann")
    for n in range(MAX_QUEUES):
        ask(bench, "gateway", 10 + n, by="ann", model=f"/models/{n}")
    assert len(bench.broker.state.queues) == MAX_QUEUES // 4
    assert ask(bench, "gateway", 2, by="ben", model="/models/ben") == ""


def test_a_key_has_its_share_of_the_queues_in_all_its_sessions() -> None:
    bench = keyed()
    bench.worker("w2", capacity=1, patterns=["m", "/models/*"])
    for stream in (1, 2):
        ask(bench, "first", stream, ANN)
    answers = [ask(bench, f"{n}", 1, ANN, model=f"/models/{n}") for n in range(MAX_QUEUES)]
    assert answers.count("") == MAX_QUEUES // 2
    assert ask(bench, "ben", 1, BEN, model="/models/ben") == ""
