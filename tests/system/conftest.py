"""What the tests of whole systems share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .foreground import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder of this test."""
    yield from short_folder()
