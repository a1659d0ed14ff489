"""Metrics, traces and logs of a whole system, as Prometheus, a collector and people read them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from prometheus_client.parser import text_string_to_metric_families
from tokenbus.clients.gateway.metrics import FAMILIES, PREFIX
from tokenbus.protocol.messages import Status

from ...otlp import Receiver
from ...processes import Bus, Gateway, until

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def observed(processes: None, receiver: Receiver) -> Iterator[Bus]:
    """A whole system whose processes export traces and log JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        bus = Bus(log_format="json")
    with bus:
        bus.start_worker()
        bus.start_other("state")
        bus.start_other("controller")
        bus.start_gateway()
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller", "state")
        yield bus


@pytest.fixture(scope="module")
def door(observed: Bus) -> Gateway:
    """The gateway of the observed system."""
    return observed.gateways[0]


def completion(door: Gateway, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, **fields}
    return httpx.post(f"{door.url}/v1/completions", json=body, headers=headers, timeout=120.0)


def scrape(door: Gateway) -> Samples:
    """All samples of ``/metrics`` except ages and uptimes, which change without requests."""
    text = httpx.get(f"{door.url}/metrics", timeout=300.0).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "age_seconds" not in sample.name and "uptime" not in sample.name
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric over the labels that are not given."""
    wanted = set(labels.items())
    return sum(v for (n, own), v in samples.items() if n == PREFIX + name and wanted <= own)


def after_heartbeats(door: Gateway, ended: float, rounds: float = 0) -> Samples:
    """Scrapes until the workers have reported ``ended`` requests and ``rounds`` rounds. Returns the
    last samples."""
    found: list[Samples] = []

    def reported() -> bool:
        found.append(scrape(door))
        enough = total(found[-1], "request_success_total") >= ended
        return enough and total(found[-1], "controller_rounds_total") >= rounds

    until(reported, 300.0, f"{ended} ended requests in the metrics")
    return found[-1]


# --- metrics --------------------------------------------------------------------------------------


def test_requests_of_all_clients_are_counted(observed: Bus, door: Gateway) -> None:
    before = scrape(door)
    ended = total(before, "request_success_total")
    with observed.client() as client:
        free = client.generate(PROMPT, max_tokens=6, ignore_eos=True).tokens()
        steered = client.generate(
            PROMPT, max_tokens=6, controller="regex", controller_arg="[a-z]{4,60}"
        ).tokens()
    generated = len(free) + len(steered) + completion(door).json()["usage"]["completion_tokens"]
    # There is one round before the first token and at least one after it. A round may be for
    # several tokens.
    rounds = total(before, "controller_rounds_total") + 2
    after = after_heartbeats(door, ended + 3, rounds)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert grown("request_success_total", model_name="embedded") == 3
    assert grown("time_to_first_token_seconds_count", model_name="embedded") == 3
    assert grown("e2e_request_latency_seconds_count") == 3
    assert grown("request_queue_time_seconds_count") == 3
    assert grown("generation_tokens_total") == grown("request_generation_tokens_sum")
    assert grown("generation_tokens_total") == generated
    assert grown("inter_token_latency_seconds_count") == generated - 3
    assert grown("prompt_tokens_total") == grown("request_prompt_tokens_sum") > 0
    assert grown("mask_wait_seconds_count") >= 1
    assert grown("controller_rounds_total", module="regex") >= 2
    assert grown("controller_cpu_seconds_total", module="regex") > 0
    assert grown("http_requests_total", path="/v1/completions", status="200") == 1
    first = total(after, "time_to_first_token_seconds_sum")
    assert 0 < first < total(after, "e2e_request_latency_seconds_sum")


def test_every_metric_is_served_and_two_gateways_show_the_same(
    observed: Bus, door: Gateway
) -> None:
    assert completion(door, model="unknown-model").status_code == 404
    assert completion(door, structured_outputs={"regex": "["}).status_code == 400
    for _ in range(2):  # The second request uses the compiled pattern.
        assert completion(door, structured_outputs={"regex": "ab?"}).status_code == 200
    other = observed.start_gateway()
    ended = total(scrape(door), "request_success_total")
    with observed.client() as client:
        client.generate(PROMPT, max_tokens=2).wait()
    after_heartbeats(door, ended + 1)

    def shared(samples: Samples) -> Samples:
        return {key: v for key, v in samples.items() if "gateway" not in dict(key[1])}

    expected = set(FAMILIES) - {"num_requests_queued"}  # No request is queued.

    def missing() -> set[str]:
        """The expected metrics that are still missing. Workers report with each heartbeat."""
        names = {name for name, _ in scrape(door)}
        return {
            name
            for name in expected
            if not any(full.startswith(PREFIX + name) for full in names)
            and not name.endswith(("age_seconds", "uptime_seconds"))
        }

    until(lambda: not missing(), 300.0, lambda: f"metrics: {missing()}")
    until(lambda: shared(scrape(door)) == shared(scrape(other)), 300.0, "equal metrics")
    assert total(scrape(door), "errors_total") >= 2


def test_the_scrape_has_the_format_that_is_asked_for(door: Gateway) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(f"{door.url}/metrics", headers=accept, timeout=300.0)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    plain = httpx.get(f"{door.url}/metrics", timeout=300.0)
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_a_status_without_metrics_carries_none(observed: Bus) -> None:
    with observed.client() as client:
        # A worker sends metrics in its heartbeats.
        until(lambda: any(w.metrics for w in client.status(metrics=True).workers), 300.0, "metrics")
        plain: Status = client.status()
    assert not any(worker.metrics for worker in plain.workers)


# --- traces ---------------------------------------------------------------------------------------


def new_parent() -> tuple[str, str, str]:
    """A new traceparent, and the ids of its trace and of its span."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace}-{span}-01", trace, span


