"""A GPU worker keeps files of masks open and mapped only while a request uses them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients import Client
from tokenbus.clients.client import Stream
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.controller.masks import MaskRows
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model

from ...processes import Bus, Process, until
from ...worlds.engine_client import GREEDY, PROMPT, only
from ...worlds.steered_engine import Bench, counting, freely, one_thread

SIZE = 4096
NAME = "memfd:tokenbus-masks"
WAIT_S = 300.0


def files(pid: int | str = "self") -> tuple[int, int]:
    """The number of files of masks that a process has open, and the number that it maps."""
    descriptors = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            descriptors += NAME in str(entry.readlink())
        except FileNotFoundError:
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return descriptors, sum(NAME in line for line in maps)


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    with one_thread():
        yield load_model("embedded")


@pytest.fixture
def before() -> tuple[int, int]:
    """The numbers of files that remain from other tests, whose requests did not end."""
    gc.collect()
    return files()


@pytest.fixture
def bench(embedded: LoadedModel) -> Bench:
    return Bench(counting(embedded))


def test_a_controller_worker_that_registers_again_and_again_leaves_no_files(
    bench: Bench, before: tuple[int, int]
) -> None:
    """The controller worker has a new id after each registration."""
    for worker in range(100, 103):
        bench.worker = worker
        for request in (1, 2):
            bench.add(request, PROMPT, GREEDY)
        bench.run(freely)
        assert bench.steps[-1].masks
        bench.check_nothing_is_left()
        assert files() == before


def test_requests_of_one_controller_worker_share_a_file_until_the_last_is_over(
    bench: Bench, before: tuple[int, int]
) -> None:
    for request in (1, 2):
        bench.add(request, PROMPT, GREEDY)
        bench.send(StepResult(request, 0, "sample"))
    bench.starts.clear()
    bench.step()
    for request in (1, 2):
        assert files()[1] == before[1] + 1
        bench.engine.abort(request)
        bench.steering.forget(request)
        bench.steering.forget(request)
    assert files() == before


def test_a_mask_is_read_from_the_file_of_its_own_controller_worker(
    bench: Bench, before: tuple[int, int]
) -> None:
    """This also holds if an earlier request used the file of another controller worker, which still
    writes to this file."""
    old: list[MaskRows] = []
    for request, token in ((1, 10), (2, 20)):
        bench.worker = 100 + request
        bench.add(request, PROMPT, GREEDY)
        bench.send(StepResult(request, 0, "sample"))
        bench.starts.clear()
        bench.step()
        step = bench.steps[-1]
        rows = MaskRows(step.masks, step.rows, step.row_bytes)
        row = rows.take()
        assert row is not None
        rows.view(row)[:] = only(SIZE, token).tobytes()
        for stale in old:
            stale.view(row)[:] = only(SIZE, 99).tobytes()
        bench.updates.clear()
        bench.send(StepResult(request, 0, "sample", row=row))
        bench.step()
        assert bench.tokens(request)[1:] == [token]
        bench.send(StepResult(request, 0, "stop"))
        bench.run(freely)
        old.append(rows)
    del rows, stale
    old.clear()
    assert files() == before


def test_masks_are_sent_while_the_system_gives_no_files(
    bench: Bench, before: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(words: int) -> None:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("tokenbus.workers.gpu.serving.mask_file.MaskFile", refuses)
        bench.add(1, PROMPT, GREEDY)
        bench.send(StepResult(1, 0, "sample"))
        bench.starts.clear()
        bench.step()
    bench.add(2, PROMPT, GREEDY)
    update = StepSequence(1, 0, [])
    bench.send(*freely(update), StepResult(2, 0, "sample"))
    bench.starts.clear()
    bench.updates.clear()
    bench.run(freely)
    assert {step.masks for step in bench.steps} == {""}
    bench.add(3, PROMPT, GREEDY)
    bench.run(freely)
    assert bench.steps[-1].masks
    assert files() == before


def _mapped(client: Client, streams: list[Stream], workers: list[Process]) -> bool:
    """Whether all workers map the file of a stream's masks. Begins a stream if none runs."""
    if not client.status().streams:
        options: dict[str, Any] = {"controller": "regex", "controller_arg": "[a-z ]{4000}"}
        streams.append(client.generate([5], max_tokens=900, n=4, **options))
        next(streams[-1])
    return all(files(worker.pid)[1] == 1 for worker in workers)


@pytest.mark.process
def test_workers_that_register_again_with_a_new_broker_leave_no_files() -> None:
    # No stream is left when its broker ends, so the next broker need not wait for reports of
    # streams.
    with Bus(recover_s=0.1) as bus:
        bus.start_worker()
        bus.start_other("controller")
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller")
        workers: list[Process] = [*bus.workers, *bus.others]
        for _ in range(3):
            with bus.client() as client:
                streams: list[Stream] = []
                until(
                    partial(_mapped, client, streams, workers),
                    WAIT_S,
                    "both workers map the file",
                )
                bus.broker.kill()
                bus.start_broker()
                bus.wait_for_models("embedded")
                bus.wait_for_roles("controller")
                until(
                    lambda: all(files(worker.pid) == (0, 0) for worker in workers),
                    WAIT_S,
                    "neither worker has a file",
                )
                for stream in streams:
                    stream.close()
