"""Steps under controllers on a device of fake tensors. The steps must not wait for the device.

``test_steps.py`` has the tests of masks, forks and splices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenbus.protocol.sampling import Query, Sampling
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.sampling.biases import Bias
from tokenbus.workers.gpu.sampling.distributions import TokenOptions
from tokenbus.workers.gpu.sampling.under import Under

from .device import PERIOD, Device
from .steps import STEPS, fill, make

BATCH = 16
GREEDY, RANDOM = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def shared(loaded: LoadedModel) -> Engine:
    return make(loaded, max_num_seqs=BATCH)


def steer(device: Device, engine: Engine, act: Callable[[int, int], None]) -> float:
    """Runs some steps and acts on each sequence that is ready; returns the launches of a step."""
    with device.counting():
        for number in range(STEPS):
            step = engine.begin()
            for request, _ in step.ready:
                act(number, request)
            engine.finish(step)
    assert not device.faults
    return (sum(device.launches.values()) + device.replays) / STEPS


@pytest.mark.parametrize(("mode", "budget"), [(GREEDY, 22), (RANDOM, 45)])
@pytest.mark.parametrize("sparse", [False, True])
def test_biases_wait_for_nothing(
    device: Device, engine: Engine, sparse: bool, mode: dict[str, float], budget: int
) -> None:
    fill(engine, mode, BATCH)
    vocab = engine.loaded.vocab_size
    tokens = np.array([3, 5, 9]) if sparse else None
    bias = Bias(np.ones(3 if sparse else vocab, dtype=np.float32), tokens)
    launches = steer(device, engine, lambda _, n: engine.set_mask(n, 0, None, bias))
    assert launches <= budget, device.launches
    copied = BATCH * (1000 if sparse else 4.1 * vocab)
    assert device.uploaded / STEPS <= copied


@pytest.mark.parametrize(("mode", "budget"), [(GREEDY, 58), (RANDOM, 85)])
def test_queries_wait_for_nothing(
    device: Device, engine: Engine, mode: dict[str, float], budget: int
) -> None:
    fill(engine, mode, BATCH)
    options = TokenOptions(Query(top=5, tokens=[1, 2, 3]))
    launches = steer(device, engine, lambda _, n: engine.set_mask(n, 0, None, options=options))
    assert launches <= budget, device.launches


def test_deferred_and_suspended_sequences_wait_for_nothing(device: Device, engine: Engine) -> None:
    fill(engine, {"temperature": 0.8}, BATCH)

    def act(number: int, request: int) -> None:
        if request % STEPS == number:
            (engine.defer if request % 2 else engine.suspend)(request, 0)

    steer(device, engine, act)
    deferred = [n for n in range(BATCH) if n % 2]
    with device.counting():
        for number in deferred:
            engine.reschedule(number, 0)
        for number in range(BATCH):
            if number % 2 == 0:
                engine.resume(number, 0)
        for _ in range(STEPS):
            engine.step()
    assert not device.faults
    assert all(engine.alive(number, 0) for number in range(BATCH))


def test_inspected_sequences_under_masks_wait_for_nothing(device: Device, engine: Engine) -> None:
    for number in range(BATCH):
        sampling = Sampling(max_tokens=50, ignore_eos=True, temperature=0.0)
        engine.add(number, [number + 1] * 40, sampling, inspect=True)
    for _ in range(3):
        engine.step()
    mask = np.full(engine.mask_words, 2**32 - 1, dtype=np.uint32)
    launches = steer(device, engine, lambda _, n: engine.set_mask(n, 0, mask))
    assert launches <= 25, device.launches


def test_scores_wait_for_nothing(device: Device, engine: Engine) -> None:
    fill(engine, {"temperature": 0.8}, BATCH // 2)
    with device.counting():
        for number in range(BATCH // 2, BATCH):
            engine.score(number, [number] * 50, [1, 2, 3] * 100, top_logprobs=3)
        while any(engine.alive(number, 0) for number in range(BATCH // 2, BATCH)):
            engine.step()
    assert not device.faults


def test_drafts_under_masks_wait_for_nothing(device: Device, loaded: LoadedModel) -> None:
    engine = make(loaded, speculation=True, max_num_seqs=4)
    for number in range(4):
        sampling = Sampling(max_tokens=200, ignore_eos=True, temperature=0.0)
        engine.add(number, [1 + i % PERIOD for i in range(50)], sampling, speculate=False)
        engine.take_drafts(number)
    for _ in range(3):
        engine.step()
    mask = np.full(engine.mask_words, 2**32 - 1, dtype=np.uint32)
    before = engine._speculation.accepted_tokens
    drafts: dict[tuple[int, int], Sequence[int]] = {}
    with device.counting():
        for _ in range(STEPS):
            step = engine.begin()
            for request, seq in step.ready:
                engine.set_mask(request, seq, mask)
                along = [Under(mask)] * len(drafts.get((request, seq), ()))
                engine.sample_along(request, seq, along)
            engine.finish(step)
            drafts = engine.draft_ahead([(number, 0) for number in range(4)])
    assert not device.faults
    assert engine._speculation.accepted_tokens > before
