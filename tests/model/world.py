"""A simulated system: a real broker, and real sessions and leases, with simulated time."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tokenbus.broker.core import Broker
from tokenbus.broker.outgoing import Side
from tokenbus.broker.settings import BrokerSettings
from tokenbus.transport.dealer import Peer
from tokenbus.workers import bus, link

from ..broker.invariants import check_empty
from .clients import Client, Reader
from .network import Network
from .workers import Carrier, GpuWorker, Worker

TICK_S = 0.25
MAX_TICKS = 4000
"""Maximum number of ticks until all streams have ended, after the last failure."""


class World:
    """The processes of a system, and the events that can happen to them."""

    def __init__(self, brokers: int = 1, **settings: Any) -> None:
        """``brokers``: the number of brokers. Workers register with all of them. A client is
        connected to one broker, and connects to the next one when it opens another connection."""
        self.networks = [Network(BrokerSettings(**settings), n) for n in range(brokers)]
        self.network = network = self.networks[0]
        """The network of the only broker, or of the first broker."""
        self._patches = ExitStack()
        clock = SimpleNamespace(monotonic=lambda: network.now)
        self._patches.enter_context(patch.object(bus, "time", clock))
        self._patches.enter_context(patch.object(link, "time", clock))
        self._patches.enter_context(patch.object(link, "carrier", self._carrier))
        self.workers: list[Worker] = []
        self.clients: list[Client] = []
        self._names = itertools.count(1)

    def close(self) -> None:
        """Undoes the patches of the clocks and of the carrier."""
        self._patches.close()

    def _carrier(self, at: str, peer: Peer, *_: object, **__: object) -> Carrier:
        return Carrier(self.networks[int(at.removeprefix("sim://"))], peer)

    def start_gpu(self) -> GpuWorker:
        """Starts a GPU worker."""
        worker = GpuWorker(self.networks, f"gpu-{next(self._names)}")
        self.workers.append(worker)
        return worker

    def start_client(self) -> Client:
        """Starts a client."""
        client = Client(self.networks)
        self.clients.append(client)
        return client

    def tick(self, workers: bool = True) -> None:
        """Lets ``TICK_S`` pass, and then delivers messages (``deliver``)."""
        for network in self.networks:
            network.tick(TICK_S)
        for client in self.clients:
            if not client.stopped and not client.gone:
                client.on_time()
        for worker in self.running():
            for carrier in worker.carriers:
                carrier.turn(0)
        self.deliver(workers)

    def deliver(self, workers: bool = True) -> None:
        """Delivers all messages, except those on cut links and those of stopped processes. Lets
        each worker take a few steps. Without ``workers``, no messages from or to workers arrive,
        and workers do not compute."""
        for _ in range(3):
            for network in self.networks:
                for pipe in list(network.pipes):
                    if not pipe.cut and (workers or pipe.side is Side.FRONT):
                        network.arrive(pipe, 1000)
            for client in self.clients:
                if not client.stopped and not client.pipe.cut:
                    client.receive(1000)
            for worker in self.running() if workers else ():
                for carrier in worker.carriers:
                    if carrier.pipe is not None and not carrier.pipe.cut:
                        carrier.turn(1000)
                worker.step()
        self.forget_gone()

    def running(self) -> list[Worker]:
        """The workers that are neither stopped nor gone."""
        return [w for w in self.workers if not w.stopped and not w.gone]

    def forget_gone(self) -> None:
        """Drops workers that have left."""
        self.workers = [w for w in self.workers if not w.gone]

    def readers(self) -> list[Reader]:
        """The streams of all clients."""
        return [reader for client in self.clients for reader in client.readers]

    def end(self) -> None:
        """Ends all failures, and checks that every stream then ends and that no table still has a
        stream."""
        for network in self.networks:
            if network.broker is None:
                network.start_broker()
        for worker in self.workers:
            worker.stopped = False
            for pipe in worker.pipes:
                pipe.cut = False
        for client in self.clients:
            client.stopped = client.pipe.cut = False
        if not any(isinstance(w, GpuWorker) and not w.draining for w in self.workers):
            self.start_gpu()
        for _ in range(MAX_TICKS):
            self.tick()
            if self._over() and all(n.now > n.recovered_at + 1 for n in self.networks):
                break
        for reader in self.readers():
            assert reader.over or reader.cancelled, "a stream has not ended"
        for broker in self._brokers():
            check_empty(broker)
        for worker in self.workers:
            assert worker.idle, f"{worker.name} has streams that nobody waits for"

    def _over(self) -> bool:
        brokers = self._brokers()
        ended = all(reader.over or reader.cancelled for reader in self.readers())
        idle = all(worker.idle for worker in self.workers)
        kept = any(s.log.ends for broker in brokers for s in broker.state.sessions)
        return ended and idle and not any(b.state.requests for b in brokers) and not kept

    def _brokers(self) -> list[Broker]:
        found = [network.broker for network in self.networks]
        return [broker for broker in found if broker is not None]
