"""Compares the CPU time for tokens in columns with the CPU time for tokens as entries in JSON.

Figures of a client: a process with one ``AsyncClient`` reads 64 streams. A raw socket acts as the
worker, and sends the tokens through a real broker, as fast as the client reads.
``client_us_per_token`` is the client's CPU time per token in microseconds, if ``stream.tokens``
reads each stream to its end. For ``client_us_per_token_each``, ``async for`` reads each stream
entry by entry. The names of figures with entries in JSON end with ``_json``. ``client_core`` is the
share of one CPU core that a client uses to read 64 streams entry by entry, if 200 steps arrive per
second. Figures of a GPU worker: ``send_us_per_step`` is the CPU time of ``LiveStreams.send`` in
microseconds for a step of 64 plain tokens of one session. Everything is measured in several rounds,
and each round measures both columns and JSON. Each figure is the median over the rounds. A ratio is
computed within each round.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq
from _report import arguments, report
from _served import end, environment
from tokenbus.clients import AsyncClient
from tokenbus.clients.session import ClientSession
from tokenbus.clients.streams import AsyncStream
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.header import Flag, decode_header, encode_header, encode_token_header
from tokenbus.protocol.messages import Generate, Token
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.worker_messages import Register
from tokenbus.workers.gpu.engine.sequence import Sequence, StepOutputs, TokenColumns
from tokenbus.workers.gpu.serving.live_streams import LiveStreams
from tokenbus.workers.gpu.serving.streams import Stream

STREAMS = 64
ROUNDS = 5
STEPS_PER_S = 200
FORMS = ("columns", "json")


# --- the client process ---------------------------------------------------------------------------


def _client(front: str, form: str, pipe: Connection) -> None:
    """Runs the client process. The process receives orders on ``pipe``. Each order is the name of a
    function in ``WAYS``. For each order, the process reads 64 streams with this function. It
    answers with the seconds of CPU time, the elapsed seconds and the number of tokens."""
    if form == "json":
        ClientSession.encodings, ClientSession.capabilities = ("json",), ("ping", "bodies")
    asyncio.run(_read_runs(front, pipe))


async def _read_runs(front: str, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()

    async def order() -> Any:
        return await loop.run_in_executor(None, pipe.recv)

    async with AsyncClient(front) as client:
        while (way := await order()) is not None:
            streams = [client.generate([1], model="m", seed=1) for _ in range(STREAMS)]
            readers = [asyncio.ensure_future(WAYS[way](stream)) for stream in streams]
            began = await order()
            cpu, real = time.process_time(), time.perf_counter()
            pipe.send(began)
            counts = await asyncio.gather(*readers)
            pipe.send((time.process_time() - cpu, time.perf_counter() - real, sum(counts)))


async def _whole(stream: AsyncStream) -> int:
    return len(await stream.tokens())


async def _each(stream: AsyncStream) -> int:
    count = 0
    async for entry in stream:
        count += entry.token is not None
    return count


WAYS: dict[str, Callable[[AsyncStream], Any]] = {"whole": _whole, "each": _each}


class Pipe(Protocol):
    """The connection to a client process."""

    def send(self, value: Any, /) -> None:
        """Sends an order."""

    def recv(self) -> Any:
        """Receives the next answer."""


# --- the broker and the worker --------------------------------------------------------------------


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[tuple[str, str]]:
    """Runs a broker in its own process; yields its two addresses."""
    front, back = f"ipc://{folder}/front.sock", f"ipc://{folder}/back.sock"
    settings = environment(front=front, back=back, max_pending_bytes=str(2**31), expiry_s="600")
    command = [sys.executable, "-m", "tokenbus.broker"]
    process = subprocess.Popen(command, env=settings, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield front, back
    finally:
        end(process)


class Worker:
    """A raw socket that acts as a registered worker for the model ``m``."""

    def __init__(self, back: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(back)
        register = Register(
            name="w", role="gpu", version=1, pid=1, host="h", capacity=10_000, patterns=["m"]
        )
        body = encode_body(register, "msgpack")
        self._socket.send_multipart(pack([b"REGISTER", encode_header(), body]))
        assert self._receive()[0] == b"REGISTERED"

    def _receive(self) -> list[bytes]:
        return unpack(self._socket.recv_multipart())

    def messages(self, steps: int) -> list[list[bytes]]:
        """Receives the next 64 requests; returns ``steps`` messages, each with one token for each
        request."""
        requests: list[tuple[int, int]] = []
        while len(requests) < STREAMS:
            frames = self._receive()
            if frames[0] == b"GENERATE":
                header = decode_header(frames[1])
                generate: Generate = decode_as(Generate, frames[2])
                requests.append((header.request, generate.stream_id))
        found = []
        for pos in range(steps):
            entries = [plain_entry(s, 1000 + s % 500, -1.25, pos, 0) for _, s in requests]
            finished = []
            if pos == steps - 1:
                finished = [request for request, _ in requests]
                for entry in entries:
                    entry.finish_reason = "length"
            head = encode_token_header([header.address], finished)
            found.append(pack([b"TOKEN", head, _body(entries, header.flags)]))
        return found

    def send(self, messages: list[list[bytes]], per_s: float | None) -> None:
        """Sends ``per_s`` messages per second. If ``per_s`` is None, sends as fast as possible."""
        began = time.perf_counter()
        for number, frames in enumerate(messages):
            if per_s is not None:
                time.sleep(max(0.0, began + number / per_s - time.perf_counter()))
            self._socket.send_multipart(frames)


def _body(entries: list[Token], flags: int) -> bytes:
    if flags & Flag.COLUMNS:
        return encode_body(pack_columns(entries), "msgpack")
    return encode_body(entries, "msgpack" if flags & Flag.MSGPACK else "json")


def cpu_us(
    worker: Worker, pipe: Pipe, way: str, steps: int, per_s: float | None = None
) -> tuple[float, float]:
    """The client's CPU time per token in microseconds, and its CPU time divided by the elapsed
    time."""
    pipe.send(way)
    messages = worker.messages(steps)
    pipe.send("begin")
    pipe.recv()
    worker.send(messages, per_s)
    cpu_s, real_s, tokens = pipe.recv()
    assert tokens == STREAMS * steps, f"{tokens} of {STREAMS * steps} tokens arrived"
    return 1e6 * cpu_s / tokens, cpu_s / real_s


def client_figures(rounds: int = ROUNDS, steps: int = 600) -> dict[str, float]:
    """Measures the client. Returns the figures by name."""
    found: dict[tuple[str, str], list[float]] = {}
    cores: list[float] = []
    spawn = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tb-") as name, broker(Path(name)) as (front, back):
        worker = Worker(back)
        pipes: dict[str, Connection] = {}
        processes = []
        for form in FORMS:
            pipes[form], theirs = spawn.Pipe()
            process = spawn.Process(target=_client, args=(front, form, theirs), daemon=True)
            process.start()
            processes.append(process)
            cpu_us(worker, pipes[form], "each", 20)
        for _ in range(rounds):
            for way in WAYS:
                for form in FORMS:
                    us, _ = cpu_us(worker, pipes[form], way, steps)
                    found.setdefault((way, form), []).append(us)
            cores.append(cpu_us(worker, pipes["columns"], "each", steps // 2, STEPS_PER_S)[1])
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()
    return {
        "client_us_per_token": statistics.median(found["whole", "columns"]),
        "client_us_per_token_json": statistics.median(found["whole", "json"]),
        "client_vs_json": _ratio(found["whole", "columns"], found["whole", "json"]),
        "client_us_per_token_each": statistics.median(found["each", "columns"]),
        "client_us_per_token_each_json": statistics.median(found["each", "json"]),
        "client_each_vs_json": _ratio(found["each", "columns"], found["each", "json"]),
        "client_core": statistics.median(cores),
    }


# --- the GPU worker's side ------------------------------------------------------------------------


def _send_us(columns: bool, steps: int) -> float:
    """Microseconds of CPU time to send a step of 64 plain tokens of one session. In this time, the
    worker encodes the message, and stores the entries for clients that attach."""
    streams = LiveStreams(lambda frames, link: None, lambda stream: None)
    sequences = []
    for request in range(1, STREAMS + 1):
        stream = Stream(request, 1, request, "msgpack" if columns else "json", "m", 1)
        stream.columns = columns
        streams.add(stream)
        sequences.append(Sequence(request, 0, [1], 1, Sampling(), steps + 2))
    tokens, logprobs = np.arange(STREAMS) + 1000, np.full(STREAMS, -1.25)
    outputs = [
        TokenColumns(sequences, tokens, logprobs, np.full(STREAMS, pos)) for pos in range(steps)
    ]
    began = time.process_time()
    for of_step in outputs:
        streams.send(StepOutputs([], of_step) if columns else StepOutputs(list(of_step)))
    return 1e6 * (time.process_time() - began) / steps


def send_figures(rounds: int = ROUNDS, steps: int = 500) -> dict[str, float]:
    """Measures the GPU worker. Returns the figures by name."""
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        for form, values in found.items():
            values.append(_send_us(form == "columns", steps))
    return {
        "send_us_per_step": statistics.median(found["columns"]),
        "send_us_per_step_json": statistics.median(found["json"]),
        "send_vs_json": _ratio(found["columns"], found["json"]),
    }


def _ratio(ours: list[float], over: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, over, strict=True))


NOTES = {
    "client_us_per_token": "microseconds of AsyncClient's CPU time per token in columns; "
    "stream.tokens reads each stream",
    "client_us_per_token_json": "client_us_per_token, if the tokens are entries in JSON",
    "client_vs_json": "client_us_per_token divided by client_us_per_token_json; at most 0.333",
    "client_us_per_token_each": "microseconds of AsyncClient's CPU time per token in columns; "
    "'async for' reads each stream",
    "client_us_per_token_each_json": "client_us_per_token_each, if the tokens are entries in JSON",
    "client_each_vs_json": "client_us_per_token_each divided by client_us_per_token_each_json",
    "client_core": f"share of a core that AsyncClient uses for {STEPS_PER_S} steps of 64 tokens "
    "per second; at most 0.5",
    "send_us_per_step": "microseconds of a GPU worker's CPU time to send a step of 64 streams in "
    "columns",
    "send_us_per_step_json": "send_us_per_step, if the tokens are entries in JSON",
    "send_vs_json": "send_us_per_step divided by send_us_per_step_json; at most 0.333",
}


def main() -> None:
    """Runs all measurements and reports the figures."""
    args = arguments(__doc__)
    rounds, steps = (2, 200) if args.quick else (ROUNDS, 600)
    report(client_figures(rounds, steps) | send_figures(rounds, steps), NOTES, args.json)


if __name__ == "__main__":
    main()
