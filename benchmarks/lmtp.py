"""Compares this gateway with LMQL's server. Both serve LMQL's client.

Both servers have the same model of 15 million parameters. In turn, each runs 32 greedy streams. In
the uniform load, prompts have 32 tokens and answers 96. In the ragged load, prompts have 8 to 64
tokens and answers 16 to 128. All processes share the machine. The first run creates the two
environments for LMQL in ``build/environments``; a later run takes about three minutes.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from _environments import lmql_client, lmql_server
from _models import VOCAB, llama_folder
from _report import arguments, report
from _served import end
from gateway import System, free_port

STREAMS = 32
ROUNDS = 5
WARM = 0.1
"""Size of the first round, relative to a normal round. The first round is not measured."""
START_S = 300.0
HERE = Path(__file__).parent

Request = tuple[list[int], int]
"""A prompt and its ``max_tokens``."""

NOTES = {
    "lmtp_uniform_vs_lmql": "ratio of tokens/s to LMQL's server, uniform lengths; at least 1.3",
    "lmtp_ragged_vs_lmql": "ratio of tokens/s to LMQL's server, ragged lengths; at least 2.0",
    "uniform_tokens_per_s": "tokens/s of LMQL's client with this gateway, uniform lengths",
    "ragged_tokens_per_s": "tokens/s of LMQL's client with this gateway, ragged lengths",
    "lmql_uniform_tokens_per_s": "tokens/s of LMQL's client with LMQL's server, uniform lengths",
    "lmql_ragged_tokens_per_s": "tokens/s of LMQL's client with LMQL's server, ragged lengths",
}


class LmqlClient:
    """A process with LMQL's client, connected to a server."""

    def __init__(self, url: str, model: str) -> None:
        self._process = subprocess.Popen(
            [lmql_client(), HERE / "_lmql_client.py", url, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tokens_per_s(self, requests: list[Request]) -> float:
        """Begins all requests together and waits for their ends; returns tokens per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        assert found["tokens"] == sum(count for _, count in requests), found
        return float(found["tokens"] / found["seconds"])

    def close(self) -> None:
        """Ends the process."""
        end(self._process)


@contextmanager
def clients(model: Path) -> Iterator[dict[str, LmqlClient]]:
    """Runs both servers; yields a client of each."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tb-") as folder, ExitStack() as stack:
        theirs = subprocess.Popen(
            [lmql_server(), HERE / "_lmql_server.py", model, str(port)], stdout=subprocess.DEVNULL
        )
        stack.callback(end, theirs)
        ours = System(Path(folder), model)
        stack.callback(ours.close)
        ours.wait()
        _wait_for(port)
        opened: dict[str, LmqlClient] = {}
        for name, url, served in (
            ("ours", f"http://127.0.0.1:{ours.port}/", ours.model),
            ("lmql", f"http://127.0.0.1:{port}/", str(model)),
        ):
            opened[name] = LmqlClient(url, served)
            stack.callback(opened[name].close)
        yield opened


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            urlopen(f"http://127.0.0.1:{port}/", timeout=5.0)
        except URLError as error:
            # Once LMQL's server listens, it answers a plain HTTP request with an error status.
            if getattr(error, "code", None) is not None:
                return
        time.sleep(0.2)
    raise TimeoutError(f"LMQL's server did not listen within {START_S:g} s")


def uniform(chosen: random.Random, part: float) -> list[Request]:
    """Requests of equal lengths. ``part`` scales ``max_tokens``."""
    return [(_prompt(chosen, 32), int(96 * part)) for _ in range(STREAMS)]


def ragged(chosen: random.Random, part: float) -> list[Request]:
    """Requests of different lengths. ``part`` scales ``max_tokens``."""
    sizes = [(chosen.randint(8, 64), chosen.randint(16, 128)) for _ in range(STREAMS)]
    return [(_prompt(chosen, length), int(count * part)) for length, count in sizes]


def _prompt(chosen: random.Random, length: int) -> list[int]:
    return [chosen.randrange(300, VOCAB) for _ in range(length)]


def measure(quick: bool) -> dict[str, float]:
    """All figures: medians of rounds in which the servers take turns."""
    rates: dict[str, list[float]] = {}
    part = 0.25 if quick else 1.0
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        model = llama_folder(Path(folder) / "llama", num_hidden_layers=9, tie_word_embeddings=True)
        with clients(model) as both:
            for number in range(3 if quick else ROUNDS + 1):
                for kind in (uniform, ragged):
                    for name, client in both.items():
                        # Both servers receive the same new prompts, which no cache contains.
                        requests = kind(random.Random(number), part if number else WARM)
                        rate = client.tokens_per_s(requests)
                        if number:  # The first round warms up.
                            rates.setdefault(f"{name} {kind.__name__}", []).append(rate)
    found = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "lmtp_uniform_vs_lmql": found["ours uniform"] / found["lmql uniform"],
        "lmtp_ragged_vs_lmql": found["ours ragged"] / found["lmql ragged"],
        "uniform_tokens_per_s": found["ours uniform"],
        "ragged_tokens_per_s": found["ours ragged"],
        "lmql_uniform_tokens_per_s": found["lmql uniform"],
        "lmql_ragged_tokens_per_s": found["lmql ragged"],
    }


def main() -> None:
    """Measures and reports."""
    args = arguments(__doc__)
    report(measure(args.quick), NOTES, args.json)


if __name__ == "__main__":
    main()
