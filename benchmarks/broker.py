"""Compares the broker with ``zmq.proxy`` by messages per second and by latency, and measures the
broker's tokens per second.

The broker runs in its own process. The worker and its clients are raw sockets in two other
processes, which need little time for a message. All figures are medians over several rounds. Each
round measures all compared paths or formats, one after another. CPU times are also valid on a busy
machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import zmq
from _report import arguments, report
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.columns import TokenColumns, pack_columns, unpack_columns
from tokenbus.protocol.header import decode_header, encode_header, encode_token_header
from tokenbus.protocol.messages import Hello, Token
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register
from zmq.backend import Socket as BackendSocket

BODY = b"x" * 200
CLIENTS = 8
STEP_TOKENS = 64
RATE = 10_000
RUNS = 5
CAPABILITIES = ["columns", "bodies"]
"""The capabilities that the measured clients send in HELLO. The capabilities change the form of
``TOKEN`` messages. Our own clients also have them."""
HOP_ROUNDS = 11

Socket = zmq.Socket[bytes]
_MORE = zmq.SNDMORE
_SEND = BackendSocket.send
_RECV: Callable[..., Any] = BackendSocket.recv


def dealer(endpoint: str) -> Socket:
    """A connected DEALER whose queues are not bounded."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(endpoint)
    return socket


class Rate(NamedTuple):
    """The rate of messages through a process."""

    per_s: float
    cpu_us: float
    """Microseconds of the process's CPU time for each message."""


Decode = Callable[[bytes], None] | None


def _cpu_s(pid: int) -> float:
    """The CPU time of a process in seconds."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


# --- the measured processes ---------------------------------------------------------------------


@contextlib.contextmanager
def broker(folder: Path, **more: str) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Runs Tokenbus's broker with the settings ``more``. Yields its two addresses, and a function
    that returns its CPU time in seconds."""
    front, back = f"ipc://{folder}/front.sock", f"ipc://{folder}/back.sock"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
    settings = {"FRONT": front, "BACK": back, "MAX_PENDING_BYTES": str(2**31), "EXPIRY_S": "600"}
    # The streams never end. With the default of this setting, a broker that stops would wait 30 s
    # for them.
    settings["DRAIN_S"] = "0.1"
    settings |= more
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenbus.broker"],
        env=environment | {f"TOKENBUS_{k}": v for k, v in settings.items()},
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield front, back, partial(_cpu_s, process.pid)
    finally:
        # SIGINT stops the broker. After SIGTERM, the broker would expect that the next broker
        # continues its streams.
        process.send_signal(signal.SIGINT)
        process.wait(10)


def _proxy(front: str, back: str) -> None:
    context = zmq.Context()
    a, b = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, where in ((a, front), (b, back)):
        socket.set_hwm(0)
        socket.bind(where)
    zmq.proxy(a, b)


@contextlib.contextmanager
def proxy(folder: Path) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Runs ``zmq.proxy`` between a ROUTER and a DEALER. Yields its two addresses, and a function
    that returns its CPU time in seconds."""
    front, back = f"ipc://{folder}/pf.sock", f"ipc://{folder}/pb.sock"
    process = mp.Process(target=_proxy, args=(front, back), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield front, back, partial(_cpu_s, process.pid)
    finally:
        process.kill()
        process.join()


def _register(back: str) -> Socket:
    """Registers as a worker that serves the model ``m``; returns the worker's socket."""
    worker = dealer(back)
    body = Register(
        name="w", role="gpu", version=1, pid=1, host="h", capacity=10_000, patterns=["m"]
    )
    worker.send_multipart(pack([b"REGISTER", encode_header(), encode_body(body, "msgpack")]))
    assert unpack(worker.recv_multipart())[0] == b"REGISTERED"
    return worker


