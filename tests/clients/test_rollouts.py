"""The operator changes the weights of two workers while streams run."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from tokenbus.clients import Client, RequestError, Rollout, Stream
from tokenbus.clients.operator import Operator

from ..processes import Bus, until
from ..workers.gpu.changed_weights import write_embedded

pytestmark = pytest.mark.process

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
