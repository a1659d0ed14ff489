"""Workers on the nodes of a Ray cluster on this machine. A node dies under load, and the number of
workers follows the load.

``make ray`` runs these tests. ``make test`` does not, because Ray gives the processes of a node
only 30 s to start.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenbus.clients.cluster.connection import system_name
from tokenbus.clients.cluster.owner import Report
from tokenbus.clients.system.processes import alive
from tokenbus.protocol.settings import Settings

from ..processes import Bus, Process, until

pytestmark = pytest.mark.process

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
PATIENCE_S = 300.0
STORE_BYTES = 80 * 2**20
"""Bytes of each node's object store, which is not used. Ray does not allow fewer."""
STREAMS = 6
OPTIONS: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "ignore_eos": True}
STEERED: dict[str, Any] = {
    "controller": "regex",
    "controller_arg": "[a-z ]{200}",
    "max_tokens": 300,
    "temperature": 1.0,
}


class RayCluster:
    """A cluster with a head node without CPUs, and nodes with one CPU each, so that a node has room
    for one worker."""

    def __init__(self, nodes: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray: Any = ray
        self.folder = tempfile.mkdtemp(prefix="tr-")
        # Ray writes the address of its last cluster into this folder too.
        os.environ["RAY_TMPDIR"] = self.folder
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self.address = str(self._cluster.address)
        self._nodes = [self.add_node() for _ in range(nodes)]
        ray.init(address=self.address, namespace="tokenbus", log_to_driver=False)

    def add_node(self) -> Any:
        """Adds a node."""
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    def kill_node(self, node_id: str) -> None:
        """Kills a node with all processes on it."""
        [node] = [node for node in self._nodes if node.node_id == node_id]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def owners(self, system: str) -> dict[str, Any]:
        """The actors of a system, by their names without the system's name."""
        from ray.util import list_named_actors

        return {
            name.removeprefix(f"{system}/"): self._ray.get_actor(name)
            for name in list_named_actors()
            if name.startswith(f"{system}/")
        }

    def report(self, actor: Any) -> Report | None:
        """The report of an actor; None if the actor cannot be reached."""
        try:
            return Report(*self._ray.get(actor.report.remote(), timeout=5.0))
        except (self._ray.exceptions.RayError, TimeoutError):
            return None

    def retire(self, actor: Any) -> None:
        """Drains an actor's worker, as an earlier keeper process may have done."""
        self._ray.get(actor.retire.remote())

    def close(self) -> None:
        """Ends the cluster."""
        self._ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(processes: None) -> Iterator[RayCluster]:
    cluster = RayCluster(nodes=3)
    yield cluster
    cluster.close()


class Placed:
    """A system whose broker and state worker run here, and whose other workers run in the
    cluster."""

    def __init__(self, cluster: RayCluster, **settings: Any) -> None:
        self.cluster = cluster
        own: dict[str, Any] = {
            "heartbeat_s": 0.2,
            "expiry_s": 20,
            # Ray takes up to a minute to notice that a node is dead.
            "move_wait_s": 600,
            "ray": cluster.address,
            "device": "cpu",
            "threads": 1,
            "gpu_workers": 1,
            "controller_workers": 1,
        }
        self.bus = Bus(sys.executable, **own, **settings)
        self.system = system_name(Settings(run_dir=str(self.bus.folder)))
        self.bus.start_other("state")
        self.keeper = self.start_keeper()

    def start_keeper(self) -> Process:
        """Starts the process that keeps workers in the cluster."""
        log = self.bus.folder / f"cluster-{len(self.bus.others)}.log"
        self.keeper = Process("tokenbus.clients.cluster", log, self.bus.environment)
        self.bus.others.append(self.keeper)
        return self.keeper

    def wait_for(self, gpu: int, controller: int) -> None:
        """Waits until this many workers of each kind are ready."""

        until(
            lambda: (self.ready("gpu"), self.ready("controller")) == (gpu, controller),
            PATIENCE_S,
            f"{gpu} GPU workers and {controller} controller workers",
        )

    def ready(self, role: str) -> int:
        """The number of ready workers of a role."""
        assert self.keeper.alive, self.keeper.log
        with self.bus.client() as client:
            workers = client.status().workers
        there = [w for w in workers if w.role == role and w.state == "ready"]
        return sum(role != "gpu" or bool(worker.models) for worker in there)

    def owner(self, kind: str) -> Any:
        """The actor of the only worker of a kind."""
        [actor] = [a for n, a in self.cluster.owners(self.system).items() if f"/{kind}-" in n]
        return actor

    def stop(self) -> None:
        """Ends the system, the workers in the cluster first."""
        if self.keeper.alive:
            self.keeper.send(signal.SIGINT)
            assert self.keeper.wait() == 0
            until(lambda: self.cluster.owners(self.system) == {}, PATIENCE_S, "no actor is left")
        self.bus.__exit__()


def options(number: int) -> dict[str, Any]:
    """The options of a stream. Every second stream has a controller."""
    return {**(STEERED if number % 2 else OPTIONS), "seed": number, "model": "embedded"}


class Load:
    """Streams that run at the same time; a thread reads each of them."""

    def __init__(self, bus: Bus, count: int = STREAMS) -> None:
        self.tokens: dict[int, list[int]] = {number: [] for number in range(count)}
        self.faults: list[str] = []
        self.begun = threading.Semaphore(0)
        """Counts the streams that have begun or failed."""
        self._bus = bus
        self._threads = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        try:
            with self._bus.client() as client:
                stream = client.generate("def add(a, b):", **options(number))
                for place, token in enumerate(stream):
                    self.tokens[number].append(-1 if token.token is None else token.token)
                    if place == 5:
                        self.begun.release()
        except Exception as error:
            self.faults.append(f"stream {number}: {error!r}")
            self.begun.release()

    def wait_until_begun(self) -> None:
        """Waits until each stream has begun."""
        for _ in self.tokens:
            assert self.begun.acquire(timeout=PATIENCE_S)

    def end(self) -> dict[int, list[int]]:
        """Waits for the ends of all streams; returns their tokens."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.faults == []
        return self.tokens


def test_a_node_that_dies_moves_its_worker_and_its_streams(cluster: RayCluster) -> None:
    placed = Placed(cluster)
    try:
        placed.wait_for(gpu=1, controller=1)
        expected = Load(placed.bus).end()
        gpu = placed.owner("gpu")
        before = cluster.report(gpu)
        assert before is not None

        load = Load(placed.bus)
        load.wait_until_begun()
        cluster.kill_node(before.node)
        assert load.end() == expected
        after: list[Report] = []

        def elsewhere() -> bool:
            report = cluster.report(gpu)
            after[:] = [report] if report is not None else []
            return bool(after)

        until(elsewhere, PATIENCE_S, "the worker's actor is on another node")
        assert after[0].node != before.node
        assert after[0].pid != before.pid
        until(lambda: not alive(before.pid), PATIENCE_S, "the worker ends with its node")

        # The next keeper of the same run finds the workers of this run. A keeper of another run
        # would end them.
        placed.keeper.kill()
        assert alive(after[0].pid)
        placed.start_keeper()
        until(lambda: "is process" in placed.keeper.log, PATIENCE_S, "the workers were found")
        again = cluster.report(placed.owner("gpu"))
        assert again is not None
        assert (again.pid, again.starts) == (after[0].pid, 1)

        # If a worker is already draining when the keeper finds it, the keeper starts another
        # worker.
        cluster.retire(placed.owner("gpu"))
        until(lambda: "gpu-0 has left" in placed.keeper.log, PATIENCE_S, "the worker has left")
        placed.wait_for(gpu=1, controller=1)
    finally:
        placed.stop()
    assert not alive(after[0].pid)


def test_workers_come_and_go_with_the_load_and_no_token_is_lost(cluster: RayCluster) -> None:
    cluster.add_node()  # Two GPU workers and a controller worker fill three nodes.
    # Six streams at once need more than one worker, because a worker has room for four. One stream
    # needs one worker.
    room = {"capacity": 4, "max_running": 4, "scale_up_s": 0.5, "scale_down_s": 20}
    placed = Placed(cluster, max_gpu_workers=2, **room)
    try:
        placed.wait_for(gpu=1, controller=1)
        expected = Load(placed.bus).end()
        while placed.ready("gpu") < 2:
            assert Load(placed.bus).end() == expected
        while placed.ready("gpu") > 1:
            assert Load(placed.bus, 1).end() == {0: expected[0]}
        until(lambda: "has left" in placed.keeper.log, PATIENCE_S, "the worker's actor is removed")
    finally:
        placed.stop()
