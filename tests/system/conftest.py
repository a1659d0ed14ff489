"""Fixtures of the tests of whole systems."""

from __future__ import annotations

import fcntl
import os
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
    """A folder with a short path, for one test."""
    yield from short_folder()


@pytest.fixture(scope="session")
def wheel_file(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from a copy of the sources, so that it has no files of an older build.

    The first test process that needs the wheel builds it for all test processes.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    out = folder / "wheels"
    with (folder / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(out.glob("*.whl")):
            _build_wheel(tmp_path_factory.mktemp("sources"), out)
    [file] = out.glob("*.whl")
    return file


def _build_wheel(copy: Path, out: Path) -> None:
    without = shutil.ignore_patterns("__pycache__")
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=without)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([sys.executable, *build, str(out), str(copy)], check=True, capture_output=True)
