"""Measures the time of compiling grammars, and counts the requests whose grammar was already
compiled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from .....protocol.errors import RequestError
from .....protocol.metrics import LATENCY_S, Histogram, Series
from .bounds import RefusedGrammar


class CompileMeter:
    """The counters of one controller worker, by constraint. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._hits: dict[str, int] = {}

    def hit(self, constraint: str) -> None:
        """Counts a request whose grammar was already compiled."""
        with self._lock:
            self._hits[constraint] = self._hits.get(constraint, 0) + 1

    @contextlib.contextmanager
    def measured(self, constraint: str) -> Iterator[None]:
        """Measures the time of one compilation. The time includes the wait for a free process,
        because this wait also delays the first mask of the request."""
        began = time.perf_counter()
        outcome = "failed"
        try:
            yield
            outcome = "compiled"
        except (RefusedGrammar, RequestError):
            outcome = "refused"
            raise
        finally:
            self._observe(constraint, outcome, time.perf_counter() - began)

    def series(self) -> list[Series]:
        """All counters."""
        with self._lock:
            found = [
                Series("grammar_cache_hits", {"constraint": constraint}, count)
                for constraint, count in self._hits.items()
            ]
            for (constraint, outcome), seconds in self._seconds.items():
                labels = {"constraint": constraint, "outcome": outcome}
                copy = Histogram(seconds.bounds, list(seconds.counts), seconds.total)
                found.append(Series("grammar_compile_seconds", labels, histogram=copy))
            return found

    def _observe(self, constraint: str, outcome: str, seconds: float) -> None:
        with self._lock:
            histogram = self._seconds.get((constraint, outcome))
            if histogram is None:
                histogram = self._seconds[constraint, outcome] = Histogram.over(LATENCY_S)
            histogram.observe(seconds)
