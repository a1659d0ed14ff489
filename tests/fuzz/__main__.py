"""Coverage-guided fuzzing: ``python -m tests.fuzz TARGET --runs N``, or ``make fuzz``.

Inputs are made by libFuzzer (atheris), which keeps those that reach code which no other has
reached. Corpora are made by code and grow in ``build/fuzz/TARGET``; an input that fails is written
there too. At the end a line of JSON says how many inputs were tried, at which speed, and by how
much the process has grown since a tenth of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed; `make fuzz` installs it, on Linux and Python 3.11 to 3.13")

BUILD = Path(__file__).parents[2] / "build" / "fuzz"
MAX_INPUT_BYTES = 4096
HANG_S = 20
"""An input that takes longer, on a busy machine too, is a failure."""
MOST_MB = 2048
"""A process that is larger is a failure."""


def resident_mb() -> float:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Tries:
    """Counts inputs, and reports when the last one was tried."""

    def __init__(self, name: str, run: Callable[[bytes], None], runs: int) -> None:
        self._name, self._run, self._runs = name, run, runs
        self._count = 0
        self._began = time.monotonic()
        self._early_mb = 0.0

    def one(self, data: bytes) -> None:
        """Tries an input."""
        self._run(data)
        self._count += 1
        if self._count == self._runs // 10:
            self._early_mb = resident_mb()
        elif self._count == self._runs:
            seconds = time.monotonic() - self._began
            report = {
                "target": self._name,
                "inputs": self._count,
                "seconds": round(seconds, 1),
                "inputs_per_s": round(self._count / seconds),
                "rss_growth_mb": round(resident_mb() - self._early_mb, 1),
            }
            print(json.dumps(report), flush=True)


def main() -> None:
    """Fuzzes one target, with the arguments of the command line."""
    with atheris.instrument_imports(include=["tokenbus", "uvicorn"], enable_loader_override=False):
        from .targets import TARGETS
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument("--input", type=Path, help="try this one input only, as a failure")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    target = TARGETS[given.target]
    if given.input is not None:
        target.run(given.input.read_bytes())
        return
    folder = BUILD / given.target
    seeds, grown = folder / "seeds", folder / "corpus"
    for made in (seeds, grown):
        made.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.corpus()):
        (seeds / f"{i:04}").write_bytes(data)
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
    options = [
        f"-runs={given.runs}",
        f"-seed={given.seed}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MOST_MB}",
        f"-artifact_prefix={folder}/",
        *([f"-dict={words}"] if target.words else []),
        # Coverage of Python does not show which field a decoder written in C has reached.
        "-keep_seed=1",
        "-len_control=0",
    ]
    tries = Tries(given.target, target.run, given.runs)
    atheris.Setup([sys.argv[0], *options, str(grown), str(seeds)], tries.one)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
