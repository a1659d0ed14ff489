"""Compares the gateway with our Python client (*bus client*). Both use the same broker and worker.

The model is a Llama with 21 million parameters. Each round runs 64 streams three times: through the
bus client, as server-sent events of ``/v1/completions``, and over one WebSocket. Then the time to
the first token of a single request is measured, in turn through the bus client and as server-sent
events. At the end, the gateway's memory for 2,000 idle connections is measured. All processes run
on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from _models import llama_folder
from _report import arguments, report
from tokenbus.clients import AsyncClient, Client, TokenbusError
from websockets.asyncio.client import connect

STREAMS = 64
TOKENS = 96
PROMPT = list(range(300, 332))
IDLE = 2_000

NOTES = {
    "sse_vs_bus": "tokens/s as server-sent events of /v1/completions, divided by tokens/s "
    "through the bus client; 64 streams; at least 0.95",
    "ws_vs_bus": "tokens/s over one WebSocket, divided by tokens/s through the bus client; 64 "
    "streams; at least 0.8",
    "ttft_added_vs_bus": "time to the first token from /v1/completions, divided by that through "
    "the bus client; at most 1.2",
    "idle_connections_mb": "MB of the gateway's memory for 2,000 idle connections, half of them "
    "WebSockets; at most 100",
    "bus_tokens_per_s": "tokens/s of 64 streams through the bus client",
}


class System:
    """A broker, a GPU worker with the model in the folder ``model``, and a gateway."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = str(model)
        self.port = free_port()
        self.front = f"tcp://127.0.0.1:{free_port()}"
        settings = {
            "front": self.front,
            "back": f"ipc://{folder}/back.sock",
            "run_dir": str(folder),
            "model": self.model,
            "http": f"127.0.0.1:{self.port}",
            "threads": "1",
            "log_level": "warning",
        }
        own = {f"TOKENBUS_{name.upper()}": value for name, value in settings.items()}
        self.processes = [
            subprocess.Popen([sys.executable, "-m", module], env={**os.environ, **own})
            for module in ("tokenbus.broker", "tokenbus.workers.gpu", "tokenbus.clients.gateway")
        ]

    @property
    def gateway_memory(self) -> int:
        """The memory that only the gateway's process uses, in bytes."""
        text = Path(f"/proc/{self.processes[2].pid}/smaps_rollup").read_text()
        private = [line.split()[1] for line in text.splitlines() if line.startswith("Private_")]
        return sum(map(int, private)) * 1024

    def wait(self) -> None:
        """Waits until the worker has the model and the gateway is ready."""
        with Client(self.front, patience_s=120.0) as client:
            client.model_info(self.model, timeout_s=120.0)
        wait_until_ready(f"127.0.0.1:{self.port}")

    def close(self) -> None:
        """Kills all processes."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@contextmanager
def system() -> Iterator[System]:
    """Runs a system with the benchmark's model."""
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        running = System(Path(folder), llama_folder(Path(folder) / "llama"))
        try:
            running.wait()
            yield running
        finally:
            running.close()


