"""``python -m tokenbus.workers.gpu.follower``: computes a part of a model that is spread over
several devices.

On each device, one process computes, which is called a *rank*. The worker is rank 0. It starts a
follower for each other rank, and writes commands to the follower's standard input.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading

from ...protocol import logs
from ...protocol.settings import load
from .model.loader import LoadedModel, ModelLoadError, load_model
from .model.ranks import ORDER_SIZE, Clear, Drop, Forward, Load, Open, decode_order, join
from .model.runner import Runner

log = logging.getLogger(__name__)


class Follower:
    """Runs the commands of rank 0 in order."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedModel] = {}
        self._runners: dict[str, Runner] = {}

    def on_order(self, encoded: bytes) -> None:
        """Runs one command of rank 0."""
        match decode_order(encoded):
            case Load(name, options):
                try:
                    self._loaded[name] = load_model(name, **options)
                except ModelLoadError as error:
                    log.error("%s", error)  # Rank 0 raises the same error, and reports it.
            case Open(name, num_blocks, layout):
                loaded = self._loaded.pop(name)
                self._runners[name] = Runner(loaded, num_blocks, layout)
            case Forward(name, packed):
                self._runners[name].follow(packed)
            case Clear(name, blocks):
                self._runners[name].clear_blocks(blocks)
            case Drop(name):
                self._runners.pop(name, None)


def _read_orders(orders: queue.SimpleQueue[bytes]) -> None:
    """Reads the commands of rank 0 on a separate thread. When rank 0 ends, its pipe closes, and
    this process exits even during a forward."""
    pipe = sys.stdin.buffer
    while len(head := pipe.read(ORDER_SIZE.size)) == ORDER_SIZE.size:
        [size] = ORDER_SIZE.unpack(head)
        orders.put(pipe.read(size))
    os._exit(0)


def main() -> int:
    """Runs commands until rank 0 ends."""
    settings = load()
    logs.set_up(settings, "gpu-rank")
    orders = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    join(settings.device)
    follower = Follower()
    while True:
        follower.on_order(orders.get())


if __name__ == "__main__":
    sys.exit(main())
