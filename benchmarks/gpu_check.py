"""Checks and measures the engine on a GPU. ``gpu_check.md`` lists the commands.

Each stage runs in its own process with a time limit. A stage immediately writes each figure to
``results.jsonl``, as one line of JSON. With ``--dry``, all stages run on a CPU with small models,
in two processes. If Triton is installed, its interpreter then runs Triton's kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LINKS = ROOT / "build" / "gpu_check"
"""A folder for PYTHONPATH. Its folder ``tokenbus`` has links to the packages of this checkout."""
PACKAGES = ("protocol", "transport", "broker", "workers", "clients", "grammars", "inprocess")
DRY_LIMIT_S = 540.0
"""Time limit of a process in a dry run, in seconds. The limit is long because the machine may be
busy."""
PASSED = "passed"
"""The outcome of a stage that has not found a fault."""
DRY_JOBS = 2
"""Number of processes of a dry run. Each process runs a part of the stages."""


class Stage(NamedTuple):
    """A stage. The function ``run`` of its module runs the stage."""

    title: str
    module: str
    limit_s: float


STAGES = {
    1: Stage("versions, attention, graphs", "_gpu_stages_path", 60),
    2: Stage("attention against float32", "_gpu_stages_attention", 120),
    3: Stage("sampled tokens against the CPU's", "_gpu_stages_sampling", 90),
    4: Stage("tokens against transformers, no implicit device syncs", "_gpu_stages_engine", 120),
    5: Stage("graphs, loads and evictions", "_gpu_stages_graphs", 90),
    6: Stage("decode against the memory bandwidth", "_gpu_stages_speed", 540),
    7: Stage("profile, first tokens, the bus", "_gpu_stages_serving", 540),
    8: Stage("other engines side by side", "_gpu_stages_peers", 540),
}


def environment(dry: bool) -> dict[str, str]:
    """The environment variables of a stage's process, which imports this checkout as
    ``tokenbus``."""
    package = LINKS / "tokenbus"
    package.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link = package / name
        if not link.is_symlink() or link.resolve() != ROOT / name:
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / name)
    _write_metadata()
    paths = [str(LINKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
    own |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if dry:
        # Each stage of a dry run has one thread, because the stages share the cores.
        own |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return own


def _write_metadata() -> None:
    """Writes the package metadata. The controller worker reads the version from it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    folder = LINKS / f"tokenbus-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = ("Metadata-Version: 2.1", "Name: tokenbus", f"Version: {version}", "")
    (folder / "METADATA").write_text("\n".join(lines))


def run_stages(numbers: Sequence[int], dry: bool, results: Path, own: Mapping[str, str]) -> bool:
    """Runs stages one after another in one process. Returns whether all stages have passed. A
    failed stage ends the process."""
    limit = DRY_LIMIT_S if dry else sum(STAGES[number].limit_s for number in numbers)
    command = [sys.executable, __file__, "--results", str(results)] + ["--dry"] * dry
    for number in numbers:
        command += ["--inside", str(number)]
    error = ""
    process = subprocess.Popen(command, env=dict(own), cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit)
        if status:
            error = f"the stage ended with exit status {status}"
    except subprocess.TimeoutExpired:
        error = f"the stage did not end within {limit:.0f} s"
    finally:
        # This also ends the processes that the stage has started. They are in its process group.
        _end(process)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if error else []
    passed = {line["stage"] for line in lines if line["value"] == PASSED}
    for number in numbers if error else ():
        if number not in passed:
            _report(number, results, error)
            error = "an earlier stage failed in its process"
    return not error


def _report(number: int, results: Path, value: str, **more: float) -> None:
    """Writes the outcome of a stage to the results and the terminal."""
    line = {"stage": number, "name": "stage", "value": value, **more}
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"stage {number} ({STAGES[number].title}): {value}", *more.values(), flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the remaining processes of the process group of ``process``."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def inside(number: int, dry: bool, results: Path) -> None:
    """Runs the stage ``number`` in this process."""
    import logging

    from _gpu_world import World

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    stage = STAGES[number]
    began = time.monotonic()
    world = World(number, dry, results, DRY_LIMIT_S if dry else stage.limit_s)
    try:
        importlib.import_module(stage.module).run(world)
        world.finish()
    except (Exception, SystemExit) as error:
        world.record("error", f"{type(error).__name__}: {error}")
        raise
    _report(number, results, PASSED, seconds=round(time.monotonic() - began, 1))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--stage", type=int, action="append", choices=STAGES, help="run only this stage"
    )
    parser.add_argument("--dry", action="store_true", help="run on a CPU with small models")
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), metavar="FILE")
    parser.add_argument(
        "--inside", type=int, action="append", choices=STAGES, help=argparse.SUPPRESS
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the stages. Returns the exit code, which is 0 if all stages have passed."""
    options = parse()
    results = options.results.resolve()
    if options.inside:
        for number in options.inside:
            inside(number, options.dry, results)
        return 0
    own = environment(options.dry)
    numbers = options.stage or list(STAGES)

    def run(numbers: Sequence[int]) -> bool:
        return run_stages(numbers, options.dry, results, own)

    if options.dry:
        shares = [numbers[first::DRY_JOBS] for first in range(min(DRY_JOBS, len(numbers)))]
        with ThreadPoolExecutor(DRY_JOBS) as jobs:
            passed = list(jobs.map(run, shares))
    else:
        passed = [run([number]) for number in numbers]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