def wait_until_ready(address: str) -> None:
    """Waits until the gateway at an address is ready."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        try:
            with urlopen(f"http://{address}/ready", timeout=5.0):
                return
        except OSError:
            time.sleep(0.1)
    raise TokenbusError("no_worker", "the gateway is not ready")


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Sse:
    """A connection to ``/v1/completions``. One stream after another uses it until the gateway
    closes it."""

    def __init__(self, running: System) -> None:
        self._running = running
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def stream(self, tokens: int) -> float:
        """Runs a stream to its end. Returns the time to its first token in seconds."""
        # The connection was idle while other interfaces were measured, so the gateway may have
        # closed it.
        if self._streams is None or self._streams[0].at_eof():
            self._streams = await asyncio.open_connection("127.0.0.1", self._running.port)
        reader, writer = self._streams
        body = json.dumps(
            {
                "model": self._running.model,
                "prompt": PROMPT,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer + await reader.read(4096)
        first = 0.0
        while True:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            part = await reader.readexactly(size + 2)
            if size == 0:
                return first
            if not first and b"data:" in part:
                first = time.perf_counter() - began


async def bus_tokens_per_s(running: System, client: AsyncClient, tokens: int) -> float:
    """Tokens per second of all ``STREAMS`` streams together through the bus client."""

    async def one() -> None:
        stream = client.generate(
            PROMPT, model=running.model, max_tokens=tokens, ignore_eos=True, text=True
        )
        assert len(await stream.tokens()) == tokens

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(STREAMS)))
    return STREAMS * tokens / (time.perf_counter() - began)


async def sse_tokens_per_s(connections: list[Sse], tokens: int) -> float:
    """Tokens per second of all streams together as server-sent events. Each stream has its own
    connection."""
    began = time.perf_counter()
    await asyncio.gather(*(one.stream(tokens) for one in connections))
    return STREAMS * tokens / (time.perf_counter() - began)


async def ws_tokens_per_s(running: System, tokens: int) -> float:
    """Tokens per second of all ``STREAMS`` streams together over one WebSocket. The messages
    contain the text of each token."""
    async with connect(f"ws://127.0.0.1:{running.port}/", max_queue=None) as websocket:
        began = time.perf_counter()
        for number in range(STREAMS):
            body = {
                "stream_id": number,
                "model": running.model,
                "prompt": PROMPT,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "text": True,
            }
            await websocket.send("GENERATE " + json.dumps(body))
        ended = count = 0
        while ended < STREAMS:
            kind, _, text = str(await websocket.recv()).partition(" ")
            assert kind in ("TOKEN", "SYSTEM"), text
            for entry in json.loads(text) if kind == "TOKEN" else []:
                count += entry["token"] is not None
                ended += entry["finish_reason"] is not None
        assert count == STREAMS * tokens
        return count / (time.perf_counter() - began)


async def bus_first_token_s(running: System, client: AsyncClient) -> float:
    """Seconds to the first token of a single request through the bus client."""
    began = time.perf_counter()
    stream = client.generate(PROMPT, model=running.model, max_tokens=2, ignore_eos=True, text=True)
    first = 0.0
    async for _ in stream:
        first = first or time.perf_counter() - began
    return first


async def speeds(running: System, rounds: int, tokens: int) -> dict[str, float]:
    """Measures tokens per second and the time to the first token in several rounds. Returns the
    ratios of the medians."""
    found: dict[str, list[float]] = {name: [] for name in ("bus", "sse", "ws")}
    times: dict[str, list[float]] = {name: [] for name in ("bus", "sse")}
    connections = [Sse(running) for _ in range(STREAMS)]
    async with AsyncClient(running.front) as client:
        for number in range(rounds + 1):
            bus = await bus_tokens_per_s(running, client, tokens)
            sse = await sse_tokens_per_s(connections, tokens)
            ws = await ws_tokens_per_s(running, tokens)
            if number:  # The first round warms up.
                for name, value in (("bus", bus), ("sse", sse), ("ws", ws)):
                    found[name].append(value)
        for _ in range(rounds * 60):
            times["bus"].append(await bus_first_token_s(running, client))
            times["sse"].append(await connections[0].stream(2))
    per_s = {name: statistics.median(values) for name, values in found.items()}
    first = {name: statistics.median(values) for name, values in times.items()}
    return {
        "sse_vs_bus": per_s["sse"] / per_s["bus"],
        "ws_vs_bus": per_s["ws"] / per_s["bus"],
        "ttft_added_vs_bus": first["sse"] / first["bus"],
        "bus_tokens_per_s": per_s["bus"],
    }


async def idle_mb(running: System) -> float:
    """The gateway's memory for 2,000 idle connections, in megabytes."""
    before = running.gateway_memory
    url = f"ws://127.0.0.1:{running.port}/"
    sockets = [await connect(url, ping_interval=None, compression=None) for _ in range(IDLE // 2)]
    plain = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(IDLE // 2)]
    for reader, writer in plain:
        writer.write(b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"}")
    added = running.gateway_memory - before
    for _, writer in plain:
        writer.close()
    await asyncio.gather(*(one.close() for one in sockets))
    return added / 1e6


async def measure(quick: bool) -> dict[str, float]:
    """Runs all measurements. Returns the figures by name."""
    with system() as running:
        found = await speeds(running, 2 if quick else 5, TOKENS // 2 if quick else TOKENS)
        return {**found, "idle_connections_mb": await idle_mb(running)}


def main() -> None:
    """Measures everything and reports the figures."""
    args = arguments(__doc__)
    report(asyncio.run(measure(args.quick)), NOTES, args.json)


if __name__ == "__main__":
    main()