def _sessions(worker: Socket, count: int) -> list[int]:
    """Receives one request of each of ``count`` clients, and returns the sessions in the requests'
    headers."""
    found: list[int] = []
    while len(found) < count:
        frames = unpack(worker.recv_multipart())
        if frames[0] == b"GENERATE":
            found.append(decode_header(frames[1]).address)
    return found


def _join(front: str, capabilities: list[str]) -> Socket:
    """Opens a session and begins a stream; returns the client's socket."""
    client = dealer(front)
    hello = Hello(encodings=("msgpack",), capabilities=capabilities)
    client.send_multipart([b"HELLO", encode_body(hello, "json")])
    assert client.recv_multipart()[0] == b"WELCOME"
    client.send_multipart([b"GENERATE", b'{"stream_id": 1, "model": "m", "prompt": [1]}'])
    return client


# --- the process of the receiving clients ---------------------------------------------------------


def _bodies(socket: Socket) -> list[bytes]:
    """Receives a TOKEN message; returns its bodies."""
    _RECV(socket, zmq.NOBLOCK)
    bodies, more = [], True
    while more:
        frame = _RECV(socket, zmq.NOBLOCK, False)
        bodies.append(frame.bytes)
        more = frame.more
    return bodies


def _proxied_body(frames: int, socket: Socket) -> list[bytes]:
    """Receives a message of ``frames`` frames; returns its last frame, which is the body."""
    for _ in range(frames - 1):
        _RECV(socket, zmq.NOBLOCK)
    return [_RECV(socket, zmq.NOBLOCK)]


def _receive(
    front: str, proxied: int, clients: int, each: int, pipe: Connection, decode: Decode
) -> None:
    """Receives bodies on ``clients`` sockets, on average ``each`` bodies on a socket. Then sends
    the elapsed seconds and the seconds of CPU time on ``pipe``.

    ``proxied`` is the number of frames of a message through the proxy. If it is 0, the messages
    come through the broker.
    """
    bodies = partial(_proxied_body, proxied) if proxied else _bodies
    if proxied:
        sockets = [dealer(front) for _ in range(clients)]
        for socket in sockets:
            socket.send(b"HERE")
    else:
        capabilities = pipe.recv()
        sockets = [_join(front, capabilities) for _ in range(clients)]
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    left, first = clients * each, 0.0
    cpu_s = time.process_time()
    while left:
        for socket, _ in poller.poll():
            with contextlib.suppress(zmq.Again):
                while True:
                    for body in bodies(socket):
                        first = first or time.perf_counter()
                        left -= 1
                        if decode is not None:
                            decode(body)
    pipe.send((time.perf_counter() - first, time.process_time() - cpu_s))


def _start_receiver(*args: Any) -> tuple[Any, Connection]:
    ours, theirs = mp.Pipe()
    process = mp.Process(target=_receive, args=(*args[:4], theirs, args[4]), daemon=True)
    process.start()
    return process, ours


def frames_through_broker(folder: Path, count: int, capabilities: list[str]) -> Rate:
    """The rate of messages from a worker to a client through the broker."""
    with broker(folder) as (front, back, cpu_s):
        worker = _register(back)
        process, pipe = _start_receiver(front, 0, 1, count, None)
        pipe.send(capabilities)
        [session] = _sessions(worker, 1)
        [message] = pack([b"TOKEN", encode_token_header([session]), BODY])
        began = cpu_s()
        for _ in range(count):
            _SEND(worker, message)
        seconds, _ = pipe.recv()
        used = cpu_s() - began
        process.join()
        worker.close()
    return Rate(count / seconds, 1e6 * used / count)


