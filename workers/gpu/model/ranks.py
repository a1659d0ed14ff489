"""Tensor parallelism: one worker uses several devices, with a process for each device.

Rank 0 is the worker. It schedules, samples, and communicates with the bus. The other ranks have
their part of the weights and of the KV cache, and run the forwards that rank 0 sends. Transformers
shards the model by its own plan. torch.distributed computes sums over the ranks, and pipes carry
the commands. No named file is made, so a killed worker leaves no file.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ....protocol.decoders import msgpack_decoder
from ....protocol.python_command import python_command
from ..engine.packing import Packed, decode_array, encode_array
from .kv_cache import Layout

log = logging.getLogger(__name__)

COLLECTIVE_S = 120.0
"""Maximum time that a rank waits for the other ranks within a forward, in seconds."""

ORDER_SIZE = struct.Struct("<I")
"""The header of each command in a rank's pipe: the size of the command in bytes."""

_encode = msgspec.msgpack.Encoder(enc_hook=encode_array).encode


class Load(msgspec.Struct, tag=True):
    """The command to load the receiving rank's part of a model."""

    name: str
    options: dict[str, Any]


class Open(msgspec.Struct, tag=True):
    """The command to make the KV cache of a model."""

    name: str
    num_blocks: int
    layout: Layout


class Forward(msgspec.Struct, tag=True):
    """The command to run a forward."""

    name: str
    packed: Packed


class Clear(msgspec.Struct, tag=True):
    """The command to set blocks of the KV cache to zeros."""

    name: str
    blocks: list[int]


class Drop(msgspec.Struct, tag=True):
    """The command to drop a model."""

    name: str


Order = Load | Open | Forward | Clear | Drop
decode_order = msgpack_decoder(Order, dec_hook=decode_array).decode


class Ranks:
    """Starts the other ranks, and sends them the commands of rank 0. ``size``: number of ranks,
    including rank 0.

    One command runs at a time, because collective operations must have the same order on all ranks.
    """

    def __init__(self, size: int, device: str) -> None:
        self._together = threading.Lock()
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        # The ranks connect over a file without a name. A port would not be safe: another process
        # could take a free port before the ranks use it.
        meeting = os.memfd_create("tokenbus-ranks")
        for rank in range(1, size):
            process = subprocess.Popen(
                python_command("tokenbus.workers.gpu.follower"),
                env=os.environ | rendezvous(rank, size, meeting),
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=[meeting],
            )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        os.environ.update(rendezvous(0, size, meeting))
        join(device)
        log.info("all %d ranks have joined", size)

    @contextmanager
    def loading(self, name: str, options: dict[str, Any]) -> Iterator[None]:
        """A context around the loading of a model, in which the other ranks load their parts."""
        with self._together:
            self._send(Load(name, options))
            yield

    def open(self, name: str, num_blocks: int, layout: Layout) -> None:
        """Makes the KV caches of the other ranks."""
        with self._together:
            self._send(Open(name, num_blocks, layout))

    @contextmanager
    def forward(self, name: str, packed: Packed) -> Iterator[None]:
        """A context around a forward, in which the other ranks run their parts."""
        with self._together:
            self._send(Forward(name, packed))
            yield

    def clear(self, name: str, blocks: Sequence[int]) -> None:
        """Clears these blocks on the other ranks."""
        with self._together:
            self._send(Clear(name, list(blocks)))

    def drop(self, name: str) -> None:
        """Drops a model on the other ranks."""
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
            # If the rank has ended, its pipe is broken, and ``_watch`` ends the worker.
            with suppress(BrokenPipeError):
                while rest:
                    rest = rest[process.stdin.write(rest) :]

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            # Without this rank, forwards cannot be completed, so the worker exits and is restarted.
            log.error("rank %d ended with status %d; the worker exits", rank, code)
            os._exit(1)


MEETING_PLACE = "RANKS_MEET_AT"
"""The name of an environment variable. Its value is the path of the file over which
torch.distributed connects the ranks."""


def rendezvous(rank: int, size: int, meeting: int) -> dict[str, str]:
    """The environment variables of a rank. ``meeting``: the descriptor of the file over which the
    ranks connect."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        MEETING_PLACE: f"/proc/self/fd/{meeting}",
    }


def join(device: str) -> None:
    """Joins the process group of torch.distributed that the environment variables describe."""
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
