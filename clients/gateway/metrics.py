"""``/metrics`` for Prometheus: the counters of the broker, of its workers, and of this gateway.

The broker is asked at each scrape, so that every gateway reports the same values. Metrics that vLLM
has too have the names of its dashboards, with ``tokenbus:`` for ``vllm:``; docs/observability.md
lists both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...protocol.errors import TokenbusError
from ...protocol.messages import Status
from ...protocol.metrics import Series
from .context import gateway_of
from .openapi import Operation

PREFIX = "tokenbus:"
ASK_S = 5.0
"""How long the broker may take to answer, in seconds."""

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """A metric: its kind and its help text."""

    kind: Kind
    help: str


FAMILIES = {
    # Metrics of vLLM.
    "num_requests_running": Family("gauge", "Sequences in the batch."),
    "num_requests_waiting": Family("gauge", "Sequences that wait for the batch of their worker."),
    "kv_cache_usage_perc": Family("gauge", "The part of the KV cache's blocks in use, 0 to 1."),
    "num_preemptions": Family("counter", "Sequences that lost their blocks and waited again."),
    "prefix_cache_queries": Family("counter", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": Family("counter", "Tokens of these that were found."),
    "prompt_tokens": Family("counter", "Tokens of prompts, cached ones included."),
    "generation_tokens": Family("counter", "Tokens of answers, appended ones included."),
    "request_success": Family("counter", "Requests that have ended, by their finish reason."),
    "time_to_first_token_seconds": Family(
        "histogram", "From the arrival at the broker to the first token."
    ),
    "inter_token_latency_seconds": Family(
        "histogram", "Between messages with tokens of one request."
    ),
    "e2e_request_latency_seconds": Family(
        "histogram", "From the arrival at the broker to the last token."
    ),
    "request_queue_time_seconds": Family(
        "histogram", "From the arrival at the broker to the admission to the batch."
    ),
    "request_prefill_time_seconds": Family("histogram", "From the admission to the first token."),
    "request_decode_time_seconds": Family("histogram", "From the first token to the last."),
    "request_prompt_tokens": Family("histogram", "Tokens of a request's prompt."),
    "request_generation_tokens": Family("histogram", "Tokens of a request's answer."),
    "iteration_tokens_total": Family("histogram", "Tokens of a step, of prompts and decodes."),
    "spec_decode_num_drafts": Family("counter", "Drafts of sequences that were verified."),
    "spec_decode_num_draft_tokens": Family("counter", "Tokens of these drafts."),
    "spec_decode_num_accepted_tokens": Family("counter", "Tokens of drafts that were sampled."),
    # Metrics that exist only in a steered system.
    "mask_wait_seconds": Family(
        "histogram", "How long a step waited for masks when its logits were ready."
    ),
    "num_requests_deferred": Family("gauge", "Sequences whose decision has not arrived."),
    "num_requests_suspended": Family("gauge", "Sequences that their controller has suspended."),
    "deferrals": Family("counter", "How often a step went on without a sequence's decision."),
    "forks": Family("counter", "Sequences that were forked from others."),
    "splices": Family("counter", "Changes of a sequence's end by its controller."),
    "fast_forward_tokens": Family("counter", "Tokens that controllers have appended."),
    "backtracked_tokens": Family("counter", "Tokens that controllers have taken back."),
    "controller_rounds": Family("counter", "Rounds of controllers, by what requests name."),
    "controller_cpu_seconds": Family("counter", "CPU time of controllers' rounds."),
    "grammar_compile_seconds": Family(
        "histogram", "From a request for a grammar to its compiled form, by constraint and outcome."
    ),
    "grammar_cache_hits": Family("counter", "Requests whose grammar was compiled already."),
    "num_controllers": Family("gauge", "Requests whose controllers a worker runs."),
    "num_controllers_waiting": Family("gauge", "Rounds that wait for a variable."),
    # Metrics of the bus.
    "up": Family("gauge", "Whether the broker has answered."),
    "errors": Family("counter", "Errors that clients were sent, by code and where they arose."),
    "num_requests_queued": Family("gauge", "Requests that wait at the broker, by model."),
    "sessions": Family("gauge", "Clients of the broker."),
    "streams": Family("gauge", "Live requests of all clients."),
    "workers": Family("gauge", "Workers, by role and state."),
    "attention": Family("gauge", "1 for the attention with which a worker computes a model."),
    "cuda_graphs": Family("gauge", "Batch sizes of a model that have a CUDA graph."),
    "fallbacks": Family("gauge", "Fast paths that the device could have and the worker lacks."),
    "worker_requests": Family("gauge", "Requests assigned to a worker."),
    "worker_capacity": Family("gauge", "Most of them."),
    "worker_heartbeat_age_seconds": Family("gauge", "Since the last message of a worker."),
    "worker_step_age_seconds": Family("gauge", "How long its step has been running; 0 between."),
    "requests": Family("counter", "Requests that the broker has accepted."),
    "refused": Family("counter", "Messages that the broker has refused."),
    "token_bodies": Family("counter", "Bodies of TOKEN messages that the broker has passed on."),
    "slow_clients": Family("counter", "Clients whose streams ended as they did not read."),
    "workers_lost": Family("counter", "Workers that were lost with requests on them."),
    "requests_moved": Family("counter", "Requests that left a worker for another."),
    "requests_quarantined": Family("counter", "Requests that ended as they killed workers."),
    "bad_worker_messages": Family("counter", "Messages of workers that were malformed."),
    "internal_errors": Family("counter", "Defects of the broker; its log has them."),
    "uptime_seconds": Family("gauge", "Since the broker started."),
    # Metrics of this gateway.
    "http_requests": Family("counter", "HTTP requests that were answered, by path and status."),
    "http_request_duration_seconds": Family("histogram", "Until the end of the answer, by path."),
    "http_requests_in_progress": Family("gauge", "HTTP requests that are being answered."),
    "websockets": Family("gauge", "Open WebSockets."),
}
"""Every metric, by its name without the prefix; a counter's gets ``_total`` behind it."""


