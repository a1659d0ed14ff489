"""Fixtures of the tests of several clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from .typescript_package import built_package


@pytest.fixture(scope="session")
def package(processes: None) -> Path:
    """The folder of the TypeScript client's package, built."""
    return built_package()
