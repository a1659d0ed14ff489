"""Exports the OpenTelemetry span of a traced request's controller. The span's events are rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...protocol import tracing
from ...protocol.tracing import Happened
from ...protocol.worker_messages import Start, StepResult

MAX_EVENTS = 128
"""Maximum rounds of a request that become events. The number is OpenTelemetry's default limit on
the events of a span."""


class RoundEvents:
    """Collects the rounds of one request. Thread-safe."""

    def __init__(self, request: int, start: Start) -> None:
        self._request = request
        self._controller = start.controller
        self._model = start.model
        self._trace = start.trace
        self._began = time.monotonic()
        self._rounds = 0
        self._events: list[Happened] = []
        self._error: str | None = None

    @classmethod
    def of(cls, request: int, start: Start) -> RoundEvents | None:
        """The events of a request; None if the request or this process is not traced."""
        return cls(request, start) if start.trace and tracing.active() is not None else None

    def add(self, results: Sequence[StepResult], duration_s: float) -> None:
        """Adds a round that has ended, with the results of its sequence and of the sequences that
        the round created."""
        self._rounds += 1
        first = results[0]
        if first.error is not None:
            self._error = first.error
        if len(self._events) < MAX_EVENTS:
            attributes: dict[str, Any] = {
                "tokenbus.seq": first.seq,
                "tokenbus.action": first.action,
                "tokenbus.duration_us": int(duration_s * 1e6),
                "tokenbus.backtrack": first.backtrack,
                "tokenbus.appended_tokens": len(first.ff_tokens),
                "tokenbus.children": len(first.children),
            }
            self._events.append(Happened("round", time.monotonic() - duration_s, attributes))

    def end(self) -> None:
        """Called when the request ends: exports the span."""
        exporter = tracing.active()
        if exporter is not None:
            attributes: dict[str, Any] = {
                "gen_ai.request.model": self._model,
                "tokenbus.controller": self._controller,
                "tokenbus.rounds": self._rounds,
            }
            name = f"controller {self._controller}"
            exporter.record(
                name,
                self._trace,
                self._request,
                self._began,
                attributes,
                list(self._events),
                self._error,
            )
