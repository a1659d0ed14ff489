"""Runs the broker's quick tests against each seeded fault: ``python -m tests.mutants [-k WORDS]``.

The tests of a fault run on a copy of ``broker/`` with that fault, and have to fail.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
TESTS = ("tests/broker", "tests/model")
"""The folders whose tests run. Tests that start processes are left out."""
LEFT_OUT = "tests/broker/test_lifecycle.py::test_the_docs_have_the_diagram_of_the_table"
"""This test fails after any change of the transitions, whether or not the change is a fault."""
TIMEOUT_S = 900
_RUN = """
import sys
import __editable___tokenbus_0_1_0_finder as finder
finder.MAPPING["tokenbus.broker"] = sys.argv[1]
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def faulty(fault: Fault, folder: Path) -> Path:
    """Makes a copy of ``broker/`` with a fault in ``folder``; returns its path."""
    copy = folder / "broker"
    shutil.copytree(ROOT / "broker", copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / fault.file
    source = path.read_text()
    assert source.count(fault.old) == 1, f"{fault.name}: {fault.file} has changed"
    path.write_text(source.replace(fault.old, fault.new))
    return copy


def found(fault: Fault) -> tuple[bool, str]:
    """Whether the tests find a fault, and the first test that fails, or the end of the output if no
    test fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = faulty(fault, Path(folder))
        options = (
            "-x",
            "-q",
            "-m",
            "not process",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "--deselect",
            LEFT_OUT,
        )
        command = [sys.executable, "-c", _RUN, str(copy), *options, *TESTS]
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ran.returncode == 1, failed[0][:150] if failed else ran.stdout[-300:] + ran.stderr[-300:]


def main() -> None:
    """Tries the faults, and prints the test that has found each fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only faults with this text in their name")
    parser.add_argument("--processes", type=int, default=2, help="processes (default: 2)")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.k in fault.name]
    missed = 0
    with ThreadPoolExecutor(given.processes) as pool:
        for fault, (is_found, how) in zip(chosen, pool.map(found, chosen), strict=True):
            missed += not is_found
            print(f"{'found ' if is_found else 'MISSED'} {fault.name}: {how}", flush=True)
    print(f"{len(chosen)} faults, {missed} missed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
