"""The alert rules and the dashboard use metrics and labels that a running gateway serves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from tokenbus.clients import Client, TokenbusError
from tokenbus.clients.gateway.metrics import PREFIX

from ..processes import Bus
from .manifests import ROOT

FOLDER = ROOT / "deploy" / "monitoring"
NAME = re.compile(rf"{PREFIX}\w+")
SELECTOR = re.compile(rf"({PREFIX}\w+)\{{([^}}]*)\}}")
BY = re.compile(r"by ?\(([^)]*)\)")
MAX_SCRAPES = 60
Served = dict[str, set[str]]
"""The names of the labels of each metric, by the metric's name."""


def rules() -> list[Any]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[Any]:
    found: list[Any] = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return found


def expressions() -> Iterator[str]:
    """Every expression of the rules and of the dashboard."""
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def used_names() -> set[str]:
    return {name for expression in expressions() for name in NAME.findall(expression)}


def scrape(url: str) -> Served:
    served: Served = {}
    text = httpx.get(f"{url}/metrics", timeout=300).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            served.setdefault(sample.name, set()).update(sample.labels)
    return served


@pytest.fixture(scope="module")
def served(processes: None) -> Served:
    """The metrics of a gateway after requests of every kind that metrics count."""
    with Bus(capacity=1) as bus:
        bus.start_all_roles()
        url = bus.start_gateway().url
        with bus.client() as client:
            client.generate("a", controller="choice", controller_arg=["os", "sys"]).wait()
            with pytest.raises(TokenbusError):
                client.generate("a", controller="regex", controller_arg="(").wait()
            # The result has the series that exist only while requests wait, in addition to those
            # that always exist.
            return _with_a_queue(client, url)


def _with_a_queue(client: Client, url: str) -> Served:
    """Scrapes the gateway while requests wait, until all used metrics have appeared, or
    ``MAX_SCRAPES`` times."""
    found: Served = {}
    for _ in range(MAX_SCRAPES):
        streams = [
            client.generate([5, 6], n=8, max_tokens=200, ignore_eos=True, retry_s=60)
            for _ in range(3)
        ]
        for name, labels in scrape(url).items():
            found.setdefault(name, set()).update(labels)
        for stream in streams:
            stream.wait()
        if used_names() <= set(found):
            break
    return found


def test_every_metric_is_served(served: Served) -> None:
    assert used_names()
    assert used_names() - set(served) == set()


def test_every_label_is_one_of_its_metric(served: Served) -> None:
    for expression in expressions():
        labels = {label for name in NAME.findall(expression) for label in served[name]}
        for grouped in BY.findall(expression):
            assert {label.strip() for label in grouped.split(",")} <= labels, expression
        for name, matchers in SELECTOR.findall(expression):
            chosen = {re.split(r"[=!]", one)[0].strip() for one in matchers.split(",")}
            assert chosen <= served[name], expression


def test_a_name_that_is_not_served_is_noticed(served: Served) -> None:
    """The checks of the tests above find a metric that the gateway does not serve."""
    assert f"{PREFIX}workers_lost" not in served
    assert f"{PREFIX}workers_lost_total" in served


def test_rules_have_what_prometheus_asks_for() -> None:
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Tokenbus\w+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_each_alert_is_explained() -> None:
    for rule in rules():
        description = rule["annotations"]["description"]
        assert description.endswith("."), rule["alert"]
        assert description != rule["annotations"]["summary"]


def test_panels_of_the_dashboard_have_places_and_targets_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (at["x"] + column, at["y"] + row) for column in range(at["w"]) for row in range(at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in panels()}) == len(panels())
