"""The wait for an item of a queue ends when an item arrives, or when its time is up."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from tokenbus.transport.waiting import get_within

ROOT = Path(__file__).parents[2]
PACKAGES = ("transport", "workers", "broker", "clients", "inprocess")


def test_it_returns_what_is_there_and_what_comes() -> None:
    queue: SimpleQueue[int] = SimpleQueue()
    queue.put(1)
    assert get_within(queue, 0.0) == 1
    later = threading.Timer(0.05, queue.put, [2])
    later.start()
    assert get_within(queue, 600.0) == 2
    later.join()
    queue.put(3)
    assert get_within(queue, None) == 3


def test_it_ends_where_nothing_comes() -> None:
    """The wait ends even if its time is very short. About one in 80,000 such calls of ``get`` alone
    waits forever."""
    for _ in range(20_000):
        queue: SimpleQueue[int] = SimpleQueue()
        with pytest.raises(Empty):
            get_within(queue, 1e-9)


def test_no_other_code_waits_for_a_queue() -> None:
    """``get`` with a time-out may wait forever; the docstring of ``get_within`` says why."""
    waits = re.compile(r"\.get\((timeout=|True,)")
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if waits.search(path.read_text())
    }
    assert found == {"transport/waiting.py"}
