"""Runs two brokers, one of which is killed every few seconds. Each stream must have the tokens,
texts, logs, storage and finish reasons of an undisturbed run. ``make chaos
ARGS='--brokers 2 --kinds broker --only-kills --every 10'`` runs for a chosen time."""

from __future__ import annotations

import asyncio

import pytest

from .run import run
from .system import running

pytestmark = pytest.mark.process

SEED = 3
"""A seed with which both brokers are killed."""
BLOWS = 3
EVERY_S = 4.0
"""Seconds between two kills. On most machines, a broker restarts in less time, so one broker always
runs."""
REQUESTS = "^(greedy|sampled|several|buffer|score|regex|best_of-1|backtrack|barrier|tree) [01]$"
"""Pattern of the names of plain, constrained, controlled and forked requests."""


@pytest.mark.timeout(900)
def test_streams_go_on_at_the_other_broker() -> None:
    with running(brokers=2, gpu_workers=1, controller_workers=1) as system:
        report = asyncio.run(
            run(
                system,
                SEED,
                ("broker",),
                count=BLOWS,
                patient=True,
                only=REQUESTS,
                between_s=EVERY_S,
                only_kills=True,
            )
        )
        print(report)
        assert not report.failures, str(report)
        assert report.notes.cut_off, "the killed brokers had no streams"
