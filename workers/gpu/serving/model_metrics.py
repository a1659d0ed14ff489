"""The counters of one model's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ....protocol.metrics import (
    LATENCY_S,
    REQUEST_S,
    TOKEN_S,
    TOKENS,
    WAIT_S,
    Histogram,
    Series,
    Tally,
)
from ..engine.sequence import PromptUsage


class CountedStream(Protocol):
    """The fields of a stream (``streams.Stream``) that ``ModelMetrics`` reads."""

    arrived: float
    first_at: float
    sent_at: float
    usage: PromptUsage | None

    @property
    def num_tokens(self) -> int: ...


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
        """The time at which tokens of this model were last sent."""
        self.regular = 0
        """Number of streams of the current message that also had a token in the previous
        message."""

    def irregular(self, stream: CountedStream, now: float) -> None:
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
        """Counts a message with tokens. If a stream also has a token in the previous message, the
        interval between the two messages is counted for it."""
        if self.regular:
            self.between_tokens_s.observe(now - self.sent_at, self.regular)
            self.regular = 0
        self.sent_at = now

    def ended(self, stream: CountedStream, reason: str, now: float) -> None:
        """Counts a stream that has ended."""
        self._finished.add(reason)
        self._request_s.observe(now - stream.arrived)
        self._generation_sizes.observe(stream.num_tokens)
        if stream.first_at:
            self._decode_s.observe(stream.sent_at - stream.first_at)

    def series(self, model: str) -> list[Series]:
        """All series of the model. Another thread may call this method."""
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
        return [*named_series(values, labels), *self._finished.series(**labels)]


def named_series(values: Mapping[str, float | Histogram], labels: dict[str, str]) -> list[Series]:
    """A series for each of these values, by name."""
    return [Series.of(name, labels, value) for name, value in values.items()]
