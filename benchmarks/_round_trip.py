"""Measures a round trip over ZeroMQ: from one process to another and back, through a third process
with two ROUTERs.

A message between two workers goes through the broker. So a message and its answer take at least
this time. Benchmarks compare measured times with this minimum.

``python benchmarks/_round_trip.py relay FRONT BACK`` forwards messages between two ROUTERs.
``python benchmarks/_round_trip.py echo BACK`` returns each message.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import zmq

BODY = bytes(64)
"""The body of each message. It is about as large as the body of an operation on a variable."""


def round_trip_us(folder: Path, times: int = 2_000) -> float:
    """The median time of ``times`` round trips, in microseconds."""
    front, back = f"ipc://{folder}/relay-front", f"ipc://{folder}/relay-back"
    commands = (["relay", front, back], ["echo", back])
    processes = [subprocess.Popen([sys.executable, __file__, *command]) for command in commands]
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(front)
    socket.setsockopt(zmq.RCVTIMEO, 200)
    try:
        deadline = time.monotonic() + 60
        while True:
            # The relay drops messages until the echo process has announced itself.
            socket.send_multipart([b"ECHO", BODY])
            try:
                socket.recv_multipart()
                break
            except zmq.Again:
                if time.monotonic() > deadline:
                    raise
        while socket.poll(200):
            socket.recv_multipart()
        durations = []
        for _ in range(times):
            began = time.perf_counter()
            socket.send_multipart([b"ECHO", BODY])
            socket.recv_multipart()
            durations.append(time.perf_counter() - began)
    finally:
        socket.close(0)
        for process in processes:
            process.kill()
            process.wait()
    return statistics.median(durations) * 1e6


def _relay(front: str, back: str) -> None:
    """Forwards messages from the front socket to an echo process, and the answers to the front
    socket. If several echo processes have announced themselves, the last one receives the
    messages."""
    context = zmq.Context()
    clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    clients.bind(front)
    workers.bind(back)
    poller = zmq.Poller()
    poller.register(clients, zmq.POLLIN)
    poller.register(workers, zmq.POLLIN)
    echo = b""
    while True:
        ready = dict(poller.poll())
        if workers in ready:
            frames = workers.recv_multipart()
            if frames[1] == b"HERE":
                echo = frames[0]
            else:
                clients.send_multipart(frames[1:])
        if clients in ready:
            frames = clients.recv_multipart()
            if echo:
                workers.send_multipart([echo, *frames])


def _echo(back: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(back)
    socket.send_multipart([b"HERE", b""])
    while True:
        socket.send_multipart(socket.recv_multipart())


if __name__ == "__main__":
    if sys.argv[1] == "relay":
        _relay(*sys.argv[2:])
    else:
        _echo(*sys.argv[2:])
