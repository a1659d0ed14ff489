"""Stage 6 of ``gpu_check.py``: times decode steps of models with 8 and 1 billion parameters.

A step must read the weights, the keys and the values. ``of_bandwidth`` compares the rate at which a
step reads these bytes with the device's bandwidth. The bandwidth is the rate at which a copy within
the device's memory reads and writes bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from _gpu_world import World, disable_graphs, greedy, random_prompts
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.kv_cache import token_bytes
from tokenbus.workers.gpu.model.loader import LoadedModel

COPIED = 4 * 2**30
"""Number of bytes that are copied to measure the bandwidth."""
DRY_COPIED = 2**22
BATCHES = (1, 64, 8, 256)
CONTEXTS = (128, 2048, 8192, 32_768)
STEPS, WARM_UPS = 40, 10
MEMORY_PART = 0.85
"""Share of the device's memory that the weights and the KV cache may use."""
TARGET = 0.7
"""Target of ``of_bandwidth`` for the 8B model at batches of 1 and 64."""


class Point(NamedTuple):
    """A batch size, and the number of tokens of each sequence."""

    batch: int
    context: int


def run(world: World) -> None:
    """Measures all batch sizes and contexts. Those with targets come first, because the time limit
    may be reached before the last measurement."""
    bandwidth = measure_bandwidth(world)
    world.record("bandwidth_gb_per_s", bandwidth / 1e9)
    for shape, part in (("8b", 0.65), ("1b", 0.95)):
        until = world.limit_s * (1 - part)
        loaded = world.shape(shape)
        for batch in (1, 4) if world.dry else BATCHES:
            contexts = _contexts(world, shape, loaded, batch)
            engine = _engine(world, loaded, batch, max(contexts), not world.dry)
            for context in contexts:
                if world.left_s < until:
                    world.record(f"{shape}_left_out", [batch, context], why="time limit")
                    continue
                _measure(world, shape, engine, Point(batch, context), bandwidth)
            del engine
        _modes(world, shape, loaded)
        del loaded


def measure_bandwidth(world: World) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    size = DRY_COPIED if world.dry else COPIED
    source = torch.empty(size, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return 2 * size / min(world.timed(lambda: target.copy_(source)) for _ in range(10))


def step_bytes(loaded: LoadedModel, point: Point) -> int:
    """Minimum number of bytes that a decode step reads: the weights of its matrix multiplications,
    the keys and the values. The input embedding counts only if it is also the output layer."""
    model = loaded.model
    weights = sum(p.nbytes for p in model.parameters())
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is not embeddings:
        weights -= embeddings.nbytes
    return weights + point.batch * point.context * token_bytes(loaded.layers, loaded.dtype)


def _contexts(world: World, shape: str, loaded: LoadedModel, batch: int) -> list[int]:
    """The context lengths for which the device has enough memory at this batch size."""
    if world.dry:
        return [32, 64]
    weights = sum(p.nbytes for p in loaded.model.parameters())
    total = torch.cuda.get_device_properties(0).total_memory
    found = []
    for context in CONTEXTS:
        size = _cache_bytes(loaded, batch, context)
        if size + weights <= MEMORY_PART * total:
            found.append(context)
        else:
            world.record(f"{shape}_left_out", [batch, context], why="no memory", gib=size / 2**30)
    return found


def _modes(world: World, shape: str, loaded: LoadedModel) -> None:
    """Records the time of a step without overlap, and of a step without graphs, as ratios to the
    usual time of a step. The batches have 1 and 64 sequences."""
    for batch in (1, 4) if world.dry else (1, 64):
        point = Point(batch, 32 if world.dry else 128)
        seconds = {}
        for name, overlap, graphs in (
            ("usual", not world.dry, True),
            ("no_overlap", False, True),
            ("no_graphs", not world.dry, False),
        ):
            engine = _engine(world, loaded, batch, point.context, overlap)
            if not graphs:
                disable_graphs(engine)
            seconds[name] = _step_seconds(world, engine, point)
            del engine
        ratios = {name: round(s / seconds["usual"], 3) for name, s in seconds.items()}
        world.record(f"{shape}_batch_{batch}_over_usual", ratios, seconds=seconds["usual"])


def _measure(world: World, shape: str, engine: Engine, point: Point, bandwidth: float) -> None:
    name = f"{shape}_batch_{point.batch}_context_{point.context}"
    seconds = _step_seconds(world, engine, point)
    part = step_bytes(engine.loaded, point) / bandwidth / seconds
    world.record(f"{name}_s", seconds, of_bandwidth=round(part, 3), tokens_s=point.batch / seconds)
    if not world.dry and shape == "8b" and point.context == 128 and point.batch in (1, 64):
        world.record(f"{name}_reaches_target", part >= TARGET, target=TARGET)


def _cache_bytes(loaded: LoadedModel, batch: int, context: int) -> int:
    """Bytes of a KV cache for ``batch`` + 1 sequences of ``context`` + 512 tokens."""
    return (context + 512) * (batch + 1) * token_bytes(loaded.layers, loaded.dtype)


def _engine(world: World, loaded: LoadedModel, batch: int, context: int, overlap: bool) -> Engine:
    if not world.dry:
        torch.cuda.empty_cache()
    size = _cache_bytes(loaded, batch, context)
    config = {"max_num_seqs": batch, "kv_cache_bytes": size, "overlap": overlap}
    return world.engine(loaded, max_num_batched_tokens=8192, **config)


def _step_seconds(world: World, engine: Engine, point: Point) -> float:
    """Seconds of a step in which all sequences decode."""
    steps, warm_ups = (2, 1) if world.dry else (STEPS, WARM_UPS)
    vocab = engine.loaded.vocab_size
    prompts = random_prompts(point.context, point.batch, point.context, vocab)
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, greedy(256))
    begun: set[int] = set()
    while len(begun) < point.batch:
        begun |= {output.request for output in engine.step()}
    for _ in range(warm_ups):
        engine.step()

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    seconds = world.timed(decode) / steps
    for number in range(point.batch):
        engine.abort(number)
    while engine.has_work:
        engine.step()
    return seconds
