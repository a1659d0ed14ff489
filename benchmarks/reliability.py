"""Measures the cost of reliability: the journal, moves, overload, and memory after many streams.

- Journal: tokens per second through a fully loaded broker, with and without the journal. The figure
  is their ratio. Also the journal's bytes for each token of a plain stream.
- Move: a worker is killed (SIGKILL) during a stream with a long prompt. The client's pause lasts
  from the broker's detection to the next token. The figure compares it with a prefill of the same
  number of tokens at the other worker.
- Overload: requests arrive at ten times the rate that the system can serve. The figure compares the
  completed tokens per second with those at the capacity. The GPU is simulated, and half of the
  requests have a timeout that may expire in the queue.
- Memory: the growth of the memory of broker and worker over 200,000 short streams with the
  simulated GPU.
- Attach: the connection of a client with 1,000 live streams is cut. The figure is the time from the
  client's ATTACHes on the next connection until each stream has received its next token. The GPU
  is simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import zmq
from _attach import come_back
from _report import arguments, report
from _served import GPU, HERE, START_S, end, environment
from tokenbus.broker.core import Broker
from tokenbus.broker.settings import BrokerSettings
from tokenbus.clients import AsyncClient, Client, GenerateOptions, TokenbusError
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.columns import pack_columns
from tokenbus.protocol.header import encode_header, encode_token_header
from tokenbus.protocol.messages import Generate, Hello, Token
from tokenbus.protocol.messages import System as Notice
from tokenbus.protocol.worker_messages import Register

NOTES = {
    "journal_overhead": "ratio of tokens/s, with the journal to without; at least 0.95",
    "journal_overhead_cpu": "ratio of the broker's CPU time per token, without journal to with",
    "tokens_per_s_without_journal": "tokens/s through the broker without the journal",
    "journal_bytes_per_token": "bytes per token of a plain stream, with its request; at most 64",
    "move_vs_prefill": "ratio of the pause after the detection to the prefill; at most 3",
    "move_pause_s": "seconds from SIGKILL to the next token",
    "move_detection_s": "seconds from SIGKILL to the broker's detection",
    "prefill_s": "seconds of the prefill of prompt and output at the other worker",
    "overload_goodput": "ratio of completed tokens/s, 10 times capacity to capacity; at least 0.9",
    "goodput_at_capacity": "completed tokens/s at the capacity",
    "goodput_at_10_times": "completed tokens/s at 10 times the capacity",
    "refused_at_10_times": "refused part of the requests at 10 times capacity",
    "overload_rss_mb": "growth of the broker's memory at 10 times capacity, MiB",
    "rss_growth_mb": "growth of broker and worker over 200,000 short streams, MiB; at most 30",
    "streams_per_s": "short streams per second",
    "attach_after_ms": "ms from the ATTACHes of 1,000 streams to the next token of each stream",
    "back_after_ms": "ms from the cut of the connection to the next token of each stream",
    "attach_cpu_ms": "ms of CPU time that a return takes, of broker, worker and client together",
}
MIB = 2**20
MOVED = re.compile(r"^(\S+ \S+) INFO request \d+ leaves worker", re.MULTILINE)
Socket = zmq.Socket[bytes]
# Imported by name. In an import statement, a type checker would find the folder ``broker`` instead
# of the file.
token_rate: Callable[..., Any] = importlib.import_module("broker").token_rate


# --- the journal ----------------------------------------------------------------------------------


def journal_overhead(folder: Path, rounds: int, steps: int) -> dict[str, float]:
    """Measures the broker with and without its journal, in alternating order."""
    rates, cpu, without = [], [], []
    for number in range(rounds):
        found = {}
        for kept in (True, False) if number % 2 else (False, True):
            settings = {} if kept else {"MAX_JOURNAL_BYTES": "0"}
            found[kept] = token_rate(folder, steps, columns=True, decoded=False, **settings)
        rates.append(found[True].per_s / found[False].per_s)
        cpu.append(found[False].cpu_us / found[True].cpu_us)
        without.append(found[False].per_s)
    return {
        "journal_overhead": statistics.median(rates),
        "journal_overhead_cpu": statistics.median(cpu),
        "tokens_per_s_without_journal": statistics.median(without),
    }


def journal_bytes(tokens: int) -> dict[str, float]:
    """The journal's bytes for each token of a stream with 100 tokens/s. The broker's core runs
    without sockets."""
    broker = Broker(BrokerSettings(), boot=1, now=0.0)
    register = Register(
        name="w", role="gpu", version=1, pid=1, host="h", capacity=8, patterns=["m"]
    )
    body = encode_body(register, "msgpack")
    broker.on_worker(b"\0w", [b"REGISTER", encode_header(), body], 0.0)
    hello = Hello(encodings=("msgpack",), capabilities=["columns", "bodies"])
    broker.on_client(b"\0c", [b"HELLO", encode_body(hello, "msgpack")], 0.0)
    request = Generate(stream_id=1, model="m", prompt=list(range(16)), max_tokens=tokens)
    broker.on_client(b"\0c", [b"GENERATE", encode_body(request, "msgpack")], 0.0)
    [session] = broker.state.sessions
    head = encode_token_header([session.id])
    draw = random.Random(1)
    ticks = 0
    for pos in range(tokens):
        now = pos / 100
        if now >= ticks * broker.settings.tick_s:
            ticks += 1
            broker.tick(now)
        entry = Token(
            token=(token := draw.randrange(128_000)),
            stream_id=1,
            logprob=(logprob := -draw.random()),
            finish_reason=None,
            top_logprobs={token: logprob},
            pos=pos,
        )
        columns = encode_body(pack_columns([entry]), "msgpack")
        broker.on_worker(b"\0w", [b"TOKEN", head, columns], now)
    recent = broker.state.recent
    return {"journal_bytes_per_token": (session.log.size + recent.size) / tokens}


# --- systems --------------------------------------------------------------------------------------


class System:
    """A broker and GPU workers with the embedded model."""

    def __init__(self, folder: Path, log_level: str = "warning", **settings: str) -> None:
        folder.mkdir(parents=True)
        self.front = f"ipc://{folder}/front.sock"
        self._settings = environment(
            front=self.front, run_dir=str(folder), log_level=log_level, **settings
        )
        self._log = (folder / "log").open("w")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.broker = self.start("-m", "tokenbus.broker")

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Starts another process of the system."""
        process = subprocess.Popen(
            [sys.executable, *command], env=self._settings, stdout=self._log, stderr=self._log
        )
        self._processes.append(process)
        return process

    def wait_for_workers(self, client: Client, count: int) -> None:
        """Waits until ``count`` workers serve their model."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(TokenbusError):
                if sum(bool(w.models) for w in client.status(timeout_s=5.0).workers) == count:
                    return
            time.sleep(0.1)
        raise SystemExit(f"{count} workers did not start in {START_S:g} s; see {self._log.name}")

    def last_move(self) -> float:
        """The last time at which the broker detected that a request had lost its worker, in seconds
        since 1970. The time comes from the broker's log."""
        times = MOVED.findall(Path(self._log.name).read_text())
        return datetime.strptime(times[-1], "%Y-%m-%d %H:%M:%S,%f").timestamp()

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                end(process)
        self._log.close()


