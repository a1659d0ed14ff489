"""Metrics are counted, labelled and shown correctly. These tests need no running system."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenbus.clients.gateway import metrics
from tokenbus.clients.gateway.metrics import FAMILIES, Snapshot, of_status
from tokenbus.clients.gateway.traffic import Counts, route_path
from tokenbus.protocol.header import decode_header, encode_header, waited_flags
from tokenbus.protocol.metrics import OTHER, Histogram, Series, Tally
from tokenbus.workers.controller.meters import MAX_CONTROLLERS, Meter, Meters

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"


def test_the_docs_have_every_metric_with_its_kind() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", DOCS.read_text(), re.M)
    assert dict(rows) == {name: family.kind for name, family in FAMILIES.items()}


def test_buckets_of_a_histogram_include_the_smaller_ones() -> None:
    histogram = Histogram.over((1, 2.5))
    for value, times in ((0.5, 1), (1, 1), (2, 3), (9, 1)):
        histogram.observe(value, times)
    [metric] = Snapshot(
        [Series("mask_wait_seconds", {"worker": "w"}, histogram=histogram)]
    ).collect()
    found = {(s.name.removeprefix("tokenbus:mask_wait_seconds"), s.labels.get("le")): s.value
             for s in metric.samples}  # fmt: skip
    assert found == {
        ("_bucket", "1.0"): 2,
        ("_bucket", "2.5"): 5,
        ("_bucket", "+Inf"): 6,
        ("_count", None): 6,
        ("_sum", None): 16.5,
    }


def test_series_with_different_labels_are_one_metric() -> None:
    series = [Series("errors", {"code": "internal", "worker": "w"}, 1), Series("errors", {}, 2)]
    [metric] = Snapshot(series).collect()
    labels = [s.labels for s in metric.samples]
    assert labels == [{"code": "internal", "worker": "w"}, {"code": "", "worker": ""}]


def test_a_name_that_this_gateway_does_not_know_is_left_out() -> None:
    assert list(Snapshot([Series("of_a_later_version", {}, 1)]).collect()) == []


def test_without_a_broker_only_that_is_shown() -> None:
    assert list(of_status(None)) == [Series("up", {}, 0.0)]


def test_a_label_has_so_many_values_and_the_rest_is_other() -> None:
    tally = Tally("errors", "code", max_values=2)
    for code in ("a", "b", "c", "d", "a"):
        tally.add(code)
    assert {s.labels["code"]: s.value for s in tally.series()} == {"a": 2, "b": 1, OTHER: 2}


def test_controllers_beyond_the_most_are_counted_together() -> None:
    meters = Meters()
    for i in range(MAX_CONTROLLERS + 5):
        meters.of(f"module-{i}").end(None, 0.001)
    rounds = {s.labels["module"]: s.value for s in meters.series() if s.name == "controller_rounds"}
    assert len(rounds) == MAX_CONTROLLERS + 1
    assert rounds[OTHER] == 5


def test_the_cpu_time_of_rounds_that_are_not_measured_is_estimated() -> None:
    meter = Meter()
    measured = [began is not None for began in _rounds(meter, 32)]
    assert measured.count(True) == 2
    assert meter.rounds == 32
    before = meter.cpu_s
    meter.end(None, 0.5)
    assert 0 < meter.cpu_s - before <= 0.5


def _rounds(meter: Meter, count: int) -> list[float | None]:
    begun = []
    for _ in range(count):
        began = meter.begin()
        at = time.perf_counter()
        sum(range(1000))
        meter.end(began, time.perf_counter() - at)
        begun.append(began)
    return begun


@pytest.mark.anyio
async def test_scrapes_at_the_same_time_share_a_question_and_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, composed = [], []

    async def ask() -> list[Series]:
        asked.append(0)
        await asyncio.sleep(0)
        return []

    def compose(_: Any) -> bytes:
        composed.append(threading.current_thread())
        return b"%d" % len(composed)

    monkeypatch.setattr(metrics, "choose_encoder", lambda accepted: (compose, accepted))
    scrapes = metrics.Scrapes()
    answers = await asyncio.gather(*(scrapes.answer(ask, "text") for _ in range(50)))
    # The first question was begun before the other scrapes arrived, so its answer may be too old
    # for them.
    assert [content for content, _ in answers] == [b"1"] + [b"2"] * 49
    assert (len(asked), len(composed)) == (2, 2)
    assert threading.current_thread() not in composed
    assert await scrapes.answer(ask, "text") == (b"3", "text")


@pytest.mark.anyio
async def test_a_scrape_that_is_cancelled_does_not_answer_others() -> None:
    blocked = asyncio.Event()

    async def never() -> list[Series]:
        await blocked.wait()
        raise AssertionError

    async def ask() -> list[Series]:
        return [Series("up", {}, 1.0)]

    scrapes = metrics.Scrapes()
    first = asyncio.create_task(scrapes.answer(never, ""))
    await asyncio.sleep(0)
    second = asyncio.create_task(scrapes.answer(ask, ""))
    await asyncio.sleep(0)
    first.cancel()
    content, _ = await second
    assert b"tokenbus:up 1.0" in content


@pytest.mark.parametrize("waited_s", [0.0, 0.001, 1.5, 3600.0])
def test_a_header_carries_how_long_a_request_waited(waited_s: float) -> None:
    header = decode_header(encode_header(1, 2, 1 | waited_flags(waited_s)))
    assert header.waited_s == pytest.approx(waited_s, abs=0.001)
    assert header.flags & 1


def test_a_wait_beyond_the_field_is_cut() -> None:
    assert decode_header(encode_header(1, 2, waited_flags(1e9))).waited_s > 16_000


@pytest.mark.parametrize(
    ("path", "params", "shown"),
    [
        ("/v1/models", {}, "/v1/models"),
        ("/v1/models/a/b", {"model": "a/b"}, "/v1/models/{model}"),
        ("/v1/models/v1", {"model": "v1"}, "/v1/models/{model}"),
    ],
)
def test_a_path_is_counted_by_its_route(path: str, params: Mapping[str, Any], shown: str) -> None:
    scope = {"path": path, "path_params": params, "endpoint": SimpleNamespace()}
    assert route_path(scope) == shown
    assert route_path({"path": path}) == OTHER


def test_methods_that_clients_invent_are_other() -> None:
    counts = Counts()
    counts.answered("INVENTED", "/live", 405, 0.1)
    [series] = [s for s in counts.series() if s.name == "http_requests"]
    assert series.labels["method"] == OTHER
