"""Builds the TypeScript client's package in a copy of its folder under ``build/``, so that nothing
is installed into the source folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "clients" / "typescript"
COPY = ROOT / "build" / "typescript"
LIMIT_S = 500.0
"""Time limit of a command, in seconds. Only a hang reaches this limit."""

needs_node = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")),
    reason="there is no node with npm: the TypeScript client is not built and not tested",
)


def run(*command: str | Path, **environment: str | Path) -> str:
    """Runs a command in the copy, and returns its output. Fails the test if the command fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=COPY,
        env=os.environ | {name: str(value) for name, value in environment.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}", pytrace=False)
    return done.stdout


def built_package() -> Path:
    """The folder of the built package. Only the first test process builds it, and only after a
    change of the sources. Dependencies are installed again only if the lock file has changed."""
    COPY.mkdir(parents=True, exist_ok=True)
    with (COPY / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built, sources = COPY / ".built", digest(SOURCES)
        if not built.exists() or built.read_text() != sources:
            built.unlink(missing_ok=True)
            build()
            built.write_text(sources)
    return COPY


def digest(folder: Path) -> str:
    """The SHA-256 of the files from which the package is built."""
    found = hashlib.sha256()
    for file in sorted([*folder.glob("*.*"), *folder.glob("src/*"), *folder.glob("test/*")]):
        if file.is_file():
            found.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return found.hexdigest()


def build() -> None:
    """Copies the sources, installs their dependencies, and runs the compiler."""
    for folder in ("src", "test", "dist"):
        shutil.rmtree(COPY / folder, ignore_errors=True)
    for folder in ("src", "test"):
        shutil.copytree(SOURCES / folder, COPY / folder)
    for name in ("package.json", "tsconfig.json", "README.md"):
        shutil.copy(SOURCES / name, COPY)
    lock, installed = (folder / "package-lock.json" for folder in (SOURCES, COPY))
    modules = COPY / "node_modules"
    if not (
        modules.exists() and installed.exists() and installed.read_bytes() == lock.read_bytes()
    ):
        shutil.copy(lock, installed)
        # If the installation fails, the folder is missing, and the next run tries again.
        shutil.rmtree(modules, ignore_errors=True)
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
    run("npm", "run", "build")