def frames_through_proxy(folder: Path, count: int, packed: bool) -> Rate:
    """The rate of messages from a worker to a client through ``zmq.proxy``. Each message begins
    with the client's routing id, by which the proxy's ROUTER finds the client. With ``packed``, the
    rest of the message is packed into one frame, like a worker's message to the broker."""
    frames = [b"TOKEN", encode_token_header([1]), BODY]
    frames = pack(frames) if packed else frames
    with proxy(folder) as (front, back, cpu_s):
        worker = dealer(back)
        process, pipe = _start_receiver(front, len(frames), 1, count, None)
        began = cpu_s()
        peer = worker.recv_multipart()[0]
        for _ in range(count):
            _SEND(worker, peer, _MORE)
            for frame in frames[:-1]:
                _SEND(worker, frame, _MORE)
            _SEND(worker, frames[-1])
        seconds, _ = pipe.recv()
        used = cpu_s() - began
        process.join()
        worker.close()
    return Rate(count / seconds, 1e6 * used / count)


def token_rate(
    folder: Path, steps: int, columns: bool, decoded: bool = True, **settings: str
) -> Rate:
    """The rate of tokens through the broker. Each message has a step of 64 tokens for 8 clients.
    With ``decoded``, the clients decode the tokens, and the result's CPU time is that of the broker
    and the clients. Otherwise it is only that of the broker."""
    each = STEP_TOKENS // CLIENTS
    entries = [
        Token(
            token=1000 + i,
            stream_id=i,
            logprob=-1.25,
            finish_reason=None,
            top_logprobs={1000 + i: -1.25},
            pos=20,
        )
        for i in range(each)
    ]
    body = encode_body(pack_columns(entries) if columns else entries, "msgpack")
    capabilities = ["columns", "bodies"] if columns else []
    with broker(folder, **settings) as (front, back, cpu_s):
        worker = _register(back)
        decode: Decode = None
        if decoded:
            decode = _Columns() if columns else _entries
        process, pipe = _start_receiver(front, 0, CLIENTS, steps, decode)
        pipe.send(capabilities)
        head = encode_token_header(_sessions(worker, CLIENTS))
        [message] = pack([b"TOKEN", head, *[body] * CLIENTS])
        began = cpu_s()
        for _ in range(steps):
            _SEND(worker, message)
        seconds, clients_s = pipe.recv()
        used = cpu_s() - began + (clients_s if decoded else 0.0)
        process.join()
        worker.close()
    tokens = steps * STEP_TOKENS
    return Rate(tokens / seconds, 1e6 * used / tokens)


def _entries(body: bytes) -> None:
    decode_as(list[Token], body, "msgpack")


class _Columns:
    """Decodes columns as our clients do: the stream ids are decoded only when they change."""

    def __init__(self) -> None:
        self._last = TokenColumns()
        self._rows = unpack_columns(self._last)

    def __call__(self, body: bytes) -> None:
        columns: TokenColumns = decode_as(TokenColumns, body, "msgpack")
        same = columns.streams == self._last.streams and columns.seqs == self._last.seqs
        self._rows = unpack_columns(columns, self._rows if same else None)
        self._last = columns


# --- latency --------------------------------------------------------------------------------------


def _receive_rounds(addresses: dict[str, str], count: int, pipe: Connection) -> None:
    """Receives ``count`` messages in each round. A name of a path on ``pipe`` starts a round on
    this path. None ends the process.

    At the end of a round, sends a list on ``pipe``: the microseconds from the sending to the
    arrival of each message.
    """
    sockets = {way: dealer(address) for way, address in addresses.items() if way != "broker"}
    for socket in sockets.values():
        socket.send(b"HERE")
    sockets["broker"] = _join(addresses["broker"], CAPABILITIES)
    for way in iter(pipe.recv, None):
        socket = sockets[way]
        taken: list[float] = []
        while len(taken) < count:
            frames = socket.recv_multipart()
            arrived = time.perf_counter_ns()
            bodies = frames[1:] if way == "broker" else frames[-1:]
            taken += [(arrived - int(body[:20])) / 1000 for body in bodies]
        pipe.send(taken)


