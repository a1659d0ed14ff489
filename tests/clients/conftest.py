"""Fixtures that tests of several clients share."""

from __future__ import annotations

from pathlib import Path

import pytest

from .typescript_package import built_package


@pytest.fixture(scope="session")
def package(processes: None) -> Path:
    """The folder with the built package of the TypeScript client."""
    return built_package()
