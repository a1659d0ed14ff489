"""Fixtures of the tests of an engine."""

from __future__ import annotations

import pytest
from tokenbus.workers.gpu import worker
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    """The embedded model, loaded for the tests of one file."""
    return load_model("embedded")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an idle worker's turn end without a wait, because these tests run its turns one by
    one."""
    monkeypatch.setattr(worker, "IDLE_S", 0.0)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether the steps of the engine under test overlap. Tests expect the same results in both
    cases."""
    return bool(request.param)
