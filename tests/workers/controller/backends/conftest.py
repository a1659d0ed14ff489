"""Fixtures of the tests of built-in constraints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers


@pytest.fixture(scope="module")
def matchers() -> Iterator[Matchers]:
    """Compiled grammars, without any at first."""
    made = Matchers()
    yield made
    made.close()
