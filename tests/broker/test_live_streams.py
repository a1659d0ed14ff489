"""STATUS with ``streams`` lists the running and waiting streams that the client may see, with their
clients and workers."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import pytest
from tokenbus.broker.request import Request
from tokenbus.protocol.messages import Token
from tokenbus.protocol.metrics import Series
from tokenbus.protocol.worker_messages import Heartbeat

from ..processes import Bus
from ..worlds.broker import Bench, generate


def live(bench: Bench, name: str, key: str = "") -> list[dict[str, Any]]:
    *_, (_, answer) = bench.client(name, "STATUS", {"stream_id": 99, "streams": True}, key)
    found: list[dict[str, Any]] = answer["status"].get("live", [])
    return found


def test_running_and_waiting_requests_are_listed_in_the_order_of_their_arrival() -> None:
    bench = Bench()
    bench.worker("a", capacity=1)
    bench.client("c", "HELLO", {"client": "prog 1.0"})
    bench.client("c", "GENERATE", generate(1, model="", priority=4))
    bench.pass_time(2.0)
    bench.client("d", "SCORE", {"stream_id": 1, "model": "m", "prompt": [1], "scored": [2]})
    running, waiting = live(bench, "c")
    assert running == {
        "request": running["request"],
        "type": "GENERATE",
        "state": "running",
        "age_s": 2.0,
        "client": "prog 1.0",
        "model": "m",
        "worker": "a",
        "priority": 4,
    }
    assert waiting == {
        "request": waiting["request"],
        "type": "SCORE",
        "state": "waiting",
        "age_s": 0.0,
        "model": "m",
    }
    [(_, header)] = bench.to_worker("a")
    assert header.request == running["request"]
    end = Token(token=5, stream_id=1, logprob=-1.0, finish_reason="stop")
    bench.tokens("a", header, end, final=True)
    assert [stream["type"] for stream in live(bench, "c")] == ["SCORE"]


def test_without_streams_nothing_is_listed() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, answer)] = bench.client("c", "STATUS", {"stream_id": 99})
    assert answer["status"]["streams"] == 1
    assert "live" not in answer["status"]


def test_the_streams_of_another_key_are_not_listed() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1), "key-c")
    assert live(bench, "d", "key-d") == []
    assert len(live(bench, "e", "key-c")) == 1


def test_a_gateway_sees_its_own_streams_only() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    bench.client("g", "HELLO", {"capabilities": ["gateway"]})
    assert live(bench, "g") == []
    bench.client("g", "GENERATE", generate(2))
    [own] = live(bench, "g")
    assert [own["request"]] == [s["request"] for s in live(bench, "c")][1:], "a stream is missing"


def test_a_gateway_that_takes_a_local_session_over_sees_no_more() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, welcome)] = bench.client("d", "HELLO")
    assert len(live(bench, "d")) == 1
    hello = {"session": welcome["session"], "capabilities": ["gateway"]}
    bench.client("g", "HELLO", hello)
    assert live(bench, "g") == []


def test_whoever_asks_for_the_streams_of_its_session_gets_these_only() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    asked = {"stream_id": 9, "streams": True, "own": True}
    [(_, answer)] = bench.client("d", "STATUS", asked)
    assert answer["status"].get("live", []) == []


def test_a_client_that_lists_many_streams_again_and_again_has_to_wait() -> None:
    bench = Bench()
    bench.worker("a")
    for stream in range(4_000):
        bench.client("c", "GENERATE", generate(stream), "key-c")
    bench.client("d", "GENERATE", generate(1), "key-d")
    num_streams = len(live(bench, "c", "key-c"))
    assert num_streams > 2_000
    lists = []
    asked = {"stream_id": 9, "streams": True}
    for number in range(100):
        # Two connections of the key send the requests in turn.
        [(kind, body)] = bench.client(f"e {number % 2}", "STATUS", asked, "key-c")[-1:]
        lists.append(kind)
    assert 1 < lists.count("MSG") <= 10
    assert (kind, body["code"]) == ("ERROR", "client_limit")
    assert len(live(bench, "d", "key-d")) == 1
    assert bench.client("c", "STATUS", {"stream_id": 9}, "key-c")[-1][0] == "MSG"
    bench.pass_time(body["retry_after_s"] + 0.25)
    assert len(live(bench, "c", "key-c")) == num_streams


def test_a_client_that_does_not_read_its_lists_gets_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenbus.broker.unread.LARGE_BYTES", 1)
    bench = Bench(max_pending_bytes=500)
    bench.worker("a")
    bench.client("c", "HELLO", {"client": "x" * 256}, "key-c")
    for number in range(1, 41):
        bench.client("c", "GENERATE", generate(number), "key-c")
    assert len(live(bench, "c", "key-c")) == 40
    bench.pass_time(1.0)
    *_, (kind, refused) = bench.client("c", "STATUS", {"stream_id": 99, "streams": True}, "key-c")
    assert (kind, refused["code"]) == ("ERROR", "slow_client")
    assert "read the earlier answers first" in refused["message"]
    *_, (kind, answer) = bench.client("c", "STATUS", {"stream_id": 99}, "key-c")
    assert (kind, answer["status"]["streams"]) == ("MSG", 40)


def test_a_client_that_does_not_read_metrics_gets_no_more_of_them() -> None:
    """Metrics of many workers are large."""
    bench = Bench(max_pending_bytes=10_000)
    bench.worker("a")
    metrics = [Series(f"metric_{number}", {"label": "x" * 100}, 1.0) for number in range(1000)]
    bench.send("a", "HEARTBEAT", Heartbeat(metrics=metrics))
    codes = []
    for _ in range(4):
        [(_, answer)] = bench.client("c", "STATUS", {"stream_id": 99, "metrics": True}, "key-c")
        codes.append(answer.get("code"))
    assert (codes[0], codes[-1]) == (None, "slow_client")


def test_to_list_the_streams_of_a_few_sessions_looks_at_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1), "key-c")
    bench.client("d", "GENERATE", generate(1), "key-d")
    bench.client("g", "HELLO", {"capabilities": ["gateway"]})
    bench.client("g", "GENERATE", generate(1))

    class Unlisted(dict[int, Request]):
        def values(self) -> NoReturn:
            raise AssertionError("the search went through the requests of all clients")

    state = bench.broker.state
    monkeypatch.setattr(state, "requests", Unlisted(state.requests))
    assert len(live(bench, "d", "key-d")) == 1
    assert len(live(bench, "g")) == 1


def test_a_stream_on_a_real_bus_is_listed_with_the_workers_that_run_it(steered: Bus) -> None:
    with steered.client() as client, contextlib.ExitStack() as streams:
        found = None
        while found is None:
            stream = client.generate(
                "x", max_tokens=800, n=24, controller="regex", controller_arg="[ab]+", priority=-2
            )
            next(streams.enter_context(stream))
            # No stream is found if it has already ended.
            live = client.status(streams=True).live
            found = next((s for s in live if s.priority == -2), None)
        workers = {worker.role: worker.name for worker in client.status().workers}
        assert (found.type, found.state, found.model) == ("GENERATE", "running", "embedded")
        assert (found.client, found.controller) == ("tokenbus-python", "regex")
        assert found.worker == workers["gpu"]
        assert found.controller_worker == workers["controller"]
