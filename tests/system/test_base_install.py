"""The base install: a client and a broker, without torch."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ..processes import Bus, clean_environment

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel_file: Path) -> str:
    """The interpreter of a new environment that has only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder)
    python = str(folder / "bin" / "python")
    # The pip of this interpreter is used, because copying pip into the environment takes seconds.
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    # Python compiles the modules that the test imports. pip would compile hundreds more.
    command = [sys.executable, *install, str(wheel_file)]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return python


def test_the_base_install_runs_the_client_and_the_broker(python: str, bus: Bus) -> None:
    without = "import importlib.util as u; print([u.find_spec(m) for m in ('torch', 'numpy')])"
    done = subprocess.run([python, "-c", without], capture_output=True, text=True, check=True)
    assert done.stdout == "[None, None]\n"
    code = (
        "import sys; from tokenbus.clients import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    print(len(client.generate([5], max_tokens=4, ignore_eos=True).tokens()))"
    )
    environment = clean_environment()
    done = subprocess.run(
        [python, "-c", code, bus.front],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd="/",
    )
    assert done.stdout == "4\n"
    with Bus(python=python) as own:
        own.start_worker()
        own.wait_for_models("embedded")
        with own.client() as client:
            assert len(client.generate([5], max_tokens=4, ignore_eos=True).tokens()) == 4
