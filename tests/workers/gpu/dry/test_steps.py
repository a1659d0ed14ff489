"""Steps of a model of the shape of Llama 3 8B on a CUDA device of fake tensors. The tests count
launches, and check that no operation waits for the device.

A budget is the largest number of launches of a step: kernels and copies outside of its graph, and
the replay of the graph.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.model.triton import ops
from tokenbus.workers.gpu.sampling.races import MAX_AHEAD

from ..meter import Meter
from .device import PERIOD, Device
from .steps import (
    AROUND_MIXED,
    BATCH,
    LAYER_BUDGET,
    LAYERS,
    STEPS,
    fill,
    make,
    mixed_step,
    per_step,
)

LAYER_BUDGET_WITHOUT_TRITON = 16
DRAW_BUDGET = 18
"""Largest number of launches that compute the random numbers of one step, or of ``MAX_AHEAD``
steps."""
BUDGETS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0.0}, 10),
    "temperature": ({"temperature": 0.8}, 18),
    "top_p": ({"temperature": 0.8, "top_p": 0.9}, 38),
    "top_k": ({"temperature": 0.8, "top_k": 40}, 60),
    "min_p": ({"temperature": 0.8, "min_p": 0.1}, 22),
    "penalties": ({"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1}, 24),
    "bias": ({"temperature": 0.0, "logit_bias": {1: 2.0}}, 22),
    "top_logprobs": ({"temperature": 0.0, "top_logprobs": 5}, 13),
}


with_flash = pytest.mark.skipif(
    bool(varlen.why_no_kernel()), reason="torch here has no attention over blocks"
)


@with_flash
def test_the_model_runs_on_the_device_by_the_fast_path(loaded: LoadedModel, engine: Engine) -> None:
    assert loaded.device.type == "cuda"
    assert loaded.decoder is not None
    assert engine.path.attention == "FlashAttention over blocks"
    assert engine.path.graphs
    assert not engine.path.fallbacks


def test_a_layer_of_a_graph_stays_within_its_budget(device: Device, shared: Engine) -> None:
    around = 15
    assert 0 < sum(device.captured.values()) <= around + LAYERS * LAYER_BUDGET
    assert not [fault for fault in device.faults if "capture" in fault]


@pytest.mark.parametrize("mode", BUDGETS)
def test_a_decode_step_stays_within_its_budget_and_waits_for_nothing(
    device: Device, engine: Engine, mode: str
) -> None:
    sampling, budget = BUDGETS[mode]
    fill(engine, sampling)
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert not device.faults
    assert device.replays == STEPS
    assert per_step(device) <= budget, device.launches


def test_the_random_numbers_of_many_steps_take_the_launches_of_one(
    device: Device, engine: Engine
) -> None:
    fill(engine, {"temperature": 0.8})
    with device.counting():
        for _ in range(MAX_AHEAD):
            engine.step()
    assert not device.faults
    budget = MAX_AHEAD * BUDGETS["temperature"][1] + DRAW_BUDGET
    assert sum(device.launches.values()) + device.replays <= budget


@pytest.mark.parametrize(("temperature", "budget"), [(0.8, 27), (0.0, 22)])
def test_masks_travel_as_bits_and_wait_for_nothing(
    device: Device, engine: Engine, temperature: float, budget: int
) -> None:
    fill(engine, {"temperature": temperature})
    mask = np.full(engine.mask_words, 2**32 - 1, dtype=np.uint32)
    with device.counting():
        for _ in range(STEPS):
            step = engine.begin()
            for number in range(BATCH):
                engine.set_mask(number, 0, mask)
            engine.finish(step)
    assert not device.faults
    assert device.replays == STEPS
    assert per_step(device) <= budget, device.launches
    assert device.uploaded / STEPS <= 1.02 * BATCH * mask.nbytes


def test_reports_of_candidates_wait_for_nothing(device: Device, engine: Engine) -> None:
    fill(engine, {"temperature": 0.8, "top_p": 0.9, "processed_logprobs": True, "kept": True})
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert not device.faults
    assert device.replays == STEPS


def test_forks_splices_and_prompts_in_chunks_wait_for_nothing(
    device: Device, engine: Engine
) -> None:
    fill(engine, {"temperature": 0.8}, BATCH // 2)
    with device.counting():
        for number in range(STEPS):
            step = engine.begin()
            engine.fork(number, 0, 2)
            engine.splice(STEPS + number, 0, 2, [5, 6, 7])
            engine.suspend(2 * STEPS + number, 0)
            engine.add(BATCH - 1 - number, [1] * 3000, Sampling(max_tokens=20, ignore_eos=True))
            engine.finish(step)
        for _ in range(STEPS):
            engine.step()
    assert not device.faults


@with_flash
@pytest.mark.parametrize(("decodes", "prompts"), [(BATCH - 1, 1), (3, 5)])
def test_a_step_with_chunks_of_prompts_stays_within_its_budget(
    device: Device, engine: Engine, decodes: int, prompts: int
) -> None:
    launches = mixed_step(device, engine, decodes, prompts)
    assert sum(launches.values()) <= AROUND_MIXED + LAYERS * LAYER_BUDGET, launches
    # One copy transfers all arrays of the step.
    assert launches["upload"] == 1


@with_flash
def test_a_layer_without_triton_has_a_budget_too(
    device: Device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "why_missing", lambda device: "triton is not installed")
    engine = make(loaded)
    assert engine.path.fallbacks == ["layers: triton is not installed"]
    launches = mixed_step(device, engine, BATCH - 1, 1)
    assert sum(launches.values()) <= AROUND_MIXED + LAYERS * LAYER_BUDGET_WITHOUT_TRITON, launches


def test_drafts_and_their_verification_wait_for_nothing(
    device: Device, loaded: LoadedModel
) -> None:
    engine = make(loaded, speculation=True, max_num_seqs=8)
    for number in range(8):
        sampling = Sampling(max_tokens=200, ignore_eos=True, temperature=0.0)
        engine.add(number, [1 + i % PERIOD for i in range(50)], sampling)
    for _ in range(4):
        engine.step()
    before = engine._speculation.accepted_tokens
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert engine._speculation.accepted_tokens > before
    assert not device.faults


def test_a_draft_model_waits_for_nothing_but_its_tokens(
    device: Device, loaded: LoadedModel
) -> None:
    config = {"speculation": True, "max_num_seqs": 4, "kv_cache_bytes": 2**30, "overlap": True}
    engine = Engine(loaded, EngineConfig(**config), draft_model=loaded)  # type: ignore[arg-type]
    drafts = engine._speculation._model
    assert drafts is not None
    # The draft model here is the large model itself, so its cost is set to that of a small model.
    drafts.forward_cost = 0.01
    rng = random.Random(3)
    for number in range(4):
        prompt = [rng.randrange(1000) for _ in range(40)]
        engine.add(number, prompt, Sampling(max_tokens=200, ignore_eos=True, temperature=0.8))
    with device.counting():
        for _ in range(2 * STEPS):
            engine.step()
    assert engine._speculation.draft_tokens > 0
    assert not device.faults


def test_steps_in_turn_wait_for_nothing_but_their_tokens(
    device: Device, loaded: LoadedModel
) -> None:
    engine = make(loaded, overlap=False, max_num_seqs=8)
    fill(engine, {"temperature": 0.8}, 8)
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert not device.faults
    assert device.replays == STEPS


def test_the_cache_and_the_largest_step_fit_in_the_device(
    device: Device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(total=24 * 2**30, counts=lambda tensor: tensor.is_cuda)
    meter.patch(monkeypatch)
    weights = sum(p.nbytes for p in loaded.model.parameters())
    with meter:
        engine = make(loaded, kv_cache_bytes=None)
        made = meter.live
        for number in range(BATCH):
            sampling = Sampling(temperature=0.8, top_p=0.9, max_tokens=3, ignore_eos=True)
            engine.add(number, [1] * 400, sampling)
        while engine.has_work:
            engine.step()
    # The cache has most of the memory, and no step needs more than was reserved for steps.
    assert made + weights > 0.7 * meter.total
    assert meter.peak + weights <= 0.9 * meter.total


def test_the_device_finds_what_would_wait(device: Device) -> None:
    tensor = torch.zeros(4, device="cuda")
    with device.counting():
        tensor[[0, 1]]
        torch.tensor([1], device="cuda")
        tensor.to("cpu")
        with pytest.raises(RuntimeError):
            tensor.sum().item()
        logging.getLogger("tokenbus.workers.gpu.engine.step").warning("a step failed")
    assert [fault.split(" at ")[0] for fault in device.faults] == [
        "an index by a list of the host",
        "a blocking copy in torch.tensor",
        "a blocking copy in aten._to_copy.default",
        "a wait in aten._local_scalar_dense.default",
        "a step failed",
    ]
