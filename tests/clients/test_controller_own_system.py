"""If no broker answers, ``tokenbus controller run`` starts a system for one run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients.cli.own_system import broker_answers
from tokenbus.clients.system.processes import started_by
from tokenbus.clients.system.run_dir import RunDir
from tokenbus.protocol.settings import Settings

from ..processes import clean_environment, until
from .controller_command import PROMPT, TOKENBUS, tokenbus
from .wasm_guests import LOGS

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for files that the command keeps during the run."""
    if broker_answers(Settings()):
        pytest.skip("a system runs at the default address, and would be used")
    path = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.process
def test_without_a_system_one_is_started_for_the_run_and_ended(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "logs.wasm"
    file.write_bytes(LOGS)
    run = tokenbus(
        None, "run", str(file), "--prompt", PROMPT, "--max-tokens", "4", "--json",
        TMPDIR=str(folder),
    )  # fmt: skip
    [sequence] = json.loads(run.stdout)["sequences"]
    assert (sequence["logs"], run.returncode) == ("round\n" * 4, 0)
    assert "starting a system with the model embedded" in run.stderr
    assert not list(folder.glob("tokenbus-run-*"))


@pytest.mark.process
@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_its_system(folder: Path, wish: signal.Signals) -> None:
    process = subprocess.Popen(
        [TOKENBUS, "controller", "run", "choice", "--arg", '["a"]'],
        env=clean_environment() | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def runs() -> bool:
        return any(started_by(RunDir(path)) for path in folder.glob("tokenbus-run-*"))

    until(runs, 120.0, "the start of the system")
    [path] = folder.glob("tokenbus-run-*")
    process.send_signal(wish)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert started_by(RunDir(path)) == []
    assert not path.exists()


@pytest.mark.process
def test_a_system_that_cannot_start_is_reported_with_its_reason(folder: Path) -> None:
    done = tokenbus(None, "run", "x", "--model", "/nowhere", TMPDIR=str(folder))
    assert done.returncode == 3
    assert "/nowhere" in done.stderr
    assert not list(folder.glob("tokenbus-run-*"))


@pytest.mark.process
def test_a_named_system_that_does_not_answer_is_an_error(folder: Path) -> None:
    done = tokenbus(None, "run", "x", "--front", "tcp://127.0.0.1:9", TMPDIR=str(folder))
    assert done.returncode == 3
    assert "tcp://127.0.0.1:9" in done.stderr
    assert os.listdir(folder) == []
