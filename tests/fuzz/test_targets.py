"""Tries a few inputs of each fuzz target; ``make fuzz`` tries millions of inputs, guided by
coverage."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ..counts import examples
from .mutations import inputs
from .targets import TARGETS

SEQUENCES = {"broker", "client", "http", "wasm_native", "wasm_aici"}
"""Targets whose inputs are sequences of events, which take longer."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.long
def test_no_input_makes_a_target_fail(name: str) -> None:
    target = TARGETS[name]
    for data in inputs(target, examples(50 if name in SEQUENCES else 500)):
        target.run(data)
