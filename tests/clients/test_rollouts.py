"""The operator changes the weights of two workers while streams run."""

from __future__ import annotations

import asyncio
import signal
import threading
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from tokenbus.clients import AsyncClient, Client, RequestError, Rollout, Stream
from tokenbus.clients.operator import AsyncOperator, Operator

from ..processes import Bus, until
from ..workers.gpu.changed_weights import write_embedded

pytestmark = pytest.mark.process

WAITS = "embedded gets version 2 from another worker"
"""A part of the log of a worker that waits for the current weights."""
WAIT_S = 300.0
"""Time limit of a wait, in seconds. Only a hang reaches this limit."""


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


def test_workers_get_weights_over_the_bus_and_from_each_other(tmp_path: Path) -> None:
    """Four workers are killed: one to which the operator sends weights, one that gets weights from
    another worker, and the two that have the weights."""
    files = [Path(write_embedded(tmp_path / n, int(n))) / "model.safetensors" for n in ("1", "2")]
    with Bus(recover_s=0.1) as bus, bus.client() as client:
        first, stopped = bus.start_worker(), bus.start_worker()
        bus.wait_for_models("embedded", workers=2)
        stream = begun(client, 1)
        stopped.send(signal.SIGSTOP)
        results: list[Rollout] = []
        sends = partial(Operator(client).send_weights, files[0], timeout_s=WAIT_S)
        sending = threading.Thread(target=lambda: results.append(sends()))
        sending.start()
        stopped.kill()
        bus.workers.remove(stopped)
        sending.join(WAIT_S)
        assert [(one.version, one.workers) for one in results] == [(1, 1)]
        assert sum(1 for _ in stream)
        second = bus.start_worker()
        until(lambda: versions(client) == [1, 1], WAIT_S, "two workers with version 1")

        done = asyncio.run(shared(bus.front, files[1]))
        assert (done.version, done.workers) == (2, 2)
        with pytest.raises(RequestError, match="cannot read 'the bus'"):
            Operator(client).send_weights(b"no safetensors file", timeout_s=WAIT_S)
        assert versions(client) == [2, 2]

        for peer in (first, second):
            peer.send(signal.SIGSTOP)
        for kills in (True, False):
            new = bus.start_worker()
            until(lambda: WAITS in new.log, WAIT_S, "a worker that waits for weights")  # noqa: B023
            if kills:
                new.kill()
                bus.workers.remove(new)
        first.kill()
        bus.workers.remove(first)
        until(lambda: versions(client) == [2], WAIT_S, "the loss of a worker")
        second.send(signal.SIGCONT)
        until(lambda: versions(client) == [2, 2], WAIT_S, "a worker with the weights of another")
        second.kill()
        bus.workers.remove(second)
        stream = client.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
        assert sum(1 for _ in stream) == 4
        [(_, span)] = stream.sequences[0].spans
        assert (span.version, span.weights) == (2, done.weights)


async def shared(front: str, file: Path) -> Rollout:
    """Updates the weights with a file's content in shared memory, which is then removed."""
    memory = SharedMemory(create=True, size=file.stat().st_size)
    try:
        content, buffer = file.read_bytes(), memory.buf
        assert buffer is not None
        buffer[: len(content)] = content
        async with AsyncClient(front) as client:
            return await AsyncOperator(client).share_weights(memory.name, timeout_s=WAIT_S)
    finally:
        memory.close()
        memory.unlink()
