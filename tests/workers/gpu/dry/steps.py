"""Engines for a model of the shape of Llama 3 8B on the device of fake tensors, and their steps."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel

from .device import Device

LAYERS = 2
STEPS = 4
BATCH = 64
LAYER_BUDGET = 9
"""Largest number of launches of a decoder layer, in a graph or without one."""
AROUND_MIXED = 24
"""Largest number of launches outside the layers in a step with a chunk of a prompt. With 32 layers,
such a step has at most 312 launches."""


def make(loaded: LoadedModel, **config: Any) -> Engine:
    given = {"max_num_seqs": BATCH, "kv_cache_bytes": 2**30, "overlap": True, **config}
    return Engine(loaded, EngineConfig(**given))


def fill(engine: Engine, sampling: dict[str, Any], count: int = BATCH) -> None:
    """Adds requests, and runs steps until all requests decode."""
    rng = random.Random(1)
    for number in range(count):
        prompt = [rng.randrange(1000) for _ in range(40)]
        engine.add(number, prompt, Sampling(max_tokens=200, ignore_eos=True, **sampling))
    for _ in range(4 + count * 40 // 2048):
        engine.step()


def mixed_step(device: Device, engine: Engine, decodes: int, prompts: int) -> Counter[str]:
    """The launches of a step that decodes some sequences and computes chunks of some prompts."""
    fill(engine, {"temperature": 0.0}, decodes)
    for number in range(decodes, decodes + prompts):
        sampling = Sampling(max_tokens=3, ignore_eos=True, temperature=0.0)
        engine.add(number, [number] * (8000 // prompts), sampling)
    engine.step()
    with device.counting():
        engine.step()
    assert not device.faults
    assert device.replays == 0
    return device.launches


def per_step(device: Device) -> float:
    return (sum(device.launches.values()) + device.replays) / STEPS
