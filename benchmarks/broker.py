"""The broker against ``zmq.proxy``: frames per second, tokens per second, latency of the hop.

The broker runs in its own process, as it is run in service; a worker and its clients are raw
sockets in two other processes, so that what is measured is the broker. Each rate is the best of
three runs, as other work on the machine only ever makes one slower. Latencies are medians over
rounds that alternate between the broker and the proxy.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from _report import arguments, report
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import decode_header, encode_header, encode_token_header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register
from zmq.backend import Socket as BackendSocket

BODY = b"x" * 200
CLIENTS = 8
STEP_TOKENS = 64
RATE = 10_000
RUNS = 3
HOP_ROUNDS = 11

Socket = zmq.Socket[bytes]
_MORE = zmq.SNDMORE
_SEND = BackendSocket.send
_RECV = BackendSocket.recv


def dealer(endpoint: str) -> Socket:
    """A connected socket without limits on what it keeps."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(endpoint)
    return socket


# --- what is measured ---------------------------------------------------------------------------


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[tuple[str, str]]:
    """Tokenbus's broker; its two addresses."""
    front, back = f"ipc://{folder}/front.sock", f"ipc://{folder}/back.sock"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
    settings = {"FRONT": front, "BACK": back, "MAX_PENDING_BYTES": str(2**31), "EXPIRY_S": "600"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenbus.broker"],
        env=environment | {f"TOKENBUS_{k}": v for k, v in settings.items()},
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield front, back
    finally:
        process.terminate()
        process.wait(10)


def _proxy(front: str, back: str) -> None:
    context = zmq.Context()
    a, b = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, where in ((a, front), (b, back)):
        socket.set_hwm(0)
        socket.bind(where)
    zmq.proxy(a, b)


@contextlib.contextmanager
def proxy(folder: Path) -> Iterator[tuple[str, str]]:
    """``zmq.proxy`` between a ROUTER and a DEALER; its two addresses."""
    front, back = f"ipc://{folder}/pf.sock", f"ipc://{folder}/pb.sock"
    process = mp.Process(target=_proxy, args=(front, back), daemon=True)
    process.start()
    try:
        yield front, back
    finally:
        process.kill()
        process.join()


def _register(back: str) -> Socket:
    """A registered worker that serves the model ``m``."""
    worker = dealer(back)
    body = Register(
        name="w", role="gpu", version=1, pid=1, host="h", capacity=10_000, patterns=["m"]
    )
    worker.send_multipart(pack([b"REGISTER", encode_header(), encode_body(body, "msgpack")]))
    assert unpack(worker.recv_multipart())[0] == b"REGISTERED"
    return worker


def _sessions(worker: Socket, count: int) -> list[int]:
    """The sessions of ``count`` clients, from the headers of their requests."""
    found: list[int] = []
    while len(found) < count:
        frames = unpack(worker.recv_multipart())
        if frames[0] == b"GENERATE":
            found.append(decode_header(frames[1]).address)
    return found


def _join(front: str) -> Socket:
    """A client with a live stream."""
    client = dealer(front)
    client.send_multipart([b"HELLO", b'{"encodings": ["msgpack"]}'])
    assert client.recv_multipart()[0] == b"WELCOME"
    client.send_multipart([b"GENERATE", b'{"stream_id": 1, "model": "m", "prompt": [1]}'])
    return client


# --- the other process: clients that receive ------------------------------------------------------


def _receive(
    front: str, through_broker: bool, clients: int, each: int, pipe: Connection, tokens: bool
) -> None:
    """Receives ``each`` messages on every one of ``clients`` sockets; sends the seconds."""
    if through_broker:
        pipe.recv()
        sockets = [_join(front) for _ in range(clients)]
    else:
        sockets = [dealer(front) for _ in range(clients)]
        for socket in sockets:
            socket.send(b"HERE")
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    left, first = clients * each, 0.0
    while left:
        for socket, _ in poller.poll():
            with contextlib.suppress(zmq.Again):
                while True:
                    _RECV(socket, zmq.NOBLOCK)
                    if not through_broker:
                        _RECV(socket, zmq.NOBLOCK)
                    body = _RECV(socket, zmq.NOBLOCK)
                    first = first or time.perf_counter()
                    if tokens:
                        decode_as(list[Token], body, "msgpack")
                    left -= 1
    pipe.send(time.perf_counter() - first)


def _start_receiver(*args: Any) -> tuple[Any, Connection]:
    ours, theirs = mp.Pipe()
    process = mp.Process(target=_receive, args=(*args[:4], theirs, args[4]), daemon=True)
    process.start()
    return process, ours


def frames_through_broker(folder: Path, count: int) -> float:
    """Messages per second from a worker to a client."""
    with broker(folder) as (front, back):
        worker = _register(back)
        process, pipe = _start_receiver(front, True, 1, count, False)
        pipe.send(True)
        [session] = _sessions(worker, 1)
        [message] = pack([b"TOKEN", encode_token_header([session]), BODY])
        for _ in range(count):
            _SEND(worker, message)
        seconds: float = pipe.recv()
        process.join()
        worker.close()
    return count / seconds


def frames_through_proxy(folder: Path, count: int) -> float:
    """The same message through a proxy, which finds the client by its routing id."""
    with proxy(folder) as (front, back):
        worker = dealer(back)
        process, pipe = _start_receiver(front, False, 1, count, False)
        peer = worker.recv_multipart()[0]
        head = encode_token_header([1])
        for _ in range(count):
            _SEND(worker, peer, _MORE)
            _SEND(worker, b"TOKEN", _MORE)
            _SEND(worker, head, _MORE)
            _SEND(worker, BODY)
        seconds: float = pipe.recv()
        process.join()
        worker.close()
    return count / seconds


def tokens_per_s(folder: Path, steps: int) -> float:
    """Tokens per second of steps of 64 tokens, for 8 clients that decode them."""
    each = STEP_TOKENS // CLIENTS
    entries = [
        Token(
            token=1000 + i,
            stream_id=i,
            logprob=-1.25,
            finish_reason=None,
            top_logprobs={1000 + i: -1.25},
            pos=20,
            text=" word",
        )
        for i in range(each)
    ]
    body = encode_body(entries, "msgpack")
    with broker(folder) as (front, back):
        worker = _register(back)
        process, pipe = _start_receiver(front, True, CLIENTS, steps, True)
        pipe.send(True)
        head = encode_token_header(_sessions(worker, CLIENTS))
        [message] = pack([b"TOKEN", head, *[body] * CLIENTS])
        for _ in range(steps):
            _SEND(worker, message)
        seconds: float = pipe.recv()
        process.join()
        worker.close()
    return steps * STEP_TOKENS / seconds


# --- latency --------------------------------------------------------------------------------------


def _receive_rounds(addresses: dict[str, str], count: int, pipe: Connection) -> None:
    """For each round, that is a way's name: receives ``count`` messages that came that way.

    Answers with the microseconds from their sending to their arrival here.
    """
    sockets = {way: dealer(address) for way, address in addresses.items() if way != "broker"}
    for socket in sockets.values():
        socket.send(b"HERE")
    sockets["broker"] = _join(addresses["broker"])
    for way in iter(pipe.recv, None):
        socket = sockets[way]
        taken = []
        for _ in range(count):
            body = socket.recv_multipart()[-1]
            taken.append((time.perf_counter_ns() - int(body[:20])) / 1000)
        pipe.send(taken)


def _paced(count: int, send: Callable[[bytes], object]) -> None:
    """Sends ``count`` bodies of 200 bytes, ``RATE`` a second, each with its time of sending."""
    begin = time.perf_counter()
    for i in range(count):
        pause = begin + i / RATE - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        send(b"%-200d" % time.perf_counter_ns())


def _sender(socket: Socket, *head: bytes) -> Callable[[bytes], object]:
    """Sends a body behind these frames."""
    return lambda body: socket.send_multipart([*head, body], copy=True)


def hop_rounds(folder: Path, rounds: int, count: int) -> dict[str, list[list[float]]]:
    """Microseconds of each message from one process to another, by way and round.

    The ways are the broker, ``zmq.proxy`` and a direct connection. Their rounds alternate, so that
    other work on the machine disturbs all three alike.
    """
    ours, theirs = mp.Pipe()
    router: Socket = zmq.Context.instance().socket(zmq.ROUTER)
    router.set_hwm(0)
    direct = f"ipc://{folder}/direct.sock"
    router.bind(direct)
    found: dict[str, list[list[float]]] = {"broker": [], "proxy": [], "direct": []}
    with broker(folder) as (front, back), proxy(folder) as (proxy_front, proxy_back):
        worker, through_proxy = _register(back), dealer(proxy_back)
        addresses = {"broker": front, "proxy": proxy_front, "direct": direct}
        process = mp.Process(target=_receive_rounds, args=(addresses, count, theirs), daemon=True)
        process.start()
        head = encode_token_header(_sessions(worker, 1))
        senders = {
            "broker": _sender(worker, b"TOKEN", head),
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
    """The medians, over the rounds, of what a hop takes and of its ratio to the proxy's."""
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
    "frames_vs_zmq_proxy": "broker over zmq.proxy; at least 0.2",
    "broker_frames_per_s": "messages of 200 bytes, one worker to one client",
    "proxy_frames_per_s": "the same through zmq.proxy",
    "tokens_per_s": "steps of 64 tokens for 8 clients that decode; at least 250,000",
    "hop_p50_vs_proxy": f"latency of a hop over zmq.proxy's, at {RATE:,} frames/s; at most 2",
    "hop_p99_vs_proxy": "the same at the 99th percentile; at most 3",
    "hop_us_p50": "microseconds that the broker adds to a direct connection; at most 150",
    "hop_us_p99": "99th percentile; at most 1,000",
}


def main() -> None:
    """Runs all of it."""
    args = arguments(__doc__)
    count = 30_000 if args.quick else 200_000
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        rates = [
            (frames_through_broker(folder, count), frames_through_proxy(folder, count))
            for _ in range(RUNS)
        ]
        ours, proxied = map(max, zip(*rates, strict=True))
        results["frames_vs_zmq_proxy"] = ours / proxied
        results["broker_frames_per_s"] = ours
        results["proxy_frames_per_s"] = proxied
        results["tokens_per_s"] = max(tokens_per_s(folder, count // 10) for _ in range(RUNS))
        results |= hop_figures(hop_rounds(folder, HOP_ROUNDS, count // 20))
    report(results, NOTES, args.json)


if __name__ == "__main__":
    main()
