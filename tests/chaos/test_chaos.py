"""Streams of every kind, while a process is killed or stopped every two seconds: each ends with the
tokens, texts, logs, storage and finish reasons that it has in an undisturbed run, and none is sent
again. ``make chaos`` goes on for as long as asked."""

from __future__ import annotations

import asyncio

import pytest

from .run import run
from .system import running

pytestmark = pytest.mark.process

SEED = 1
KINDS = ("gpu", "state", "gateway", "door")
PLAIN = (
    "^(greedy|sampled|nucleus|penalised|biased|several |stop|end|buffer|score|sse-(text|log|sev))"
)
BLOWS = 20
SECONDS = 50.0
"""For blows. On a busy machine fewer fit in, as each waits until all streams have gone on."""


@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    # A process that gets no CPU time for some seconds is not given up as easily as usual.
    with running(expiry_s=15.0) as system:
        report = asyncio.run(run(system, SEED, KINDS, SECONDS, BLOWS, True, PLAIN))
    print(report)
    assert not report.failures, str(report)
    assert report.notes.moves, "no stream was with a worker that was killed or stopped"
