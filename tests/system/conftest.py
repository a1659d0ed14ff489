"""What the tests of whole systems share."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .foreground import short_folder

ROOT = Path(__file__).parents[2]
PACKAGES: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "setuptools"
]["package-dir"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder of this test."""
    yield from short_folder()


@pytest.fixture(scope="session")
def wheel_file(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing of an older build gets in."""
    copy = tmp_path_factory.mktemp("sources")
    without = shutil.ignore_patterns("__pycache__")
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=without)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    out = copy / "wheels"
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([sys.executable, *build, str(out), str(copy)], check=True, capture_output=True)
    [file] = out.glob("*.whl")
    return file
