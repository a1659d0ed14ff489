"""``python -m tests.chaos [--seconds S] [--seed N] [--kinds gpu,broker]``: runs the chaos test."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from .. import forks
from .close_calls import ROOT, close_calls
from .run import run
from .schedule import KINDS
from .system import System
from .workloads import modules, workloads


def main() -> int:
    """Runs the test; returns 1 if the report has failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="duration (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule (default: 1)")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="kinds of processes (default: all)"
    )
    parser.add_argument("--blows", type=int, help="number of blows, instead of --seconds")
    parser.add_argument("--brokers", type=int, default=1, help="number of brokers (default: 1)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between blows")
    parser.add_argument("--only-kills", action="store_true", help="kill processes, but stop none")
    parser.add_argument(
        "--patient", action="store_true", help="after each blow, wait until streams continue"
    )
    parser.add_argument("--only", default="", help="pattern of the requests' names")
    parser.add_argument("--undisturbed", type=int, default=1, help="number of rounds without blows")
    parser.add_argument("--close-calls", action="store_true", help="only find close calls")
    parser.add_argument("--set", action="append", default=[], help="setting, as NAME=VALUE")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    given = parser.parse_args()
    if given.close_calls:
        return find_close_calls()
    kinds = [kind for kind in KINDS if kind in given.kinds.split(",")]
    settings: dict[str, object] = dict(one.split("=", 1) for one in given.set)
    system = System(brokers=given.brokers, **settings)  # type: ignore[arg-type]
    print(f"logs: {system.folder}", flush=True)
    try:
        system.wait_until_complete()
        seconds = given.seconds if given.blows is None else None
        report = asyncio.run(
            run(
                system,
                given.seed,
                kinds,
                seconds,
                given.blows,
                given.patient,
                given.only,
                given.undisturbed,
                given.every,
                given.only_kills,
            )
        )
    finally:
        system.close()
        forks.close()
    print(report)
    if not report.failures and not given.keep:
        system.remove()
    return 1 if report.failures else 0


def find_close_calls() -> int:
    """Runs every request once; prints the requests whose tokens depend on the last bits of
    logits."""
    os.environ["PYTHONPATH"] = str(ROOT)
    system = System(gpu_workers=1, gpu_module="tests.chaos.close_calls")
    try:
        system.wait_until_complete()
        report = asyncio.run(run(system, 0, count=0))
        found = close_calls(system.of("gpu")[0].log)
    finally:
        system.close()
        forks.close()
    requests = workloads(set(modules()))
    for request in requests:
        if (times := found.get(request.options.get("seed", -1), 0)) > 0:
            print(f"{request.name}: {times}")
    print(report)
    system.remove()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
