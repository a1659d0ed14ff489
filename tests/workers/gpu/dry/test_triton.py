"""Steps of a model of the shape of Llama 3 8B with the Triton kernels, on a CUDA device of fake
tensors: the number of launches.

The kernels do not run. On fake tensors, their launches are operations without computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.model.loader import LoadedModel

from .device import Device, fake_device
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

AROUND = 15
"""Largest number of launches of a forward outside its layers."""
KERNELS = ("split_attention", "prefill_attention", "norm", "gated", "rotary_store")


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """The fake device, without FlashAttention over blocks."""
    with fake_device() as device, pytest.MonkeyPatch.context() as patches:
        patches.setattr(varlen, "why_not", lambda loaded: "torch 2.11")
        yield device


def kernels(launches: Any) -> dict[str, int]:
    """The launches of Triton kernels among ``launches``, by kernel."""
    prefix = "tokenbus_triton."
    found = {name.removeprefix(prefix): n for name, n in launches.items() if prefix in name}
    assert set(found) <= set(KERNELS)
    return found


def test_the_engine_names_triton_and_captures_graphs(engine: Engine) -> None:
    assert engine.path.attention == "Triton over blocks"
    assert engine.path.graphs
    assert not engine.path.fallbacks


def test_a_layer_of_a_graph_has_nine_kernels(device: Device, engine: Engine) -> None:
    assert kernels(device.captured) == {
        "split_attention": LAYERS,
        "norm": 2 * LAYERS + 1,
        "gated": LAYERS,
        "rotary_store": LAYERS,
    }
    assert sum(device.captured.values()) <= AROUND + LAYERS * LAYER_BUDGET, device.captured
    assert not [fault for fault in device.faults if "capture" in fault]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_a_decode_step_is_a_replay_and_waits_for_nothing(
    device: Device, engine: Engine, sampling: dict[str, Any]
) -> None:
    fill(engine, sampling)
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert not device.faults
    assert device.replays == STEPS
    assert not kernels(device.launches)
    assert per_step(device) <= 80


@pytest.mark.parametrize(("decodes", "prompts"), [(BATCH - 1, 1), (3, 5)])
def test_a_mixed_step_has_one_launch_more_a_layer(
    device: Device, engine: Engine, decodes: int, prompts: int
) -> None:
    launches = mixed_step(device, engine, decodes, prompts)
    found = kernels(launches)
    assert found["split_attention"] == found["prefill_attention"] == LAYERS
    assert sum(launches.values()) <= AROUND_MIXED + 1 + LAYERS * (LAYER_BUDGET + 1), launches


def test_masks_forks_splices_and_prompts_wait_for_nothing(device: Device, engine: Engine) -> None:
    fill(engine, {"temperature": 0.8}, BATCH // 2)
    mask = np.full(engine.mask_words, 2**32 - 1, dtype=np.uint32)
    with device.counting():
        for number in range(STEPS):
            step = engine.begin()
            engine.fork(number, 0, 2)
            engine.splice(STEPS + number, 0, 2, [5, 6, 7])
            engine.set_mask(2 * STEPS + number, 0, mask)
            engine.add(BATCH - 1 - number, [1] * 3000, Sampling(max_tokens=20, ignore_eos=True))
            engine.finish(step)
        for _ in range(STEPS):
            engine.step()
    assert not device.faults


def test_drafts_wait_for_nothing(device: Device, loaded: LoadedModel) -> None:
    drafting = make(loaded, speculation=True, max_num_seqs=8)
    for number in range(8):
        sampling = Sampling(max_tokens=200, ignore_eos=True, temperature=0.0)
        drafting.add(number, [1 + i % 5 for i in range(50)], sampling)
    for _ in range(4):
        drafting.step()
    with device.counting():
        for _ in range(STEPS):
            drafting.step()
    assert not device.faults
