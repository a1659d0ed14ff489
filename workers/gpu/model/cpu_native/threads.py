"""Measures steps on a CPU, and so chooses the number of threads of each forward.

A step of few tokens has many short parallel regions. On an idle machine, two threads halve the time
of each region. But if another process uses one of the cores, each region waits for a thread that is
not scheduled. A single thread is then several times as fast as two. So from time to time, each step
size has a trial: some steps with another number of threads. If steps get slower, a trial begins at
once. A size without measurements starts with the number of threads of the nearest size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

MAX_TOKENS = 64
"""Steps with more tokens than this number use all threads, because their parallel regions are
long."""
WINDOW = 8
"""Number of steps over which the median duration is taken."""
TRIAL = 4
"""Number of steps of a trial. If a step of the trial takes more than ``SLOWER`` times the usual
time, the trial ends early."""
FIRST_TRIAL, LAST_TRIAL = 32, 1024
"""Initial and maximum number of steps between two trials. After a trial that does not change the
number of threads, the next trial comes after twice as many steps as before."""
BETTER = 0.93
"""The number of threads of a trial is adopted if a step takes at most this fraction of the usual
time."""
SLOWER = 1.5
"""A trial begins if the median duration of recent steps is above this multiple of the usual time. A
running trial ends if one of its steps takes longer than this."""


@dataclass(slots=True)
class _Size:
    """The measurements for steps of one size."""

    threads: int
    times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    usual: float = float("inf")
    """Lowest median duration of a step since the number of threads was last decided, in seconds."""
    wait: int = FIRST_TRIAL
    until_trial: int = FIRST_TRIAL
    down: bool = True
    """Whether the next trial uses fewer threads."""
    trial: int = 0
    """Number of threads of the current trial; 0: no trial."""
    tried: list[float] = field(default_factory=list)
    decided: bool = False
    """Whether a trial has been completed for this size."""


class ThreadChooser:
    """The number of threads for each forward, at most ``max_threads``."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        """The number of threads for the next forward, of ``num_tokens`` tokens."""
        if self.max_threads == 1 or num_tokens > MAX_TOKENS:
            return self.max_threads
        size = self._size(num_tokens)
        if not size.trial and size.until_trial <= 0 and len(size.times) == WINDOW:
            size.trial = self._other(size)
            size.tried = []
        return size.trial or size.threads

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of a forward of ``num_tokens`` tokens, in seconds."""
        if self.max_threads == 1 or num_tokens > MAX_TOKENS:
            return
        size = self._size(num_tokens)
        if size.trial:
            size.tried.append(seconds)
            if len(size.tried) == TRIAL or seconds > SLOWER * median(size.times):
                self._decide(size)
            return
        size.times.append(seconds)
        size.until_trial -= 1
        if len(size.times) == WINDOW:
            now = median(size.times)
            if now > SLOWER * size.usual:
                size.wait = FIRST_TRIAL
                size.until_trial = 0
            size.usual = min(size.usual, now)

    def _size(self, num_tokens: int) -> _Size:
        number = num_tokens.bit_length()
        size = self._sizes.get(number)
        if size is None:
            nearest = min(self._sizes, key=lambda other: abs(other - number), default=None)
            size = _Size(self.max_threads)
            if nearest is not None and self._sizes[nearest].threads != self.max_threads:
                size.threads, size.until_trial = self._sizes[nearest].threads, WINDOW
            self._sizes[number] = size
        return size

    def _other(self, size: _Size) -> int:
        """The number of threads to try: alternately half and twice the current number."""
        fewer, more = max(1, size.threads // 2), min(self.max_threads, 2 * size.threads)
        down = more == size.threads or (size.down and fewer < size.threads)
        size.down = not down
        return fewer if down else more

    def _decide(self, size: _Size) -> None:
        if len(size.tried) == TRIAL and median(size.tried) < BETTER * median(size.times):
            size.threads = size.trial
            size.times.extend(size.tried)
            size.times.extend(size.tried)
            size.wait = FIRST_TRIAL
            self._suggest(size)
        else:
            size.wait = min(LAST_TRIAL, 2 * size.wait)
        size.usual = median(size.times)
        size.until_trial = size.wait
        size.trial = 0
        size.decided = True

    def _suggest(self, found: _Size) -> None:
        """Proposes the new number of threads of ``found`` to the other sizes, which try it soon. If
        a size has not completed a trial, it adopts the number at once."""
        for size in self._sizes.values():
            if size.threads == found.threads:
                continue
            if size.decided:
                size.until_trial = 0
                size.down = found.threads < size.threads
            else:
                size.threads, size.trial, size.until_trial = found.threads, 0, WINDOW
                size.times.clear()
