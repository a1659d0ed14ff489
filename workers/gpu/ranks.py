"""Tensor parallelism: one worker over several devices, a process for each.

Rank 0 is the worker. It schedules, samples, and talks to the bus; the others hold their part of the
weights and of the KV cache, and run the forwards that they are sent. Transformers shards the model
by its own plan; torch.distributed carries the sums between the ranks, ZeroMQ the orders.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import zmq

from .kv_cache import Layout
from .packing import Packed

log = logging.getLogger(__name__)

COLLECTIVE_S = 120.0
"""How long the ranks wait for each other within a forward before they give up, in seconds."""

_encode = msgspec.msgpack.Encoder().encode


class Load(msgspec.Struct, tag=True):
    """Load your part of a model."""

    name: str
    options: dict[str, Any]


class Open(msgspec.Struct, tag=True):
    """Make a KV cache for a model."""

    name: str
    num_pages: int
    layout: Layout
    compiled: bool


class Forward(msgspec.Struct, tag=True):
    """Run a forward."""

    name: str
    packed: Packed


class Clear(msgspec.Struct, tag=True):
    """Set pages to zeros."""

    name: str
    pages: list[int]


class Drop(msgspec.Struct, tag=True):
    """Let a model go."""

    name: str


Order = Load | Open | Forward | Clear | Drop
decode_order = msgspec.msgpack.Decoder(Order).decode


class Ranks:
    """The other ranks, as rank 0 has them; ``size`` counts rank 0 too.

    One order at a time: what the ranks do together must come in the same order everywhere.
    """

    def __init__(self, size: int, device: str) -> None:
        self._together = threading.Lock()
        self._closing = False
        self._folder = Path(tempfile.mkdtemp(prefix="tokenbus-ranks-"))
        self._orders: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            address = f"ipc://{self._folder}/{rank}.sock"
            orders: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            orders.setsockopt(zmq.LINGER, 0)
            orders.bind(address)
            environment = os.environ | rendezvous(rank, size, self._folder)
            command = [sys.executable, "-m", "tokenbus.workers.gpu.follower", address]
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
            self._orders.append(orders)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        os.environ.update(rendezvous(0, size, self._folder))
        join(device)
        log.info("%d ranks are together", size)

    @contextmanager
    def loading(self, name: str, options: dict[str, Any]) -> Iterator[None]:
        """Around the loading of a model: the others load theirs."""
        with self._together:
            self._send(Load(name, options))
            yield

    def open(self, name: str, num_pages: int, layout: Layout, compiled: bool) -> None:
        """The others make their KV caches."""
        with self._together:
            self._send(Open(name, num_pages, layout, compiled))

    @contextmanager
    def forward(self, name: str, packed: Packed) -> Iterator[None]:
        """Around a forward: the others run theirs."""
        with self._together:
            self._send(Forward(name, packed))
            yield

    def clear(self, name: str, pages: Sequence[int]) -> None:
        """The others clear these pages."""
        with self._together:
            self._send(Clear(name, list(pages)))

    def drop(self, name: str) -> None:
        """The others let a model go."""
        with self._together:
            self._send(Drop(name))

    def close(self) -> None:
        """Ends the other ranks."""
        self._closing = True
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        for orders in self._orders:
            orders.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, order: Order) -> None:
        encoded = _encode(order)
        for orders in self._orders:
            orders.send(encoded)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            # Without it no forward can end: the worker goes down, and is started again.
            log.error("rank %d ended with %d, and the worker with it", rank, code)
            os._exit(1)


MEETING_PLACE = "RANKS_MEET_AT"
"""In a rank's environment: the file over which torch.distributed brings the ranks together. Not a
port: whichever was found free could be taken by the time that it is needed."""


def rendezvous(rank: int, size: int, folder: Path) -> dict[str, str]:
    """The environment in which a rank finds the others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        MEETING_PLACE: str(folder / "meeting"),
    }


def join(device: str) -> None:
    """Joins the ranks that the environment names."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{os.environ[MEETING_PLACE]}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
