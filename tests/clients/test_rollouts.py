"""The operator changes the weights of two workers while streams run."""

from __future__ import annotations

import shutil
import signal
import threading
from pathlib import Path

import pytest
from tokenbus.clients import Client, RequestError, Rollout, Stream
from tokenbus.clients.operator import Operator

from ..processes import Bus, until
from ..workers.gpu.changed_weights import write_embedded

pytestmark = pytest.mark.process

WAITS = "another worker may have version 1"
"""A part of the log of a worker that cannot read the current weights from their folder."""
WAIT_S = 300.0
"""Time limit of a wait, in seconds. It only bounds a hang."""


def versions(client: Client) -> list[int]:
    """The version of the weights of each worker."""
    return sorted(w.paths["embedded"].version for w in client.status().workers if w.paths)


def begun(client: Client, seed: int) -> Stream:
    """Starts a long stream, and waits for its first token."""
    stream = client.generate(
        [5, 6, 7, seed], max_tokens=1500, ignore_eos=True, temperature=1.0, seed=seed
    )
    next(iter(stream))
    return stream


def test_weights_change_at_all_workers_or_at_none(tmp_path: Path) -> None:
    first, second = (write_embedded(tmp_path / name, seed) for name, seed in (("1", 1), ("2", 2)))
    with Bus(recover_s=0.1, allow=f"{tmp_path}/*") as bus, bus.client() as client:
        bus.start_worker()
        stopped = bus.start_worker()
        narrow = bus.start_worker(allow="/nowhere/*")
        bus.wait_for_models("embedded", workers=3)
        with pytest.raises(RequestError, match="is not in the allow-list"):
            Operator(client).update_weights(first, timeout_s=WAIT_S)
        assert versions(client) == [0, 0, 0]
        narrow.kill()
        bus.workers.remove(narrow)
        until(lambda: len(versions(client)) == 2, WAIT_S, "two workers")

        streams = [begun(client, seed) for seed in range(1, 5)]
        assert Operator(client).pause().streams == 4
        done = Operator(client).update_weights(first, timeout_s=WAIT_S)
        assert (done.version, done.workers, done.streams) == (1, 2, 4)
        Operator(client).resume()
        for stream in streams:
            assert sum(1 for _ in stream)
            [sequence] = stream.sequences
            spans = [span for _, span in sequence.spans]
            assert [span.version for span in spans] == [0, 1]
            assert spans[-1].weights == done.weights

        stopped.send(signal.SIGSTOP)
        results: list[Rollout] = []
        update = threading.Thread(
            target=lambda: results.append(Operator(client).update_weights(second, timeout_s=WAIT_S))
        )
        update.start()
        stopped.kill()
        update.join(WAIT_S)
        assert [(one.version, one.workers) for one in results] == [(2, 1)]
        bus.workers.remove(stopped)
        bus.start_worker()
        until(lambda: versions(client) == [2, 2], WAIT_S, "two workers with version 2")


def test_a_new_worker_gets_weights_that_are_no_longer_on_the_disk(tmp_path: Path) -> None:
    """The worker is killed while it waits for the weights, and later the worker that should send
    them."""
    folder = write_embedded(tmp_path / "1")
    with Bus(recover_s=0.1, allow=f"{tmp_path}/*") as bus, bus.client() as client:
        first, second = bus.start_worker(), bus.start_worker()
        bus.wait_for_models("embedded", workers=2)
        done = Operator(client).update_weights(folder, timeout_s=WAIT_S)
        wanted = list(client.generate([5, 6, 7], max_tokens=8, ignore_eos=True))
        shutil.rmtree(folder)
        for peer in (first, second):
            peer.send(signal.SIGSTOP)
        for kills in (True, False):
            new = bus.start_worker()
            until(lambda: WAITS in new.log, WAIT_S, "a worker that waits for weights")  # noqa: B023
            if kills:
                new.kill()
                bus.workers.remove(new)
        assert versions(client) == [1, 1]
        first.kill()
        bus.workers.remove(first)
        until(lambda: versions(client) == [1], WAIT_S, "the loss of a worker")
        second.send(signal.SIGCONT)
        until(lambda: versions(client) == [1, 1], WAIT_S, "a worker with the weights of another")
        second.kill()
        bus.workers.remove(second)
        stream = client.generate([5, 6, 7], max_tokens=8, ignore_eos=True)
        assert [e.token for e in stream] == [e.token for e in wanted]
        [(_, span)] = stream.sequences[0].spans
        assert (span.version, span.weights) == (1, done.weights)
