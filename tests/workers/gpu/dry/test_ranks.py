"""Tensor parallelism on a device of fake tensors: the computation of one rank.

torch.distributed adds up the results of the ranks. These sums are not part of the steps here.
"""

from __future__ import annotations

import threading
from typing import Any

from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model import ranks
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from tokenbus.workers.gpu.model.ranks import Ranks, decode_order
from tokenbus.workers.gpu.model.runner import Runner

from .device import Device, llama_8b
from .steps import BATCH, LAYERS, STEPS, fill, make

PARTS = 2
BUDGET = 60 + LAYERS * 32
"""Largest number of launches of a step that runs transformers' modules, without a graph."""


class Sent(Ranks):
    """Ranks without processes. ``orders`` has the orders that were sent to them, encoded and
    decoded again."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self._together = threading.Lock()

    def _send(self, order: Any) -> None:
        self.orders.append(decode_order(ranks._encode(order)))


def part(of: Ranks | None) -> LoadedModel:
    """The part of the model on one rank."""
    loaded = wrap_model("8b", llama_8b(LAYERS, PARTS), parallel=True)
    loaded.ranks = of
    return loaded


def per_step(device: Device) -> float:
    assert not device.faults
    assert device.replays == 0
    return sum(device.launches.values()) / STEPS


def test_rank_0_decodes_and_computes_prompts_without_a_wait(device: Device) -> None:
    sent = Sent()
    engine: Engine = make(part(sent))
    assert not engine.overlaps
    [why, *_] = [f for f in engine.path.fallbacks if f.startswith("CUDA graphs")]
    assert "several devices" in why
    fill(engine, {"temperature": 0.8}, BATCH - 1)
    sent.orders.clear()
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert per_step(device) <= BUDGET, device.launches
    assert [type(order) for order in sent.orders] == [ranks.Forward] * STEPS
    engine.add(BATCH - 1, [7] * 8000, Sampling(max_tokens=3, ignore_eos=True))
    with device.counting():
        for _ in range(STEPS):
            engine.step()
    assert per_step(device) <= BUDGET, device.launches


def test_another_rank_computes_the_forwards_that_it_receives_without_a_wait(
    device: Device,
) -> None:
    sent = Sent()
    engine = make(part(sent))
    [opened] = sent.orders
    follower = Runner(part(None), opened.num_blocks, opened.layout)
    fill(engine, {"temperature": 0.0}, 8)
    engine.add(8, [7] * 300, Sampling(max_tokens=3, ignore_eos=True))
    # The fork copies the block that both sequences would write to.
    engine.fork(0, 0, 1)
    for _ in range(STEPS):
        engine.step()
    forwards = [order for order in sent.orders if isinstance(order, ranks.Forward)]
    assert any(order.packed.copies for order in forwards)
    with device.counting():
        for order in forwards:
            follower.follow(order.packed)
    assert not device.faults
    assert sum(device.launches.values()) / len(forwards) <= BUDGET