@contextlib.contextmanager
def standin(folder: Path, forward_s: float, **settings: str) -> Iterator[tuple[System, int]]:
    """Runs a system with one worker, whose simulated forward takes ``forward_s``. Yields the system
    and the worker's process id."""
    with System(folder, **settings) as system:
        worker = system.start(str(HERE / "_standin_gpu.py"), str(forward_s), str(folder / "waits"))
        with Client(system.front, patience_s=START_S) as client:
            system.wait_for_workers(client, 1)
        yield system, worker.pid


def resident_mb(*pids: int) -> float:
    """The resident memory of processes together, in MiB."""
    return float(sum(psutil.Process(pid).memory_info().rss for pid in pids) / MIB)


# --- moves ----------------------------------------------------------------------------------------


def moves(folder: Path, rounds: int, prompt_tokens: int) -> dict[str, float]:
    """Kills the worker of a stream in each round; returns medians."""
    draw = random.Random(2)

    def prompt(length: int) -> list[int]:
        """A prompt that no cache contains."""
        return [draw.randrange(256, 1024) for _ in range(length)]

    ratios, pauses, prefills, detections = [], [], [], []
    with System(folder, "info") as system, Client(system.front, patience_s=START_S) as client:
        workers = {started.pid: started for started in (system.start(*GPU) for _ in range(2))}
        system.wait_for_workers(client, 2)
        for _ in range(rounds):
            moved: list[float] = []

            def note(notice: Notice, moved: list[float] = moved) -> None:
                if notice.event == "moved":
                    moved.append(time.time())

            stream = client.generate(
                prompt(prompt_tokens), max_tokens=300, ignore_eos=True, text=False, on_system=note
            )
            entries = iter(stream)
            for _ in range(20):
                next(entries)
            [live] = client.status(streams=True).live
            [running] = [w for w in client.status().workers if w.name == live.worker]
            workers[running.pid].send_signal(signal.SIGKILL)
            killed, first = time.time(), 0.0
            for _ in entries:
                if moved and not first:
                    first = time.time()
            del workers[running.pid]
            detected = system.last_move()
            length = prompt_tokens + 20
            times = []
            for _ in range(3):
                again = time.monotonic()
                next(iter(client.generate(prompt(length), max_tokens=1, text=False)))
                times.append(time.monotonic() - again)
            prefills.append(statistics.median(times))
            pauses.append(first - killed)
            detections.append(detected - killed)
            ratios.append((first - detected) / prefills[-1])
            started = system.start(*GPU)
            workers[started.pid] = started
            system.wait_for_workers(client, 2)
    return {
        "move_vs_prefill": statistics.median(ratios),
        "move_pause_s": statistics.median(pauses),
        "move_detection_s": statistics.median(detections),
        "prefill_s": statistics.median(prefills),
    }


