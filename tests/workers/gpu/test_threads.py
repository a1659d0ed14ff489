"""The fastest number of threads is chosen, even if other processes use the machine's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.block_manager import BlockManager
from tokenbus.workers.gpu.engine.scheduler import Batch, Chunk
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.model.cpu_native.backend import CpuBackend
from tokenbus.workers.gpu.model.cpu_native.threads import LAST_TRIAL, MAX_TOKENS, ThreadChooser
from tokenbus.workers.gpu.model.cuda.choice import choose_layout
from tokenbus.workers.gpu.model.loader import wrap_model
from tokenbus.workers.gpu.model.runner import Runner

from .test_architectures import CASES, make

BLOCKS = 8


@pytest.fixture
def all_threads() -> Iterator[int]:
    """The number of threads of torch, which is restored after the test."""
    number = torch.get_num_threads()
    yield number
    torch.set_num_threads(number)


def run(
    chooser: ThreadChooser, steps: int, seconds: Callable[[int], float], num_tokens: int = 1
) -> list[int]:
    """Simulates ``steps`` forwards, each of which takes ``seconds(threads)``; returns their numbers
    of threads."""
    used = []
    for _ in range(steps):
        threads = chooser.choose(num_tokens)
        used.append(threads)
        chooser.observe(num_tokens, seconds(threads))
    return used


def idle(threads: int) -> float:
    """The seconds of a step if every thread has a core."""
    return 8.0 / threads


def shared(threads: int) -> float:
    """The seconds of a step if another process uses one of the cores."""
    return 8.0 if threads == 1 else 30.0


def test_all_threads_are_used_on_an_idle_machine() -> None:
    used = run(ThreadChooser(4), 2000, idle)
    assert used.count(4) > 0.95 * len(used)


def test_fewer_threads_are_used_where_they_are_faster() -> None:
    used = run(ThreadChooser(2), 2000, shared)
    assert used[200:].count(1) > 0.97 * len(used[200:])


def test_a_step_that_gets_slower_is_tried_with_fewer_threads_soon() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 2 * LAST_TRIAL, idle)
    used = run(chooser, 40, shared)
    assert used[-1] == 1
    assert used.count(2) < 20


def test_all_threads_are_used_again_when_the_machine_is_idle_again() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 500, shared)
    used = run(chooser, 3 * LAST_TRIAL, idle)
    assert used[-1] == 2


def test_steps_of_many_tokens_use_all_threads() -> None:
    used = run(ThreadChooser(2), 200, shared, num_tokens=MAX_TOKENS + 1)
    assert set(used) == {2}


def test_sizes_are_measured_apart() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 500, shared, num_tokens=1)
    assert run(chooser, 100, idle, num_tokens=32)[-1] == 2
    assert run(chooser, 20, shared, num_tokens=1).count(1) > 15


def test_a_size_begins_with_what_was_found_for_the_next_one() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 3, shared, num_tokens=32)
    run(chooser, 500, shared, num_tokens=1)
    assert run(chooser, 8, shared, num_tokens=32) == [1] * 8
    assert run(chooser, 8, shared, num_tokens=4) == [1] * 8


def test_a_size_tries_soon_what_has_become_faster_for_another() -> None:
    chooser = ThreadChooser(2)
    for num_tokens in (1, 4):
        run(chooser, 2 * LAST_TRIAL, idle, num_tokens)
    assert run(chooser, 30, shared, num_tokens=1)[-1] == 1
    assert chooser.choose(4) == 1


def test_one_core_has_nothing_to_choose() -> None:
    assert set(run(ThreadChooser(1), 200, idle)) == {1}


def test_a_forward_by_torch_leaves_all_threads_to_the_next_step(all_threads: int) -> None:
    name = next(iter(CASES))
    loaded = wrap_model(name, make(name))
    layout = choose_layout(loaded)
    runner = Runner(loaded, BLOCKS, layout)
    assert isinstance(runner.backend, CpuBackend)
    runner.backend.native = None
    sequence = Sequence(0, 0, [1, 2, 3, 4], 4, Sampling(), 1000)
    blocks = BlockManager(BLOCKS, layout.block_size)
    assert blocks.reserve(sequence.block_table, 0, 4) == []
    logits = runner.forward(runner.pack(Batch([Chunk(sequence, 0, 4, [])]))[1])
    assert torch.isfinite(logits).all()
    assert torch.get_num_threads() == all_threads
