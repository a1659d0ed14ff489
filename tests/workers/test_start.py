"""A worker with wrong settings reports the error and exits with 2, so that it is not restarted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..processes import clean_environment

pytestmark = pytest.mark.process


@pytest.mark.parametrize("role", ["gpu", "controller", "state"])
def test_an_address_that_is_not_valid_is_refused_by_name(role: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"tokenbus.workers.{role}"],
        env=clean_environment(back="nowhere", run_dir=tmp_path, model="auto"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    # Libraries may print warnings first.
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"tokenbus {role} worker: 'nowhere' is not a valid address")
    assert "Traceback" not in ended.stderr
