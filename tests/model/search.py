"""Searches all short sequences of failures in a small system: ``python -m tests.model.search``.

The system has a real broker (two with ``--brokers 2``), two workers, and a client with three
streams (``world.py``). The processes take turns in a fixed order. A turn handles one message or
computes one step. A run is this schedule with up to ``--failures`` failures. The search makes one
run for each choice of the failures, of the turns at which they happen, and of the processes that
they hit. After its failures, a run continues until all streams have ended. A run fails if a stream
has a wrong, missing or repeated token, or ends twice or never. A run also fails if a broker's
tables disagree (``tests/broker/invariants.py``), or if a table still has an ended stream.

Two reductions shorten the search, which remains exhaustive. A failure of a worker or of the client
has the same effect before and after the turns of other processes. So the search tries it only once
between two turns of the failing process. Failures of different processes at the same turn are tried
in one order only.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import multiprocessing as mp
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from .clients import Client
from .network import Network
from .test_streams import SETTINGS
from .workers import Worker
from .world import World

LENGTHS = (1, 2, 3)
"""Number of tokens of each sequence of a stream, for each stream."""
TICK_TURNS = 12
"""Number of turns between two ticks of the clock."""
LONG_S = 6.0
"""Duration of a pause or a cut in seconds, which is longer than a lease."""


@dataclass(frozen=True, order=True)
class Failure:
    """A failure of a process at a turn."""

    turn: int
    process: str
    """``client``, ``0`` or ``1`` (a worker), ``broker`` or ``broker1`` (the second broker)."""
    kind: str


def kinds(brokers: int) -> dict[str, tuple[str, ...]]:
    """The kinds of failures of each process. The name of a failure of the link to the second broker
    ends with ``1``."""
    links = [f"{kind}{link or ''}" for link in range(brokers) for kind in ("break", "cut")]
    of_worker = ("kill", *links, "stop", "drain")
    found = {
        "0": of_worker,
        "1": of_worker,
        "client": ("reconnect", "break", "cancel", "leave", "die"),
        "broker": ("restart", "pause"),
    }
    if brokers == 2:
        found["broker1"] = found["broker"]
    return found


class Run:
    """One run of the system."""

    def __init__(self, failures: tuple[Failure, ...], brokers: int = 1) -> None:
        self._failures = failures
        self.world = world = World(brokers, **SETTINGS)
        self._workers = [world.start_gpu(), world.start_gpu()]
        self._client = world.start_client()
        world.tick()
        self.touched: list[str] = []
        """The process of each turn so far."""

    def play(self) -> None:
        """Plays the run to its end; raises AssertionError if it violates a promise."""
        try:
            for seed, length in enumerate(LENGTHS, 1):
                self._client.submit(1 + seed % 2, length, "", seed)
            for process in self._turns():
                self.touched.append(process)
                self._fail(len(self.touched))
                if len(self.touched) % TICK_TURNS == 0:
                    self.world.tick()
            for failure in self._later():
                self._apply(failure)
            self.world.end()
            for reader in self.world.readers():
                if not reader.cancelled:
                    assert reader.error is None, f"a stream ended with {reader.error}"
        finally:
            self.world.close()

    def _later(self) -> list[Failure]:
        """The failures that have not happened yet."""
        return [failure for failure in self._failures if failure.turn > len(self.touched)]

    def _fail(self, turn: int) -> None:
        for failure in self._failures:
            if failure.turn == turn:
                self._apply(failure)

    def _apply(self, failure: Failure) -> None:
        if failure.process.startswith("broker"):
            number = int(failure.process.removeprefix("broker") or 0)
            self._fail_broker(self.world.networks[number], failure.kind)
        elif failure.process == "client":
            self._fail_client(failure.kind)
        else:
            self._fail_worker(self._workers[int(failure.process)], failure.kind)

    def _fail_worker(self, worker: Worker, kind: str) -> None:
        if worker.gone:
            return
        match kind:
            case "kill":
                worker.kill(1)
                self.world.start_gpu()
            case "stop":
                worker.stopped = True
                self._pass_time()
                worker.stopped = False
            case "drain":
                worker.drain()
            case _:
                pipe = worker.pipes[int(kind[-1]) if kind[-1].isdigit() else 0]
                if kind.startswith("break"):
                    pipe.break_off(1)
                else:
                    pipe.cut = True
                    self._pass_time()
                    pipe.cut = False

    def _fail_client(self, kind: str) -> None:
        client = self._client
        if client.gone:
            return
        match kind:
            case "reconnect":
                client.reconnect(1)
            case "break":
                client.pipe.break_off(1)
            case "cancel":
                for reader in client.readers[:1]:
                    if not reader.over and not reader.cancelled:
                        client.cancel(reader)
            case "leave":
                client.leave()
            case "die":
                client.die(1)

    def _fail_broker(self, network: Network, kind: str) -> None:
        if kind == "restart":
            network.kill_broker()
            network.start_broker()
        else:
            network.stopped = True
            self._pass_time()
            network.go_on()

    def _pass_time(self) -> None:
        """Lets ``LONG_S`` pass. Processes that are not stopped continue meanwhile."""
        end = self.world.network.now + LONG_S
        while self.world.network.now < end:
            self.world.tick()

    def _turns(self) -> Iterator[str]:
        """Gives the processes their turns until all failures have happened and all streams have
        ended, or until no process has work; yields the process after each turn."""
        while self._later() or not all(r.over or r.cancelled for r in self.world.readers()):
            idle = True
            for process in ("client", "0", "1"):
                for _ in self._turns_of(process):
                    idle = False
                    yield process
            if idle:
                return

    def _turns_of(self, process: str) -> Iterator[None]:
        """Handles one message from the process to each broker, then one message from each broker to
        the process, then one step of a worker; yields after each of these."""
        one: Client | Worker
        one = self._client if process == "client" else self._workers[int(process)]
        if isinstance(one, Worker) and one.gone:
            return
        pipes = [one.pipe] if isinstance(one, Client) else one.pipes
        for pipe in pipes:
            if pipe.arrive(1):
                yield
        if isinstance(one, Client):
            if one.receive(1):
                yield
            return
        for carrier in one.carriers:
            if not one.gone and carrier.turn(1):
                yield
        if not one.gone and one.step():
            yield
        self.world.forget_gone()


def choices(touched: list[str], earliest: Failure | None, brokers: int = 1) -> Iterator[Failure]:
    """The failures that may follow ``earliest`` in a run. ``touched``: the process of each turn of
    the run. A broker may fail after each turn. Any other process may fail after each of its own
    turns, and right after ``earliest``."""
    first = earliest.turn if earliest is not None else 1
    for turn in range(first, len(touched) + 1):
        for process, of_process in kinds(brokers).items():
            now = process == touched[turn - 1] or process.startswith("broker") or turn == first
            for kind in of_process:
                failure = Failure(turn, process, kind)
                if now and (earliest is None or failure > earliest):
                    yield failure


def play(
    failures: tuple[Failure, ...], brokers: int = 1
) -> tuple[tuple[Failure, ...], list[str], str]:
    """Plays a run; returns its failures, the process of each turn, and the violation, or ``""``."""
    logging.disable(logging.CRITICAL)
    run = Run(failures, brokers)
    try:
        run.play()
    except Exception:
        return failures, run.touched, traceback.format_exc()
    return failures, run.touched, ""


def sample(seed: int, failures: int, brokers: int) -> str:
    """Plays a random run with ``failures`` failures, and the runs with fewer failures that lead to
    it; returns the violation, or ``""``."""
    draw = random.Random(seed)
    chosen: tuple[Failure, ...] = ()
    for number in range(failures + 1):
        _, touched, violation = play(chosen, brokers)
        if violation:
            return f"{chosen}\n{violation}"
        following = list(choices(touched, chosen[-1] if chosen else None, brokers))
        if number == failures or not following:
            break
        chosen = (*chosen, draw.choice(following))
    return ""


def search_samples(
    samples: int, failures: int, processes: int, brokers: int
) -> tuple[int, bool, list[str]]:
    """Plays ``samples`` random runs; returns the same values as ``search``."""
    one = functools.partial(sample, failures=failures, brokers=brokers)
    with mp.Pool(processes) as pool:
        found = pool.map(one, range(samples), chunksize=16)
    return samples, True, list(filter(None, found))


def search(
    failures: int, seconds: float, processes: int, brokers: int
) -> tuple[int, bool, list[str]]:
    """Plays all runs with up to this number of failures, runs with fewer failures first. Returns
    the number of runs, whether all were played in time, and the violations."""
    ends, count, violations = time.monotonic() + seconds, 0, []
    level: list[tuple[Failure, ...]] = [()]
    with mp.Pool(processes) as pool:
        for depth in range(failures + 1):
            following: list[tuple[Failure, ...]] = []
            one = functools.partial(play, brokers=brokers)
            for played, touched, violation in pool.imap_unordered(one, level, chunksize=16):
                count += 1
                if violation:
                    violations.append(f"{played}\n{violation}")
                elif depth < failures:
                    last = played[-1] if played else None
                    following += [(*played, failure) for failure in choices(touched, last, brokers)]
                if time.monotonic() > ends:
                    pool.terminate()
                    return count, False, violations
            print(f"{len(level)} runs with {depth} failures, {len(violations)} violations")
            level = following
    return count, True, violations


def main() -> None:
    """Searches with the options of the command line, and prints the violations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=2, help="failures of a run (default: 2)")
    parser.add_argument("--brokers", type=int, default=1, help="brokers, 1 or 2 (default: 1)")
    parser.add_argument("--samples", type=int, default=0, help="play this many random runs")
    parser.add_argument("--seconds", type=float, default=600, help="time limit in s (default: 600)")
    parser.add_argument("--processes", type=int, default=2, help="processes (default: 2)")
    given = parser.parse_args()
    if given.samples:
        count, complete, violations = search_samples(
            given.samples, given.failures, given.processes, given.brokers
        )
    else:
        count, complete, violations = search(
            given.failures, given.seconds, given.processes, given.brokers
        )
    for violation in itertools.islice(violations, 5):
        print(violation)
    print(f"{count} runs, {len(violations)} violations{'' if complete else ', not complete'}")
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