def _paced(count: int, send: Callable[[bytes], object]) -> None:
    """Sends ``count`` bodies of 200 bytes, ``RATE`` per second. A body contains its send time."""
    begin = time.perf_counter()
    for i in range(count):
        pause = begin + i / RATE - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        send(b"%-200d" % time.perf_counter_ns())


def _sender(socket: Socket, *head: bytes) -> Callable[[bytes], object]:
    """Returns a function that sends a body after the frames ``head``."""
    return lambda body: socket.send_multipart([*head, body], copy=True)


def hop_rounds(folder: Path, rounds: int, count: int) -> dict[str, list[list[float]]]:
    """For each path, a list of rounds. A round is a list of latencies: the microseconds that each
    message takes from one process to another.

    The paths are the broker, ``zmq.proxy`` and a direct connection. The paths are measured in turn,
    so that other load on the machine affects all three.
    """
    ours, theirs = mp.Pipe()
    router: Socket = zmq.Context.instance().socket(zmq.ROUTER)
    router.set_hwm(0)
    direct = f"ipc://{folder}/direct.sock"
    router.bind(direct)
    found: dict[str, list[list[float]]] = {"broker": [], "proxy": [], "direct": []}
    with broker(folder) as (front, back, _), proxy(folder) as (proxy_front, proxy_back, _):
        worker, through_proxy = _register(back), dealer(proxy_back)
        addresses = {"broker": front, "proxy": proxy_front, "direct": direct}
        process = mp.Process(target=_receive_rounds, args=(addresses, count, theirs), daemon=True)
        process.start()
        head = encode_token_header(_sessions(worker, 1))
        senders = {
            "broker": lambda body: _SEND(worker, pack([b"TOKEN", head, body])[0]),
            "proxy": _sender(through_proxy, through_proxy.recv_multipart()[0], b"TOKEN", head),
            "direct": _sender(router, router.recv_multipart()[0], b"TOKEN", head),
        }
        for _ in range(rounds):
            for way, send in senders.items():
                ours.send(way)
                _paced(count, send)
                found[way].append(ours.recv())
        ours.send(None)
        process.join()
        for socket in (worker, through_proxy, router):
            socket.close(0)
    return found


def _percentile(values: list[float], part: float) -> float:
    return statistics.quantiles(values, n=1000)[round(part * 1000) - 1]


def hop_figures(found: dict[str, list[list[float]]]) -> dict[str, float]:
    """Returns four figures for the median latency, and the same four for the 99th percentile. They
    are the broker's latency divided by the proxy's, the microseconds by which the broker's latency
    exceeds that of a direct connection, the broker's latency and the proxy's latency. Each figure
    is computed from medians over the rounds."""
    figures: dict[str, float] = {}
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        by_way = {way: [_percentile(r, part) for r in rounds] for way, rounds in found.items()}
        ours, proxied, direct = by_way["broker"], by_way["proxy"], by_way["direct"]
        pairs = list(zip(ours, proxied, strict=True))
        figures[f"hop_{name}_vs_proxy"] = statistics.median(a / b for a, b in pairs)
        figures[f"hop_us_{name}"] = statistics.median(ours) - statistics.median(direct)
        figures[f"hop_us_{name}_total"] = statistics.median(ours)
        figures[f"proxy_us_{name}_total"] = statistics.median(proxied)
    return figures


