"""``/metrics`` for Prometheus: the metrics of the broker, its workers and this gateway.

At each scrape, the gateway requests the metrics of the broker and its workers from the broker. So
all gateways report the same values. A metric that also exists in vLLM has the same name as there,
with the prefix ``tokenbus:`` instead of ``vllm:``. docs/observability.md lists all metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

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
from .context import Gateway, gateway_of
from .openapi import Operation
from .users.turns import Turns, on_thread
from .users.user_shares import SharedClient

PREFIX = "tokenbus:"
ASK_S = 5.0
"""Maximum time to wait for the broker's answer, in seconds."""

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """A metric: its kind and its help text."""

    kind: Kind
    help: str


FAMILIES = {
    # Metrics of vLLM.
    "num_requests_running": Family("gauge", "Sequences in the batch."),
    "num_requests_waiting": Family("gauge", "Sequences that wait for their worker's batch."),
    "kv_cache_usage_perc": Family("gauge", "The part of the KV cache's blocks in use, 0 to 1."),
    "num_preemptions": Family("counter", "Preemptions: sequences that lost their blocks."),
    "prefix_cache_queries": Family("counter", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": Family("counter", "Tokens that were found in the prefix cache."),
    "prompt_tokens": Family("counter", "Tokens of prompts, including cached tokens."),
    "generation_tokens": Family("counter", "Tokens of answers, including appended tokens."),
    "request_success": Family("counter", "Ended requests, by finish reason."),
    "time_to_first_token_seconds": Family(
        "histogram", "Time from the arrival at the broker to the first token."
    ),
    "inter_token_latency_seconds": Family(
        "histogram", "Time between two TOKEN messages of a request."
    ),
    "e2e_request_latency_seconds": Family(
        "histogram", "Time from the arrival at the broker to the last token."
    ),
    "request_queue_time_seconds": Family(
        "histogram", "Time from the arrival at the broker to the admission to the batch."
    ),
    "request_prefill_time_seconds": Family("histogram", "Time from admission to first token."),
    "request_decode_time_seconds": Family("histogram", "Time from the first token to the last."),
    "request_prompt_tokens": Family("histogram", "Number of tokens in a prompt."),
    "request_generation_tokens": Family("histogram", "Number of tokens in an answer."),
    "iteration_tokens_total": Family("histogram", "Number of prefill and decode tokens in a step."),
    "spec_decode_num_drafts": Family("counter", "Verified drafts."),
    "spec_decode_num_draft_tokens": Family("counter", "Tokens of verified drafts."),
    "spec_decode_num_accepted_tokens": Family("counter", "Accepted tokens of drafts."),
    # Metrics of controllers.
    "mask_wait_seconds": Family(
        "histogram", "Time that a step waited for masks after its logits were ready."
    ),
    "num_requests_deferred": Family("gauge", "Sequences whose controller has not decided yet."),
    "num_requests_suspended": Family("gauge", "Sequences that a controller has suspended."),
    "deferrals": Family(
        "counter", "Number of times that a step left out a sequence without a decision."
    ),
    "forks": Family("counter", "Forked sequences."),
    "splices": Family("counter", "Splices: replaced or appended ends of sequences."),
    "fast_forward_tokens": Family("counter", "Tokens that controllers have appended."),
    "backtracked_tokens": Family("counter", "Tokens that controllers have removed."),
    "controller_rounds": Family(
        "counter", "Rounds of controllers, by the name of the controller in the request."
    ),
    "controller_cpu_seconds": Family("counter", "CPU time of controllers' rounds."),
    "grammar_compile_seconds": Family(
        "histogram",
        "Time to compile a grammar, including the wait for a process, by constraint and outcome.",
    ),
    "grammar_cache_hits": Family("counter", "Requests whose grammar was already compiled."),
    "num_controllers": Family("gauge", "Requests whose controller runs at a worker."),
    "num_guest_processes": Family("gauge", "Processes in which uploaded modules run."),
    "num_controllers_waiting": Family("gauge", "Rounds that wait for a variable."),
    # Metrics of the bus.
    "up": Family("gauge", "1 if the broker has answered, otherwise 0."),
    "errors": Family("counter", "Errors that were sent to clients, by code and origin."),
    "num_requests_queued": Family("gauge", "Requests in the broker's queue, by model."),
    "sessions": Family("gauge", "Sessions of clients at the broker."),
    "streams": Family("gauge", "Live requests of all clients."),
    "workers": Family("gauge", "Workers, by role and state."),
    "attention": Family("gauge", "Always 1; the label attention names the attention backend."),
    "cuda_graphs": Family("gauge", "Number of CUDA graphs of a model."),
    "fallbacks": Family("gauge", "Fast paths of the device that a worker does not use."),
    "worker_requests": Family("gauge", "Requests assigned to a worker."),
    "worker_capacity": Family("gauge", "Maximum number of requests assigned to a worker."),
    "worker_heartbeat_age_seconds": Family("gauge", "Time since a worker's last message."),
    "worker_step_age_seconds": Family(
        "gauge", "Time since a worker's step began; 0 without a step."
    ),
    "requests": Family("counter", "Requests that the broker has accepted."),
    "refused": Family("counter", "Messages that the broker has refused."),
    "token_bodies": Family("counter", "Bodies of TOKEN messages that the broker has sent."),
    "slow_clients": Family("counter", "Clients whose streams ended because they did not read."),
    "workers_lost": Family("counter", "Workers that were lost while they had requests."),
    "requests_moved": Family("counter", "Requests that were moved to another worker."),
    "requests_quarantined": Family(
        "counter", "Requests that were ended because they killed workers."
    ),
    "bad_worker_messages": Family("counter", "Malformed messages of workers."),
    "internal_errors": Family("counter", "Internal errors of the broker, which its log shows."),
    "uptime_seconds": Family("gauge", "Time since the broker started."),
    # Metrics of this gateway.
    "http_requests": Family("counter", "Answered HTTP requests, by path and status."),
    "http_request_duration_seconds": Family(
        "histogram", "Time until the end of the answer, by path."
    ),
    "http_requests_in_progress": Family("gauge", "HTTP requests that are being answered."),
    "websockets": Family("gauge", "Open WebSockets."),
}
"""Every metric, by its name without the prefix. A counter's name gets the suffix ``_total``."""


_scrapes: WeakKeyDictionary[SharedClient, Scrapes] = WeakKeyDictionary()
"""The scrapes of each bus client. Each tenant has its own bus client, which the broker may
refuse."""


def routes() -> list[BaseRoute]:
    """The route ``/metrics``."""
    return [Route("/metrics", metrics, methods=["GET"])]


def operations() -> list[Operation]:
    """The operation for the OpenAPI document."""
    return [Operation("get", "/metrics", "Metrics for Prometheus", "metrics", answer=str)]


async def metrics(request: Request) -> Response:
    """All metrics, in the format that the scraper accepts."""
    gateway = gateway_of(request)
    scrapes = _scrapes.setdefault(gateway.client, Scrapes())
    accepted = request.headers.get("accept", "")
    content, content_type = await scrapes.answer(partial(_series, gateway), accepted)
    return Response(content, media_type=None, headers={"content-type": content_type})


async def _series(gateway: Gateway) -> list[Series]:
    """The present metrics."""
    try:
        status = await gateway.client.status(metrics=True, timeout_s=ASK_S)
    except TokenbusError:
        status = None
    return [*of_status(status), *gateway.traffic.series()]


class Scrapes:
    """Answers scrapes. Scrapes that arrive at the same time share the question to the broker and
    the composed answer.

    Composing an answer takes milliseconds for each worker. So a thread composes one answer at a
    time. If each scrape were answered separately on the event loop, a client with hundreds of
    scrapes could block the requests of all others for seconds.
    """

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._composing = Turns()
        self._begun = self._ended = 0
        """Numbers of the last question that was begun, and of the last one that was answered."""
        self._answers = _Answers(Snapshot([]))

    async def answer(
        self, ask: Callable[[], Awaitable[list[Series]]], accepted: str
    ) -> tuple[bytes, str]:
        """The content of an answer and its type. ``ask`` returns the present metrics. ``accepted``:
        the header ``Accept`` of the scrape."""
        encode, content_type = choose_encoder(accepted)
        wanted = self._begun + 1
        async with self._asking:
            # Another scrape may have begun a question after this scrape had arrived.
            if self._ended < wanted:
                number = self._begun = self._begun + 1
                self._answers, self._ended = _Answers(Snapshot(await ask())), number
            answers = self._answers
        content = await on_thread(self._composing, partial(answers.composed, encode, content_type))
        return content, content_type


class _Answers:
    """The composed answers from one snapshot, by content type. One thread at a time uses them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._composed: dict[str, bytes] = {}

    def composed(self, encode: Callable[[Collector], bytes], content_type: str) -> bytes:
        """The answer of a content type."""
        content = self._composed.get(content_type)
        if content is None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(self._snapshot)
            content = self._composed[content_type] = encode(registry)
        return content


class Snapshot(Collector):
    """The metrics of one scrape."""

    def __init__(self, series: list[Series]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        """The families that have at least one series, in the order of ``FAMILIES``."""
        by_name: dict[str, list[Series]] = {}
        for one in self._series:
            by_name.setdefault(one.name, []).append(one)
        for name, family in FAMILIES.items():
            if name in by_name:
                yield _metric(name, family, by_name[name])


def of_status(status: Status | None) -> Iterator[Series]:
    """Yields the series of the broker's answer. If the broker has not answered, yields only
    ``up``."""
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
    """Adds to each series the label ``worker``, which names the process that reported it."""
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
    """The buckets of a histogram in Prometheus's form: each count includes the counts of all
    smaller buckets."""
    assert one.histogram is not None
    bounds = [*map(floatToGoString, one.histogram.bounds), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, one.histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
