"""The TypeScript client: generated messages, strict types, and its own tests on a running system.

They run in a copy of its folder under ``build/``, so that nothing is installed into the sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tokenbus.clients.typescript.generate import OUTPUT, typescript

from ..processes import Bus
from . import wasm_guests

SOURCES = OUTPUT.parents[1]
COPY = SOURCES.parents[1] / "build" / "typescript"
LIMIT_S = 500.0
"""Bounds a hang."""

needs_node = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")),
    reason="there is no node with npm: the TypeScript client is not built and not tested",
)


def run(*command: str | Path, **environment: str | Path) -> str:
    """Runs a command in the copy; its output. Fails the test with it if the command fails."""
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


@pytest.fixture(scope="session")
def package() -> Path:
    """The built package. Only the first of all test processes builds it, and only after a change;
    its dependencies are installed again only where the lock file has changed."""
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
    """The SHA-256 of the files that make the package."""
    found = hashlib.sha256()
    for file in sorted([*folder.glob("*.*"), *folder.glob("src/*"), *folder.glob("test/*")]):
        if file.is_file():
            found.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return found.hexdigest()


def build() -> None:
    """Copies the sources, installs what they need, and runs the compiler."""
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
        # A failed installation leaves no such folder, so that the next run tries again.
        shutil.rmtree(modules, ignore_errors=True)
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
    run("npm", "run", "build")


def test_the_committed_messages_are_those_of_the_structs() -> None:
    assert OUTPUT.read_text() == typescript(), (
        f"{OUTPUT.name} is not what the structs say: run "
        "python -m tokenbus.clients.typescript.generate"
    )


@needs_node
@pytest.mark.process
def test_the_public_types_have_no_any(package: Path) -> None:
    declarations = [*(package / "dist" / "src").glob("*.d.ts")]
    assert declarations
    for file in declarations:
        text = re.sub(r"/\*.*?\*/|//.*", "", file.read_text(), flags=re.DOTALL)
        assert not re.search(r"\bany\b", text), file.name


@needs_node
def test_its_own_tests_pass_on_a_running_system(
    package: Path, steered: Bus, tmp_path: Path
) -> None:
    for name in ("LOGS", "FAILS", "FORKS", "SPLICES"):
        (tmp_path / f"{name.lower()}.wasm").write_bytes(getattr(wasm_guests, name))
    tests = sorted((package / "dist" / "test").glob("*.test.js"))
    output = run(
        "node",
        "--test",
        *tests,
        TOKENBUS_TEST_FRONT=steered.front,
        TOKENBUS_TEST_WASM=tmp_path,
    )
    assert re.search(r"^. pass [1-9]", output, re.MULTILINE), output


@needs_node
def test_the_first_minute_of_its_readme_works(package: Path, steered: Bus) -> None:
    [example] = re.findall(r"```js\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
    (package / "dist" / "first.mjs").write_text(example)
    output = run("node", "dist/first.mjs", TOKENBUS_FRONT=steered.front)
    assert re.search(r"^[0-9]{3}-[0-9]{4}$", output, re.MULTILINE), output
