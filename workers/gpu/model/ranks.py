"""Tensor parallelism: one worker over several devices, a process for each.

Rank 0 is the worker. It schedules, samples, and talks to the bus; the others hold their part of the
weights and of the KV cache, and run the forwards that they are sent. Transformers shards the model
by its own plan; torch.distributed carries the sums between the ranks, pipes the orders. No file is
made for it, so that nothing is left of a worker that is killed.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..engine.packing import Packed, decode_array, encode_array
from .kv_cache import Layout

log = logging.getLogger(__name__)

COLLECTIVE_S = 120.0
"""How long the ranks wait for each other within a forward before they give up, in seconds."""

ORDER_SIZE = struct.Struct("<I")
"""Precedes each order in a rank's pipe: how many bytes it has."""

_encode = msgspec.msgpack.Encoder(enc_hook=encode_array).encode


class Load(msgspec.Struct, tag=True):
    """Load your part of a model."""

    name: str
    options: dict[str, Any]


class Open(msgspec.Struct, tag=True):
    """Make a KV cache for a model."""

    name: str
    num_blocks: int
    layout: Layout


class Forward(msgspec.Struct, tag=True):
    """Run a forward."""

    name: str
    packed: Packed


class Clear(msgspec.Struct, tag=True):
    """Set blocks to zeros."""

    name: str
    blocks: list[int]


class Drop(msgspec.Struct, tag=True):
    """Drop a model."""

    name: str


Order = Load | Open | Forward | Clear | Drop
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=decode_array).decode


class Ranks:
    """The other ranks, as rank 0 has them; ``size`` counts rank 0 too.

    One order at a time: what the ranks do together must come in the same order everywhere.
    """

    def __init__(self, size: int, device: str) -> None:
        self._together = threading.Lock()
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        # A file without a name. Not a port: one that is free now may be taken when it is needed.
        meeting = os.memfd_create("tokenbus-ranks")
        for rank in range(1, size):
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenbus.workers.gpu.follower"],
                env=os.environ | rendezvous(rank, size, meeting),
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=[meeting],
            )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        os.environ.update(rendezvous(0, size, meeting))
        join(device)
        log.info("%d ranks are together", size)

    @contextmanager
    def loading(self, name: str, options: dict[str, Any]) -> Iterator[None]:
        """Around the loading of a model: the others load theirs."""
        with self._together:
            self._send(Load(name, options))
            yield

    def open(self, name: str, num_blocks: int, layout: Layout) -> None:
        """The others make their KV caches."""
        with self._together:
            self._send(Open(name, num_blocks, layout))

    @contextmanager
    def forward(self, name: str, packed: Packed) -> Iterator[None]:
        """Around a forward: the others run theirs."""
        with self._together:
            self._send(Forward(name, packed))
            yield

    def clear(self, name: str, blocks: Sequence[int]) -> None:
        """The others clear these blocks."""
        with self._together:
            self._send(Clear(name, list(blocks)))

    def drop(self, name: str) -> None:
        """The others drop a model."""
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

    def _send(self, order: Order) -> None:
        encoded = _encode(order)
        message = memoryview(ORDER_SIZE.pack(len(encoded)) + encoded)
        for process in self._processes:
            assert process.stdin is not None
            rest = message
            # A rank that has ended takes the worker with it; see _watch.
            with suppress(BrokenPipeError):
                while rest:
                    rest = rest[process.stdin.write(rest) :]

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            # Without it no forward can end: the worker goes down, and is started again.
            log.error("rank %d ended with %d, and the worker with it", rank, code)
            os._exit(1)


MEETING_PLACE = "RANKS_MEET_AT"
"""In a rank's environment: the path of the file over which torch.distributed connects the ranks."""


def rendezvous(rank: int, size: int, meeting: int) -> dict[str, str]:
    """The environment in which a rank finds the others, with the descriptor ``meeting``."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        MEETING_PLACE: f"/proc/self/fd/{meeting}",
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