def routes() -> list[BaseRoute]:
    """The one path."""
    return [Route("/metrics", metrics, methods=["GET"])]


def operations() -> list[Operation]:
    """This path, as the OpenAPI document describes it."""
    return [Operation("get", "/metrics", "Metrics for Prometheus", "metrics", answer=str)]


async def metrics(request: Request) -> Response:
    """All metrics, in the format that the scraper accepts."""
    gateway = gateway_of(request)
    try:
        status = await gateway.client.status(metrics=True, timeout_s=ASK_S)
    except TokenbusError:
        status = None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot([*of_status(status), *gateway.traffic.series()]))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=None, headers={"content-type": content_type})


class Snapshot(Collector):
    """The metrics of one scrape."""

    def __init__(self, series: list[Series]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        """The families that have a series, in the order of ``FAMILIES``."""
        by_name: dict[str, list[Series]] = {}
        for one in self._series:
            by_name.setdefault(one.name, []).append(one)
        for name, family in FAMILIES.items():
            if name in by_name:
                yield _metric(name, family, by_name[name])


def of_status(status: Status | None) -> Iterator[Series]:
    """The series of the broker's answer; empty without an answer."""
    yield Series("up", {}, float(status is not None))
    if status is None:
        return
    yield Series("uptime_seconds", {}, status.uptime_s)
    yield Series("sessions", {}, status.sessions)
    yield Series("streams", {}, status.streams)
    for name, count in status.counters.items():
        yield Series(name, {}, count)
    yield from _labelled(status.metrics, "broker")
    workers: dict[tuple[str, str], int] = {}
    for worker in status.workers:
        kind = (worker.role, worker.state)
        workers[kind] = workers.get(kind, 0) + 1
        labels = {"worker": worker.name}
        yield Series("worker_requests", labels, worker.requests)
        yield Series("worker_capacity", labels, worker.capacity)
        yield Series("worker_heartbeat_age_seconds", labels, worker.heartbeat_age_s)
        yield Series("worker_step_age_seconds", labels, worker.step_age_s or 0.0)
        for model, path in worker.paths.items():
            of_model = {**labels, "model_name": model}
            yield Series("attention", {**of_model, "attention": path.attention}, 1)
            yield Series("cuda_graphs", of_model, path.graphs)
            yield Series("fallbacks", of_model, len(path.fallbacks))
        yield from _labelled(worker.metrics, worker.name)
    for (role, state), count in workers.items():
        yield Series("workers", {"role": role, "state": state}, count)


def _labelled(series: Iterable[Series], worker: str) -> Iterator[Series]:
    """Series with the label of the process that counted."""
    for one in series:
        yield Series(one.name, {**one.labels, "worker": worker}, one.value, one.histogram)


def _metric(name: str, family: Family, series: list[Series]) -> Metric:
    labels = sorted({label for one in series for label in one.labels})
    full = PREFIX + name
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(full, family.help, labels=labels)
        for one in series:
            if one.histogram is not None:
                values = [one.labels.get(label, "") for label in labels]
                histogram.add_metric(values, _buckets(one), one.histogram.total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    numbers = kind(full, family.help, labels=labels)
    for one in series:
        numbers.add_metric([one.labels.get(label, "") for label in labels], one.value)
    return numbers


def _buckets(one: Series) -> list[tuple[str, float]]:
    """The counts in Prometheus's form: each bucket includes the smaller ones."""
    assert one.histogram is not None
    bounds = [*map(floatToGoString, one.histogram.bounds), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, one.histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
