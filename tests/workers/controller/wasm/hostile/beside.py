"""A stream that runs beside others, in a process of its own, and how even its steps are.

``python -m tests.workers.controller.wasm.hostile.beside FRONT CONTROLLER`` runs a stream again and
again and writes the time of each token to stdout: a double, by ``time.monotonic``, and a NaN
between two streams. It ends, with a message, when a stream fails or brings other tokens than the
first one did.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Self

from tokenbus.clients import Client

from .....processes import clean_environment, until

PROMPT = "def add(a, b):"
TOKENS = 600
ROOT = Path(__file__).parents[5]


class Beside:
    """The process and the times of its tokens.

    with Beside(front, "calm") as beside:
        beside.gaps(since, until)
    """

    def __init__(self, front: str, controller: str) -> None:
        self._times: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, front, controller],
            cwd=ROOT,
            env=clean_environment(),
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._read, daemon=True).start()
        until(lambda: len(self._times) > 50, 30.0, "a stream beside")

    @property
    def alive(self) -> bool:
        """Whether it runs: no stream has failed."""
        return self._process.poll() is None

    def gaps(self, since: float, until: float) -> list[float]:
        """The times between tokens, in seconds, that lie in a span of time or reach into it."""
        return [b - a for a, b in pairwise(self._times[:]) if b >= since and a <= until]

    def wait_past(self, moment: float) -> None:
        """Waits for two tokens after a moment: a step that it held up has been told of then."""

        def past() -> bool:
            return sum(t > moment for t in self._times[-100:]) >= 2

        until(past, 20.0, "the stream beside goes on")

    def _read(self) -> None:
        assert self._process.stdout is not None
        while len(one := self._process.stdout.read(8)) == 8:
            self._times.append(struct.unpack("<d", one)[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run(front: str, controller: str, times: BinaryIO) -> None:
    """Runs until it is killed."""
    first: list[int] = []
    with Client(front) as client:
        while True:
            stream = client.generate(
                PROMPT, controller=controller, max_tokens=TOKENS, ignore_eos=True, text=False
            )
            for _ in stream:
                times.write(struct.pack("<d", time.monotonic()))
            times.write(struct.pack("<d", float("nan")))
            [sequence] = stream.sequences
            first = first or sequence.tokens
            assert sequence.tokens == first, f"other tokens: {sequence.tokens} for {first}"
            assert len(first) == TOKENS, f"{len(first)} tokens"


if __name__ == "__main__":
    with open(sys.stdout.fileno(), "wb", buffering=0) as out:
        run(sys.argv[1], sys.argv[2], out)