def test_the_spans_of_all_processes_are_one_trace(door: Gateway, receiver: Receiver) -> None:
    header, trace, caller = new_parent()
    answer = completion(door, {"traceparent": header}, structured_outputs={"regex": "[a-z]{4,60}"})
    assert answer.status_code == 200, answer.text
    expected = {
        "tokenbus-gateway": None,
        "tokenbus-gateway (client)": "tokenbus-gateway",
        "tokenbus-broker": "tokenbus-gateway (client)",
        "tokenbus-gpu": "tokenbus-broker",
        "tokenbus-controller": "tokenbus-gpu",
    }
    until(lambda: receiver.of(trace).keys() >= expected.keys(), 300.0, "the spans of the trace")
    spans = receiver.of(trace)
    assert spans.keys() == expected.keys()
    for service, parent in expected.items():
        assert spans[service].parent_id == (spans[parent].span_id if parent else caller), service
        assert spans[service].start < spans[service].end
    gpu = spans["tokenbus-gpu"]
    assert gpu.name == "text_completion embedded"
    assert gpu.attributes["gen_ai.operation.name"] == "text_completion"
    assert gpu.attributes["gen_ai.request.model"] == "embedded"
    generated = answer.json()["usage"]["completion_tokens"]
    assert gpu.attributes["gen_ai.usage.output_tokens"] == generated
    assert gpu.attributes["gen_ai.usage.input_tokens"] > 0
    assert [name for name, _ in gpu.events] == ["admitted to the batch", "first token"]
    client = spans["tokenbus-gateway (client)"]
    assert client.attributes["gen_ai.request.max_tokens"] == 6
    assert client.attributes["gen_ai.usage.output_tokens"] == generated
    rounds = spans["tokenbus-controller"].events
    assert 2 <= len(rounds) <= generated + 1
    assert {name for name, _ in rounds} == {"round"}
    assert rounds[0][1]["tokenbus.action"] == "sample"
    assert spans["tokenbus-gateway"].name == "POST /v1/completions"
    assert spans["tokenbus-gateway"].attributes["http.response.status_code"] == 200


def test_a_client_whose_program_traces_makes_a_span(
    observed: Bus, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "program"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{receiver.url}/v1/traces")))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    with (
        observed.client() as client,
        provider.get_tracer("test").start_as_current_span("the program") as outer,
    ):
        trace = f"{outer.get_span_context().trace_id:032x}"
        client.generate(PROMPT, max_tokens=3, ignore_eos=True).wait()
    provider.shutdown()
    expected = {"program", "program (client)", "tokenbus-broker", "tokenbus-gpu"}
    until(lambda: receiver.of(trace).keys() >= expected, 300.0, "the spans of the trace")
    spans = receiver.of(trace)
    assert spans["program (client)"].parent_id == spans["program"].span_id
    assert spans["tokenbus-broker"].parent_id == spans["program (client)"].span_id
    assert spans["tokenbus-gpu"].parent_id == spans["tokenbus-broker"].span_id


def test_a_request_that_is_not_sampled_makes_no_span(
    observed: Bus, door: Gateway, receiver: Receiver
) -> None:
    header, trace, _ = new_parent()
    unsampled = header[:-2] + "00"
    assert completion(door, {"traceparent": unsampled}).status_code == 200
    sampled, later, _ = new_parent()
    assert completion(door, {"traceparent": sampled}).status_code == 200
    until(lambda: "tokenbus-gpu" in receiver.of(later), 300.0, "the spans of the sampled trace")
    assert receiver.of(trace) == {}


# --- logs -----------------------------------------------------------------------------------------


def lines_about(observed: Bus, request_id: str) -> dict[str, list[dict[str, Any]]]:
    """The log lines that have a request id, by process."""
    found: dict[str, list[dict[str, Any]]] = {}
    running = [*observed.workers, *observed.others, *(g.process for g in observed.gateways)]
    for process in (observed.broker, *running):
        for line in process.log.splitlines():
            fields = json.loads(line)
            if fields.get("request_id") == request_id:
                found.setdefault(fields["process"], []).append(fields)
    return found


def test_one_id_names_a_request_in_the_logs_of_all_processes(observed: Bus, door: Gateway) -> None:
    name = f"id-{secrets.token_hex(8)}"
    regex = {"regex": "[a-z]{4,60}"}
    answer = completion(door, {"x-request-id": name}, structured_outputs=regex)
    assert answer.headers["x-request-id"] == name
    everywhere = {"broker", "gpu", "controller", "gateway"}
    until(lambda: lines_about(observed, name).keys() == everywhere, 300.0, "lines with the id")
    [line] = lines_about(observed, name)["gateway"]
    assert line["message"].startswith("POST /v1/completions 200")


def test_an_answer_has_an_id_in_any_case(door: Gateway) -> None:
    header, trace, _ = new_parent()
    answers = [
        httpx.get(f"{door.url}/live", timeout=300.0),
        httpx.get(f"{door.url}/no/such/path", timeout=300.0),
        httpx.get(f"{door.url}/live", headers={"x-request-id": "not one id"}, timeout=300.0),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert "not one id" not in ids
    traced = httpx.get(f"{door.url}/live", headers={"traceparent": header}, timeout=300.0)
    assert traced.headers["x-request-id"] == trace
