"""Coverage-guided fuzzing: ``python -m tests.fuzz TARGET --runs N``, or ``make fuzz``.

libFuzzer (atheris) makes the inputs, and keeps those that reach new code. The function ``corpus``
of a target makes the first corpus. The corpus grows in ``build/fuzz/TARGET``, where failing inputs
are written too. At intervals and at the end, a line of JSON reports the number of inputs and their
rate. The line also has the peak memory of the process, and the growth of its memory since the first
tenth of the inputs.
With ``--fast``, inputs are mutations of the first corpus and of the grown corpus, and the code is
not instrumented.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from .mutations import mutated

if TYPE_CHECKING:
    from .target import Target

REPORT_EACH = 50_000
"""Number of inputs after which a report is printed."""
BUILD = Path(__file__).parents[2] / "build" / "fuzz"
HANG_S = 20
"""Maximum time of one input in seconds; an input that takes longer is a failure, even on a busy
machine."""
MAX_MB = 2048
"""Maximum memory of the process in MB; a larger process is a failure."""


def resident_mb() -> float:
    """The resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Tries:
    """Tries and counts inputs. Prints a report every ``REPORT_EACH`` inputs and after the last
    input."""

    def __init__(self, name: str, run: Callable[[bytes], None], runs: int, guided: bool) -> None:
        self._name, self._run, self._runs, self._guided = name, run, runs, guided
        self._count = 0
        self._began = time.monotonic()
        self._early_mb = 0.0

    def one(self, data: bytes) -> None:
        """Tries an input."""
        self._run(data)
        self._count += 1
        if self._count == self._runs // 10:
            self._early_mb = resident_mb()
        elif self._count == self._runs or self._count % REPORT_EACH == 0:
            seconds = time.monotonic() - self._began
            report = {
                "target": self._name,
                "guided": self._guided,
                "inputs": self._count,
                "seconds": round(seconds, 1),
                "inputs_per_s": round(self._count / seconds),
                "rss_growth_mb": round(resident_mb() - self._early_mb, 1),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            }
            print(json.dumps(report), flush=True)


def main() -> None:
    """Fuzzes one target, with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="seed of the mutations")
    parser.add_argument("--input", type=Path, help="try only the input in this file")
    parser.add_argument("--fast", action="store_true", help="mutate the corpora, without coverage")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    target = _target(given.target, guided=not given.fast and given.input is None)
    if given.input is not None:
        target.run(given.input.read_bytes())
        return
    folder = BUILD / given.target
    seeds, grown = folder / "seeds", folder / "corpus"
    for made in (seeds, grown):
        made.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.corpus()):
        (seeds / f"{i:04}").write_bytes(data)
    tries = Tries(given.target, target.run, given.runs, guided=not given.fast)
    if given.fast:
        files = sorted((*seeds.iterdir(), *grown.iterdir()))
        _try_mutations([file.read_bytes() for file in files], target, tries, given)
        return
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
    options = [
        f"-runs={given.runs}",
        f"-seed={given.seed}",
        f"-max_len={target.max_bytes}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MAX_MB}",
        f"-artifact_prefix={folder}/",
        *([f"-dict={words}"] if target.words else []),
        # The first corpus is kept, although many of its inputs reach the same Python code, because
        # coverage does not show which field a decoder in C has reached.
        "-keep_seed=1",
        "-len_control=0",
    ]
    import atheris

    atheris.Setup([sys.argv[0], *options, str(grown), str(seeds)], tries.one)
    atheris.Fuzz()


def _target(name: str, guided: bool) -> Target:
    """The target with this name. If ``guided``, its code is instrumented, so that it reports its
    coverage."""
    if not guided:
        from .targets import TARGETS
    else:
        try:
            import atheris
        except ImportError:
            what = "atheris is not installed; `make fuzz` installs it, on Linux and Python 3.11"
            sys.exit(f"{what} to 3.13")
        instrument = atheris.instrument_imports
        with instrument(include=["tokenbus", "uvicorn"], enable_loader_override=False):
            from .targets import TARGETS
    if name not in TARGETS:
        sys.exit(f"{name!r} is not a target; these are: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]


def _try_mutations(
    corpus: list[bytes], target: Target, tries: Tries, given: argparse.Namespace
) -> None:
    """Tries mutations of a corpus. An input that fails or takes too long is written next to the
    corpus."""
    hung = signal.SIGALRM
    signal.signal(hung, lambda *_: sys.exit(f"an input takes more than {HANG_S} s"))
    for data in islice(mutated(corpus, target.words, Random(given.seed)), given.runs):
        signal.alarm(HANG_S)
        try:
            tries.one(data[: target.max_bytes])
        except BaseException:
            (BUILD / given.target / "failed").write_bytes(data)
            raise
    signal.alarm(0)
    if resident_mb() > MAX_MB:
        sys.exit(f"the process has {resident_mb():.0f} MB; {MAX_MB} are allowed")


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
