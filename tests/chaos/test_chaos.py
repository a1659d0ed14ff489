"""Streams of every kind, while a process is killed or stopped every two seconds: each ends with the
tokens, texts, logs, storage and finish reasons that it has in an undisturbed run, and none is sent
again. ``make chaos`` goes on for as long as asked."""

from __future__ import annotations

import asyncio

import pytest

from .run import run
from .schedule import KINDS
from .system import running

pytestmark = pytest.mark.process

SEED = 44975
"""Its first blows are to every kind of process, a broker and workers of all roles among them."""
BLOWS = 12
SECONDS = 60.0
"""For blows. On a busy machine fewer fit in, as each waits until all streams have gone on."""


@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    with running() as system:
        report = asyncio.run(run(system, SEED, KINDS, SECONDS, BLOWS, patient=True))
        print(report)
        assert not report.failures, str(report)
