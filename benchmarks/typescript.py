"""Compares the TypeScript client's CPU time for tokens in columns with that for entries in JSON.

A Node process with one client reads 64 streams of token ids. A raw socket acts as the worker, and
sends the tokens through a real broker, as fast as the client reads. In figures with ``ws``, the
client uses a gateway's WebSocket; in figures with ``zmq``, it uses ZeroMQ. ``…_us_per_token`` is
the CPU time of the Node process per token in microseconds, if ``stream.tokens()`` reads each stream
to its end. For ``…_us_per_token_each``, ``for await`` reads each stream entry by entry. The names
of figures with entries in JSON end with ``_json``. Everything is measured in several rounds, and
each round measures both columns and JSON. Each figure is the median over the rounds. A ratio is
computed within each round. The client's package is built with node and npm.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _report import arguments, report
from _served import end, environment
from client import WAYS, Worker, broker, cpu_us

HERE = Path(__file__).parent
FORMS = ("columns", "json")
ROUNDS = 5
START_S = 60.0


class Node:
    """A Node process with a client. It has the interface of a pipe for orders and answers."""

    def __init__(self, built: Path, address: str, form: str) -> None:
        script = HERE / "_typescript_client.mjs"
        command = ["node", str(script), str(built), address, form]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, value: Any) -> None:
        """Sends an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(value)}\n")
        self.process.stdin.flush()

    def recv(self) -> Any:
        """Receives the next answer."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def gateway(folder: Path, front: str) -> Iterator[str]:
    """Runs a gateway in its own process. Yields the address of its WebSocket."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    settings = environment(
        front=front, http=f"127.0.0.1:{port}", run_dir=str(folder), log_level="warning"
    )
    command = [sys.executable, "-m", "tokenbus.clients.gateway"]
    process = subprocess.Popen(command, env=settings, cwd=folder)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield f"ws://127.0.0.1:{port}/"
    finally:
        end(process)


def figures(built: Path, rounds: int, steps: int) -> dict[str, float]:
    """Runs all rounds. Returns the figures by name."""
    found: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb-")))
        front, back = stack.enter_context(broker(folder))
        addresses = {"ws": stack.enter_context(gateway(folder, front)), "zmq": front}
        worker = Worker(back)
        nodes: dict[tuple[str, str], Node] = {}
        for way_in, address in addresses.items():
            for form in FORMS:
                nodes[way_in, form] = node = Node(built, address, form)
                stack.callback(end, node.process)
                cpu_us(worker, node, "each", steps)
        for _ in range(rounds):
            for way in WAYS:
                for (way_in, form), node in nodes.items():
                    us, _ = cpu_us(worker, node, way, steps)
                    found.setdefault((way_in, way, form), []).append(us)
    report: dict[str, float] = {}
    for way_in in addresses:
        for way, suffix in (("whole", ""), ("each", "_each")):
            columns, entries = (found[way_in, way, form] for form in FORMS)
            ratios = [a / b for a, b in zip(columns, entries, strict=True)]
            report[f"{way_in}_us_per_token{suffix}"] = statistics.median(columns)
            report[f"{way_in}_us_per_token{suffix}_json"] = statistics.median(entries)
            report[f"{way_in}{suffix}_vs_json"] = statistics.median(ratios)
    return report


NOTES = {
    "ws_us_per_token": "microseconds of the client's CPU time per token over a WebSocket, in "
    "columns",
    "ws_us_per_token_json": "ws_us_per_token, if the tokens are entries in JSON",
    "ws_vs_json": "ws_us_per_token divided by ws_us_per_token_json",
    "ws_us_per_token_each": "ws_us_per_token, if 'for await' reads each stream entry by entry",
    "zmq_us_per_token": "microseconds of the client's CPU time per token over ZeroMQ, in columns",
}


def main() -> None:
    """Runs all measurements and reports the figures."""
    args = arguments(__doc__)
    sys.path.insert(0, str(HERE.parent))
    from tests.clients.typescript_package import built_package

    rounds, steps = (2, 200) if args.quick else (ROUNDS, 600)
    report(figures(built_package(), rounds, steps), NOTES, args.json)


if __name__ == "__main__":
    main()
