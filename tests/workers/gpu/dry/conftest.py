"""The device of fake tensors, a model on it, and an engine that all tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model

from .device import Device, fake_device, llama_8b
from .steps import BATCH, LAYERS, make


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with fake_device() as device:
        yield device


@pytest.fixture(scope="module")
def loaded(device: Device) -> LoadedModel:
    return wrap_model("8b", llama_8b(LAYERS))


@pytest.fixture(scope="module")
def shared(loaded: LoadedModel) -> Engine:
    """An engine whose steps overlap."""
    return make(loaded)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The shared engine, without requests before and after the test."""
    yield shared
    for number in range(BATCH):
        shared.abort(number)
    while shared.has_work:
        shared.step()
