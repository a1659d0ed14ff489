"""The counters of a GPU worker's requests by model.

No work is done for each token. The interval between two steps is counted once for all streams that
have a token in both, and everything else once for each request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ....protocol.logs import about
from ....protocol.messages import Token
from ....protocol.metrics import (
    LATENCY_S,
    OTHER,
    REQUEST_S,
    TOKEN_S,
    TOKENS,
    WAIT_S,
    Histogram,
    Series,
    Tally,
)

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .recipients import Recipients
    from .streams import Stream

log = logging.getLogger(__name__)

MAX_MODELS = 64
"""Models with counters of their own. All further models share one set of counters."""


class ModelMetrics:
    """The counters of one model's requests. Times are from ``time.monotonic``, in seconds."""

    def __init__(self) -> None:
        self.first_token_s = Histogram.over(LATENCY_S)
        self.between_tokens_s = Histogram.over(TOKEN_S)
        self.mask_wait_s = Histogram.over(WAIT_S)
        self._request_s = Histogram.over(REQUEST_S)
        self._queue_s = Histogram.over(REQUEST_S)
        self._prefill_s = Histogram.over(REQUEST_S)
        self._decode_s = Histogram.over(REQUEST_S)
        self._prompt_sizes = Histogram.over(TOKENS)
        self._generation_sizes = Histogram.over(TOKENS)
        self._prompt_tokens = 0
        self._finished = Tally("request_success", "finished_reason")
        self.sent_at = -1.0
        """When tokens of this model were last sent."""
        self.regular = 0
        """Streams of the current message that also had a token in the previous one."""

    def irregular(self, stream: Stream, now: float) -> None:
        """Counts a stream's first token, or a token after a pause of the stream."""
        if stream.first_at:
            self.between_tokens_s.observe(now - stream.sent_at)
            return
        stream.first_at = now
        self.first_token_s.observe(now - stream.arrived)
        usage = stream.usage
        if usage is not None:
            self._prompt_tokens += usage.tokens
            self._prompt_sizes.observe(usage.tokens)
            if usage.admitted_at is not None:
                self._queue_s.observe(usage.admitted_at - stream.arrived)
                self._prefill_s.observe(now - usage.admitted_at)

    def sent(self, now: float) -> None:
        """Counts a message with tokens: the interval since the previous one, once for all streams
        that have a token in both."""
        if self.regular:
            self.between_tokens_s.observe(now - self.sent_at, self.regular)
            self.regular = 0
        self.sent_at = now

    def ended(self, stream: Stream, reason: str, now: float) -> None:
        """Counts a stream that has ended."""
        self._finished.add(reason)
        self._request_s.observe(now - stream.arrived)
        self._generation_sizes.observe(stream.num_tokens)
        if stream.first_at:
            self._decode_s.observe(stream.sent_at - stream.first_at)

    def series(self, model: str) -> list[Series]:
        """All series of the model; safe on another thread."""
        labels = {"model_name": model}
        values: dict[str, float | Histogram] = {
            "time_to_first_token_seconds": self.first_token_s,
            "inter_token_latency_seconds": self.between_tokens_s,
            "e2e_request_latency_seconds": self._request_s,
            "request_queue_time_seconds": self._queue_s,
            "request_prefill_time_seconds": self._prefill_s,
            "request_decode_time_seconds": self._decode_s,
            "request_prompt_tokens": self._prompt_sizes,
            "request_generation_tokens": self._generation_sizes,
            "mask_wait_seconds": self.mask_wait_s,
            "prompt_tokens": self._prompt_tokens,
        }
        return [*_named(values, labels), *self._finished.series(**labels)]


class WorkerMetrics:
    """The counters of all models of a worker."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self.errors = Tally("errors", "code")

    def of(self, model: str) -> ModelMetrics:
        """The counters of one model."""
        found = self._models.get(model)
        if found is None:
            name = model if len(self._models) < MAX_MODELS else OTHER
            found = self._models.setdefault(name, ModelMetrics())
        return found

    def count(
        self,
        streams: Iterable[tuple[Stream, list[Token]]],
        recipients: Recipients | None = None,
    ) -> None:
        """Counts a message before it is sent: these entries, and one token in each of these rows.

        While a batch does not change, its rows are not visited one by one.
        """
        now = time.monotonic()
        with_tokens = [stream for stream, entries in streams if entries[-1].token is not None]
        models: list[ModelMetrics] = []
        if recipients is not None:
            model = next(iter(recipients.streams)).metrics
            if model is not None and recipients.sent_at == model.sent_at:
                model.regular += len(recipients.streams)
                models.append(model)
            else:
                recipients.settle()
                with_tokens += recipients.streams
            recipients.sent(now)
        last: ModelMetrics | None = None
        for stream in with_tokens:
            model = stream.metrics
            if model is None:
                continue
            if model is not last:
                models.append(model)
                last = model
            if stream.sent_at == model.sent_at:
                model.regular += 1
            else:
                model.irregular(stream, now)
            stream.sent_at = now
        for model in models:
            model.sent(now)

    def ended(self, stream: Stream, reason: str) -> None:
        """Counts the end of a stream that an engine ran."""
        if log.isEnabledFor(logging.DEBUG):
            what = "request %d has ended after %d tokens: %s"
            log.debug(what, stream.request, stream.num_tokens, reason, extra=about(stream.request))
        if stream.metrics is not None:
            stream.metrics.ended(stream, reason, time.monotonic())

    def series(self, engines: Mapping[str, Engine]) -> list[Series]:
        """All series, including the gauges of the loaded models; safe on another thread."""
        found = self.errors.series()
        for name, metrics in list(self._models.items()):
            found += metrics.series(name)
        for name, engine in engines.items():
            found += _named(engine.metrics(), {"model_name": name})
        return found


def _named(values: Mapping[str, float | Histogram], labels: dict[str, str]) -> list[Series]:
    return [Series.of(name, labels, value) for name, value in values.items()]