# --- overload -------------------------------------------------------------------------------------

FORWARD_S = 0.025
SLOTS = 16
OUTPUT = 32
CAPACITY_PER_S = SLOTS / (OUTPUT * FORWARD_S)
"""Number of requests per second that could be served if a step took only its forward's time."""


async def arrivals(front: str, per_s: float, seconds: float) -> tuple[float, float]:
    """Sends requests from eight clients at a rate. Returns two numbers: the tokens per second of
    requests that complete in the second half of the time, and the share of refused requests."""
    clients = [AsyncClient(front, wait_for_room=False) for _ in range(8)]
    began = time.monotonic()
    completed, refused, sent = 0, 0, 0

    async def one(client: AsyncClient, timed: bool) -> None:
        nonlocal completed, refused
        options: GenerateOptions = {"max_tokens": OUTPUT, "ignore_eos": True, "text": False}
        options["retry_s"] = 0.0
        if timed:
            options["timeout_s"] = 5.0
        try:
            [sequence] = await client.generate([5] * 8, **options).wait()
        except TokenbusError as error:
            refused += error.code in ("queue_full", "client_limit")
            return
        if sequence.finish_reason == "length" and time.monotonic() - began > seconds / 2:
            completed += len(sequence.tokens)

    tasks = set()
    while (now := time.monotonic() - began) < seconds:
        while sent < per_s * now:
            task = asyncio.create_task(one(clients[sent % 8], timed=sent % 2 == 0))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.sleep(0.005)
    figures = completed / (seconds / 2), refused / sent
    for client in clients:
        await client.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


