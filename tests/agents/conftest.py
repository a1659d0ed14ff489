"""Fixtures: a running system for unmodified clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..processes import Bus
from .local import Local


@pytest.fixture(scope="session")
def system(processes: None) -> Iterator[Local]:
    """A running system with the scripted model."""
    with Bus(kv_cache_bytes=64 * 2**20) as bus:
        yield Local(bus)


@pytest.fixture
def local(system: Local) -> Local:
    """The running system. The prompts that other tests sent are forgotten."""
    system.forget()
    return system
