"""The broker's counters, and the metrics of its workers, which the broker passes on."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.protocol.header import Header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.metrics import Histogram, Series
from tokenbus.protocol.worker_messages import Heartbeat

from ..worlds.broker import Bench, generate


@pytest.fixture
def bench() -> Bench:
    return Bench()


def status(bench: Bench, **fields: Any) -> dict[str, Any]:
    [(_, answer)] = bench.client("operator", "STATUS", {"stream_id": 99, **fields})
    shown: dict[str, Any] = answer["status"]
    return shown


def values(series: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The values of a metric, by the value of their first label."""
    return {next(iter(s["labels"].values())): s["value"] for s in series if s["name"] == name}


def test_what_waits_is_shown_by_model(bench: Bench) -> None:
    bench.worker("a", capacity=1, patterns=["m", "n"])
    for stream, model in enumerate(("m", "m", "m", "n")):
        bench.client("c", "GENERATE", generate(stream, model=model))
    assert values(status(bench, metrics=True)["metrics"], "num_requests_queued") == {"m": 2, "n": 1}


def test_errors_are_counted_by_code(bench: Bench) -> None:
    bench.client("c", "GENERATE", generate(1))
    bench.client("c", "GENERATE", generate(2))
    bench.client("c", "GENERATE", {"stream_id": "no number"})
    errors = values(status(bench, metrics=True)["metrics"], "errors")
    assert errors == {"no_worker": 2, "invalid_field": 1}


def test_the_metrics_of_a_worker_are_those_of_its_last_heartbeat(bench: Bench) -> None:
    bench.worker("a")
    histogram = Histogram.over((1.0, 2.0))
    histogram.observe(1.5)
    for count in (1.0, 2.0):
        sent = [Series("forks", {"model_name": "m"}, count), Series("x", {}, histogram=histogram)]
        bench.send("a", "HEARTBEAT", Heartbeat(metrics=sent))
    assert "metrics" not in status(bench)["workers"][0]
    [worker] = status(bench, metrics=True)["workers"]
    assert values(worker["metrics"][:1], "forks") == {"m": 2.0}
    assert worker["metrics"][1]["histogram"]["counts"] == [0, 1, 0]


def test_a_request_says_how_long_it_has_waited(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, first)] = bench.to_worker("a")
    assert first.waited_s == 0
    bench.client("c", "GENERATE", generate(2))
    bench.now += 1.25
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("a", Header(first.request, first.address), end, final=True)
    [(_, second)] = bench.to_worker("a")
    assert second.waited_s == pytest.approx(1.25, abs=0.001)