def overload(folder: Path, rounds: int, seconds: float) -> dict[str, float]:
    """Sends requests at the capacity and at ten times the capacity, in turn."""
    once, tenfold, refusals, growth = [], [], [], []
    settings = {"capacity": str(SLOTS), "max_queued": "400"}
    with standin(folder, FORWARD_S, **settings) as (system, _):
        asyncio.run(arrivals(system.front, 10 * CAPACITY_PER_S, seconds / 2))
        for _ in range(rounds):
            once.append(asyncio.run(arrivals(system.front, CAPACITY_PER_S, seconds))[0])
            before = resident_mb(system.broker.pid)
            tokens, refused = asyncio.run(arrivals(system.front, 10 * CAPACITY_PER_S, seconds))
            growth.append(resident_mb(system.broker.pid) - before)
            tenfold.append(tokens)
            refusals.append(refused)
    return {
        "overload_goodput": statistics.median(a / b for a, b in zip(tenfold, once, strict=True)),
        "goodput_at_capacity": statistics.median(once),
        "goodput_at_10_times": statistics.median(tenfold),
        "refused_at_10_times": statistics.median(refusals),
        "overload_rss_mb": max(growth),
    }


# --- memory ---------------------------------------------------------------------------------------

WINDOW = 128
"""Number of short streams that are open at the same time."""


def short_streams(front: str, count: int) -> None:
    """Runs ``count`` streams of one token from one client."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(front)

    def begin(number: int) -> None:
        body = Generate(stream_id=number, prompt=[5, 6, 7], max_tokens=1, ignore_eos=True)
        socket.send_multipart([b"GENERATE", encode_body(body, "msgpack")])

    for number in range(1, WINDOW + 1):
        begin(number)
    begun, ended = WINDOW, 0
    while ended < count:
        kind, *bodies = socket.recv_multipart()
        if kind == b"ERROR":
            raise SystemExit(f"a short stream failed: {bodies[0]!r}")
        if kind != b"TOKEN":
            continue
        for body in bodies:
            for entry in decode_as(list[Token], body, "msgpack"):
                if entry.finish_reason is not None:
                    ended += 1
                    if begun < count:
                        begun += 1
                        begin(begun)
    socket.close()


def memory(folder: Path, count: int) -> dict[str, float]:
    """The growth of the memory of broker and worker over ``count`` streams. A tenth of this number
    of streams runs first, to warm up."""
    with standin(folder, 0.0005, capacity=str(WINDOW)) as (system, worker):
        short_streams(system.front, count // 10)
        before, began = resident_mb(system.broker.pid, worker), time.monotonic()
        short_streams(system.front, count)
        took = time.monotonic() - began
        after = resident_mb(system.broker.pid, worker)
    return {"rss_growth_mb": after - before, "streams_per_s": count / took}


# --- attach ---------------------------------------------------------------------------------------


def attach(folder: Path, rounds: int, streams: int, tokens: int) -> dict[str, float]:
    """Cuts the connection of a client with ``streams`` streams, and measures the time until all
    streams continue. Before the cut, each stream has received at least ``tokens`` tokens. The
    figures are medians of ``rounds`` cuts."""
    settings = {"capacity": str(streams), "max_running": str(streams)}
    # The KV cache has room for all streams, so that none is preempted. The simulated device does
    # not write to this memory.
    settings["kv_cache_bytes"] = str(4096 * MIB)
    with standin(folder, FORWARD_S, **settings) as (system, worker):
        pids = (system.broker.pid, worker, os.getpid())
        returns = asyncio.run(come_back(system.front, streams, tokens, rounds, pids))
    return {
        "attach_after_ms": statistics.median(one.attach_s for one in returns) * 1000,
        "back_after_ms": statistics.median(one.cut_s for one in returns) * 1000,
        "attach_cpu_ms": statistics.median(one.cpu_s for one in returns) * 1000,
    }


def main() -> None:
    """Measures and reports."""
    args = arguments(__doc__)
    quick = args.quick
    with tempfile.TemporaryDirectory(prefix="tb-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        results = journal_overhead(folder, 3 if quick else 11, 3_000 if quick else 20_000)
        results |= journal_bytes(2_000)
        results |= moves(folder / "moves", 1 if quick else 5, 800)
        results |= overload(folder / "overload", 1 if quick else 3, 10.0 if quick else 20.0)
        results |= memory(folder / "memory", 10_000 if quick else 200_000)
        results |= attach(folder / "attach", 1 if quick else 7, 1_000, 200)
    report(results, NOTES, args.json)


if __name__ == "__main__":
    main()
