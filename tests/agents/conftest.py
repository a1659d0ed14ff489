"""The system that the clients use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..processes import Bus
from .local import Local


@pytest.fixture(scope="session")
def system(processes: None) -> Iterator[Local]:
    """A running system."""
    with Bus(kv_cache_bytes=64 * 2**20) as bus:
        yield Local(bus)


@pytest.fixture
def local(system: Local) -> Local:
    """The system, without the prompts of other tests."""
    system.forget()
    return system