NOTES = {
    "frames_vs_zmq_proxy": "messages/s through the broker, divided by messages/s through "
    "zmq.proxy; at least 0.33",
    "packed_vs_zmq_proxy": "messages/s through the broker, divided by messages/s through "
    "zmq.proxy if the proxy's messages have only two frames",
    "unjoined_vs_zmq_proxy": "frames_vs_zmq_proxy for a client without the capability 'bodies'",
    "broker_frames_per_s": "messages/s of 200 bytes from one worker through the broker to one "
    "client",
    "proxy_frames_per_s": "messages/s through zmq.proxy; each message has four frames",
    "proxy_packed_per_s": "messages/s through zmq.proxy; each message has two frames",
    "broker_cpu_us": "microseconds of the broker's CPU time for a message",
    "unjoined_cpu_us": "broker_cpu_us for a client without the capability 'bodies'",
    "proxy_cpu_us": "microseconds of the proxy's CPU time for a message of four frames",
    "tokens_per_s": "tokens/s through the broker, in columns; each message has 64 tokens for 8 "
    "clients, which decode them",
    "tokens_vs_entries": "tokens/s in columns, divided by tokens/s in entries; at least 2",
    "entries_vs_tokens_cpu": "CPU time of broker and clients for a token in entries, divided by "
    "that for a token in columns",
    "hop_p50_vs_proxy": "median latency through the broker, divided by that through zmq.proxy, "
    f"at {RATE:,} messages/s; at most 2",
    "hop_p99_vs_proxy": "99th percentile of latency through the broker, divided by that through "
    "zmq.proxy; at most 3",
    "hop_us_p50": "microseconds by which the broker's median latency exceeds that of a direct "
    "connection; at most 150",
    "hop_us_p99": "microseconds by which the broker's 99th percentile of latency exceeds that of "
    "a direct connection; at most 1,000",
}


def rates(folder: Path, count: int) -> dict[str, float]:
    """Measures the rates of messages. Each round measures all paths, and each figure is the median
    over the rounds."""
    ways: dict[str, Callable[[], Rate]] = {
        "broker": lambda: frames_through_broker(folder, count, CAPABILITIES),
        "unjoined": lambda: frames_through_broker(folder, count, []),
        "proxy": lambda: frames_through_proxy(folder, count, packed=False),
        "packed": lambda: frames_through_proxy(folder, count, packed=True),
    }
    rounds = [{name: way() for name, way in ways.items()} for _ in range(RUNS)]

    def ratio(ours: str, proxied: str) -> float:
        return statistics.median(r[ours].per_s / r[proxied].per_s for r in rounds)

    def rate(way: str) -> float:
        return statistics.median(r[way].per_s for r in rounds)

    def cpu(way: str) -> float:
        return statistics.median(r[way].cpu_us for r in rounds)

    return {
        "frames_vs_zmq_proxy": ratio("broker", "proxy"),
        "packed_vs_zmq_proxy": ratio("broker", "packed"),
        "unjoined_vs_zmq_proxy": ratio("unjoined", "proxy"),
        "broker_frames_per_s": rate("broker"),
        "proxy_frames_per_s": rate("proxy"),
        "proxy_packed_per_s": rate("packed"),
        "broker_cpu_us": cpu("broker"),
        "unjoined_cpu_us": cpu("unjoined"),
        "proxy_cpu_us": cpu("proxy"),
    }


def token_rates(folder: Path, steps: int) -> dict[str, float]:
    """Measures the rates of tokens. Each round measures columns and entries, and each figure is the
    median over the rounds."""
    rounds = [
        (token_rate(folder, steps, columns=True), token_rate(folder, steps, columns=False))
        for _ in range(RUNS)
    ]
    ratios = [
        (columns.per_s / entries.per_s, entries.cpu_us / columns.cpu_us)
        for columns, entries in rounds
    ]
    return {
        "tokens_per_s": statistics.median(columns.per_s for columns, _ in rounds),
        "tokens_vs_entries": statistics.median(rate for rate, _ in ratios),
        "entries_vs_tokens_cpu": statistics.median(cpu for _, cpu in ratios),
    }


def main() -> None:
    """Runs all measurements and reports the figures."""
    args = arguments(__doc__)
    count = 30_000 if args.quick else 200_000
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        results = rates(folder, count) | token_rates(folder, count // 10)
        results |= hop_figures(hop_rounds(folder, HOP_ROUNDS, count // 20))
    report(results, NOTES, args.json)


if __name__ == "__main__":
    main()
