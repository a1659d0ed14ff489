"""The metrics of processes: series of numbers and histograms, in the form of the answer to STATUS.

Workers count events, and send the totals with their heartbeats. The broker stores the last totals
of each worker. All gateways request them from the broker, so all of them report the same numbers,
for the requests of all clients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds of a histogram of times to a first token, in seconds."""
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Upper bounds of a histogram of times between tokens, in seconds."""
REQUEST_S = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Upper bounds of a histogram of times of requests, or of a phase of requests, in seconds."""
WAIT_S = (0.0, 0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.05)
"""Upper bounds of a histogram of the times that steps wait for masks, in seconds. A step waits at
most 5 ms plus the time to receive a message."""
TOKENS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000, 200_000),
)
"""Upper bounds of a histogram of numbers of tokens."""
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Upper bounds of a histogram of the number of tokens in a step."""

OTHER = "other"
"""When a label has its maximum number of different values, events with further values are counted
under this value."""


class Histogram(Struct):
    """Numbers of observed values by size. ``counts[i]`` is the number of values above
    ``bounds[i - 1]`` and up to ``bounds[i]``. The last count is the number of values above all
    bounds."""

    bounds: Sequence[float]
    counts: list[int]
    total: float = 0.0
    """The sum of all observations."""

    @classmethod
    def over(cls, bounds: Sequence[float]) -> Histogram:
        """An empty histogram. ``bounds``: the upper bounds, in ascending order."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value that was observed ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Series(Struct):
    """A number or a histogram, with a name and labels. ``value`` has no meaning if the series has a
    histogram."""

    name: str
    labels: dict[str, str]
    value: float = 0.0
    histogram: Histogram | None = None

    @classmethod
    def of(cls, name: str, labels: dict[str, str], value: float | Histogram) -> Series:
        """A series with a number or a histogram."""
        if isinstance(value, Histogram):
            return cls(name, labels, histogram=value)
        return cls(name, labels, value)


class Tally:
    """Counts events by the value of one label. At most ``max_values`` different values are counted
    separately; the events of all other values are counted under ``OTHER``."""

    def __init__(self, name: str, label: str, max_values: int = 64) -> None:
        self._name = name
        self._label = label
        self._max_values = max_values
        self._counts: dict[str, float] = {}

    def add(self, value: str, count: float = 1) -> None:
        """Adds ``count`` events with this value of the label. Only one thread at a time may call
        this method."""
        counts = self._counts
        if value not in counts and len(counts) >= self._max_values:
            value = OTHER
        counts[value] = counts.get(value, 0) + count

    def series(self, **labels: str) -> list[Series]:
        """The counts as series, which also have the labels ``labels``. May be called on another
        thread."""
        return [
            Series(self._name, {self._label: value, **labels}, count)
            for value, count in list(self._counts.items())
        ]
