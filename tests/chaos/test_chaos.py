"""Runs streams of every kind while a process is killed or stopped every two seconds. Each stream
must have the tokens, texts, logs, storage and finish reasons of an undisturbed run, and may be sent
again only after the death of a broker. ``make chaos`` runs for a chosen time."""

from __future__ import annotations

import asyncio

import pytest

from .run import run
from .schedule import KINDS
from .system import running

pytestmark = pytest.mark.process

SEED = 55
"""A seed with which the first signals hit every kind of process, including a broker and workers of
all roles."""
BLOWS = 12
SECONDS = 60.0
"""Duration of the run with signals, in seconds. On a busy machine fewer signals are sent, because
each signal waits until all streams have continued."""


@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    with running() as system:
        report = asyncio.run(run(system, SEED, KINDS, SECONDS, BLOWS, patient=True))
        print(report)
        assert not report.failures, str(report)
