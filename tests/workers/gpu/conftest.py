"""Fixtures of the tests of an engine."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether the steps of the engine under test overlap. Tests expect the same results in both
    cases."""
    return bool(request.param)
