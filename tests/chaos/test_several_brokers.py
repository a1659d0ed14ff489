"""Two brokers, one of which is killed every few seconds: every stream ends with the tokens, texts,
logs, storage and finish reasons that it has in an undisturbed run. ``make chaos
ARGS='--brokers 2 --kinds broker --only-kills --every 10'`` goes on for as long as asked."""

from __future__ import annotations

import asyncio

import pytest

from .run import run
from .system import running

pytestmark = pytest.mark.process

SEED = 3
"""Its blows are to either broker."""
BLOWS = 3
SECONDS = 40.0
"""For blows."""
EVERY_S = 4.0
"""Longer than a broker takes to start on most machines, so that the other one is there."""
REQUESTS = "^(greedy|sampled|several|buffer|score|regex|best_of-1|backtrack|barrier|tree) [01]$"
"""Plain, constrained, controlled and forked ones."""


@pytest.mark.timeout(900)
def test_streams_go_on_at_the_other_broker() -> None:
    with running(brokers=2, gpu_workers=1, controller_workers=1) as system:
        report = asyncio.run(
            run(
                system,
                SEED,
                ("broker",),
                SECONDS,
                BLOWS,
                patient=True,
                only=REQUESTS,
                between_s=EVERY_S,
                only_kills=True,
            )
        )
        print(report)
        assert not report.failures, str(report)
        assert report.notes.cut_off, "no stream was at a broker that was killed"
