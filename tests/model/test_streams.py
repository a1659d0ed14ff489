"""A model check of the life of a stream. Whatever process dies, each accepted stream ends exactly
once, and its client receives each token once and in order."""

from __future__ import annotations

import logging

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tokenbus.protocol.errors import Code

from ..counts import examples
from .clients import Client, Reader
from .workers import Worker
from .world import World

STEPS = 40
SETTINGS = {"session_grace_s": 30.0, "move_wait_s": 1e6, "recover_s": 8.0}
LOST = st.integers(0, 3)
"""Number of the last messages of a connection that are lost when the connection ends."""
INDEX = st.integers(0, 7)


class Streams(RuleBasedStateMachine):
    """Clients begin and cancel streams, messages arrive in a random order, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.ERROR)
        self.world = World(1, **SETTINGS)
        self.world.start_gpu()
        self.world.start_client()
        self.world.tick()
        self.seed = 0
        self.deaths = 0

    # --- what clients do ------------------------------------------------------------------------

    @rule(which=INDEX, n=st.integers(1, 3), length=st.integers(1, 9))
    def submit(self, which: int, n: int, length: int) -> None:
        self.seed += 1
        self._client(which).submit(n, length, "", self.seed)

    @rule(which=INDEX)
    def cancel(self, which: int) -> None:
        open_ones = [
            (client, reader)
            for client in self.world.clients
            for reader in client.readers
            if not reader.over and not reader.cancelled
        ]
        if open_ones:
            client, reader = open_ones[which % len(open_ones)]
            client.cancel(reader)

    @precondition(lambda self: len(self.world.clients) < 3)
    @rule()
    def another_client(self) -> None:
        self.world.start_client()

    @precondition(lambda self: len(self.world.workers) < 3)
    @rule()
    def another_worker(self) -> None:
        self.world.start_gpu()

    def _client(self, which: int) -> Client:
        return self.world.clients[which % len(self.world.clients)]

    def _worker(self, which: int) -> Worker:
        return self.world.workers[which % len(self.world.workers)]

    # --- the order of things --------------------------------------------------------------------

    @rule(which=st.integers(0, 15), count=st.integers(1, 3))
    def some_arrive_at_the_broker(self, which: int, count: int) -> None:
        pipes = self.world.network.pipes
        self.world.network.arrive(pipes[which % len(pipes)], count)

    @rule(which=INDEX, count=st.integers(1, 3))
    def some_arrive_at_a_client(self, which: int, count: int) -> None:
        self._client(which).receive(count)

    @precondition(lambda self: self.world.running())
    @rule(which=INDEX, count=st.integers(0, 3))
    def bus_thread(self, which: int, count: int) -> None:
        running = self.world.running()
        running[which % len(running)].carrier.turn(count)

    @precondition(lambda self: self.world.running())
    @rule(which=INDEX)
    def step(self, which: int) -> None:
        running = self.world.running()
        running[which % len(running)].step()
        self.world.forget_gone()

    @rule()
    def all_arrive(self) -> None:
        self.world.deliver()

    @rule(ticks=st.sampled_from([1, 2, 8, 30]), workers=st.booleans())
    def time(self, ticks: int, workers: bool) -> None:
        for _ in range(ticks):
            self.world.tick(workers)

    # --- the end --------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.world.end()
            for reader in self.world.readers():
                if not reader.cancelled:
                    self.check(reader)
        finally:
            self.world.close()
            logging.disable(logging.NOTSET)

    def check(self, reader: Reader) -> None:
        """Checks that a stream has no error. After three failures of workers, it may be
        quarantined."""
        if reader.error is not None:
            killer = reader.error.code == Code.QUARANTINED and self.deaths >= 3
            assert killer, f"a stream ended with {reader.error}"


class WorkersFail(Streams):
    """Workers die, stop, drain and lose their connections. The broker and the clients' connections
    live, so no client sends a request again after a worker has received it."""

    @precondition(lambda self: self.world.workers)
    @rule(which=INDEX, lost=LOST)
    def kill(self, which: int, lost: int) -> None:
        self.deaths += 1
        self._worker(which).kill(lost)
        self.world.forget_gone()

    @precondition(lambda self: self.world.workers)
    @rule(which=INDEX)
    def stop_or_continue(self, which: int) -> None:
        self.deaths += 1
        worker = self._worker(which)
        worker.stopped = not worker.stopped

    @precondition(lambda self: self.world.workers)
    @rule(which=INDEX)
    def drain(self, which: int) -> None:
        self._worker(which).drain()

    @precondition(lambda self: self.world.workers)
    @rule(which=INDEX, lost=LOST)
    def worker_connection_breaks(self, which: int, lost: int) -> None:
        self.deaths += 1
        self._worker(which).pipe.break_off(lost)

    @precondition(lambda self: self.world.workers)
    @rule(which=INDEX)
    def cut_or_restore(self, which: int) -> None:
        self.deaths += 1
        pipe = self._worker(which).pipe
        pipe.cut = not pipe.cut

    def check(self, reader: Reader) -> None:
        super().check(reader)
        for notice in reader.notices:
            if notice.event == "retrying":
                assert "no gpu worker is running" in notice.message, notice.message


class EverythingFails(WorkersFail):
    """The broker is restarted, and clients lose connections too. Requests may be sent again from
    their beginning, which their readers do not notice."""

    @rule(which=INDEX, lost=LOST)
    def client_reconnects(self, which: int, lost: int) -> None:
        self._client(which).reconnect(lost)

    @rule(which=INDEX, lost=LOST)
    def client_connection_breaks(self, which: int, lost: int) -> None:
        self._client(which).pipe.break_off(lost)

    @rule(which=INDEX)
    def stop_or_continue_a_client(self, which: int) -> None:
        client = self._client(which)
        client.stopped = not client.stopped

    @rule(which=INDEX)
    def cut_or_restore_a_client(self, which: int) -> None:
        pipe = self._client(which).pipe
        pipe.cut = not pipe.cut

    @rule(ticks=st.sampled_from([0, 1, 8]))
    def the_broker_dies(self, ticks: int) -> None:
        network = self.world.network
        if network.broker is not None:
            network.kill_broker()
        for _ in range(ticks):
            self.world.tick()
        network.start_broker()

    @rule(ticks=st.sampled_from([2, 24, 60]))
    def the_broker_stands_still(self, ticks: int) -> None:
        network = self.world.network
        network.stopped = network.broker is not None
        for _ in range(ticks):
            self.world.tick()
        network.go_on()

    def check(self, reader: Reader) -> None:
        Streams.check(self, reader)


LIMITS = settings(
    max_examples=examples(50),
    stateful_step_count=STEPS,
    suppress_health_check=list(HealthCheck),
)
TestWorkersFail = WorkersFail.TestCase
TestWorkersFail.settings = LIMITS
TestEverythingFails = EverythingFails.TestCase
TestEverythingFails.settings = LIMITS
