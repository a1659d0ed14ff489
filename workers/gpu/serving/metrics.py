"""The counters of a GPU worker's requests by model.

Tokens are not counted one by one. If several streams have a token in two consecutive steps, one
operation counts the interval between the steps for all of them. Everything else is counted once for
each request, or once for each pause of a stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ....protocol.logs import about
from ....protocol.messages import Token
from ....protocol.metrics import OTHER, Series, Tally
from ..engine.engine import Engine
from .model_metrics import ModelMetrics, named_series
from .recipients import Recipients
from .streams import Stream

log = logging.getLogger(__name__)

MAX_MODELS = 64
"""Maximum number of models with separate counters. All further models share one set of counters."""


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
        new: Mapping[Stream, list[Token]],
        recipients: Recipients | None = None,
    ) -> None:
        """Counts a message before it is sent. The message has the ``new`` entries, and one token
        for each row of ``recipients``.

        While a batch does not change, the intervals of all its streams are counted in one
        operation.
        """
        now = time.monotonic()
        with_tokens = [stream for stream, entries in new.items() if entries[-1].token is not None]
        models: list[ModelMetrics] = []
        if recipients is not None:
            model = next(iter(recipients.streams)).metrics
            if model is not None and recipients.sent_at == model.sent_at:
                model.regular += len(recipients.streams)
                models.append(model)
            else:
                recipients.settle()
                with_tokens += recipients.streams
            recipients.sent_at = now
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
            found += named_series(engine.metrics(), {"model_name": name})
        return found
