"""Python controllers are loaded by the names of their module and attribute, and served."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.controller.python import load_program

from .runs import Run, says


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator's module in the current directory, next to two modules that cannot be loaded."""
    source = """
        from tokenbus.workers.controller.python import Controller, PythonProgram

        class Upper(Controller):
            tokenbus_name = "upper"

        class Plain(Controller):
            pass

        class Wants(Controller):
            def __init__(self, x):
                pass

        class Misspelt(Controller):
            def mid_proces(self, fork_group):
                pass

        class Camel(Plain):
            def initPrompt(self, prompt):
                pass

        class Few(Controller):
            def mid_process(self):
                pass

        class Helped(Controller):
            def my_process(self):
                pass

            def _mid_process(self):
                pass

            def post_process(self, tokens, *others):
                pass

            def post_processing(self):
                pass

        class Other:
            pass

        async def main(ctx):
            await ctx.fixed("x")

        async def two(ctx, arg):
            pass

        async def bare():
            pass

        def sync(ctx):
            pass

        program = PythonProgram(Plain)
    """
    path = tmp_path / "operators_own.py"
    path.write_text(textwrap.dedent(source))
    (tmp_path / "operators_broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "operators_failing.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    return path


@pytest.mark.usefixtures("module")
def test_a_class_a_script_and_a_program_are_loaded_by_name() -> None:
    for attribute, name in (
        ("Upper", "upper"),
        ("Plain", None),
        ("main", None),
        ("program", None),
        ("Helped", None),
    ):
        spec = f"operators_own:{attribute}"
        registered, program = load_program(spec)
        assert registered == (name or spec)
        assert Run(program, choose=says("a")).ended == {0: "stop"}


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("operators_own", "expected module:Name"),
        ("operators_nothing:X", "no module operators_nothing found from "),
        ("operators_own.sub:X", "no module operators_own.sub found from "),
        ("operators_broken:X", "imports nothing_of_that_name, which is not installed"),
        ("operators_failing:X", "raised ZeroDivisionError: division by zero"),
        ("operators_own:Missing", "the module 'operators_own' has no attribute 'Missing'"),
        ("operators_own:Other", "does not extend tokenbus.workers.controller.python.Controller"),
        ("operators_own:sync", "is not a controller; a script is an async def"),
        (
            "operators_own:bare",
            "is async def bare(), which cannot be called with one argument, the context:",
        ),
        (
            "operators_own:two",
            "missing a required argument: 'arg'; expected async def two(ctx)",
        ),
        (
            "operators_own:Misspelt",
            "has a method mid_proces, which is never called, but does not have mid_process",
        ),
        (
            "operators_own:Camel",
            "has a method initPrompt, which is never called, but does not have init_prompt",
        ),
        ("operators_own:Few", "Few.mid_process(self) cannot be called: too many positional"),
        ("operators_own:Wants", "has an __init__ that requires arguments"),
        ("operators_own:__name__", "is not a controller; expected a subclass of Controller"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        load_program(spec)


@pytest.mark.process
@pytest.mark.usefixtures("module")
def test_a_worker_without_a_broker_says_what_it_has_loaded_and_not_that_it_serves(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tokenbus.workers.controller"]
    worker = subprocess.Popen(
        [*command, "operators_own:Upper", "operators_own:main"],
        env=os.environ | {"TOKENBUS_RUN_DIR": str(tmp_path / "run")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stderr is not None
        first = worker.stderr.readline()
        assert (
            "loaded upper, operators_own:main; once registered, try: tokenbus controller run upper"
            in first
        )
        assert "serves" not in first
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=300)
