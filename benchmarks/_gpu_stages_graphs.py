"""Stage 5 of ``gpu_check.py``: checks CUDA graphs, model loads during a capture, and evictions of
models."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _gpu_world import (
    CheckFailed,
    World,
    disable_graphs,
    greedy,
    random_prompts,
    run_to_end,
)
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cuda.graphs import SIZES, TOLERANCE
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.model.models import Failed, Models, Ready

DRY_SIZES = (1, 3, 8)
STEPS = 20
KEPT_BYTES = 64 * 2**20
"""Maximum number of bytes by which the allocated memory may grow over all loads and evictions. The
memory grows a little, because libraries allocate workspaces."""


def run(world: World) -> None:
    """Compares steps with and without graphs, then loads and evicts models."""
    loaded = world.small()
    _capture(world, loaded)
    _sizes(world, loaded)
    del loaded
    _load_during_capture(world)
    _evict(world)


def _capture(world: World, loaded: LoadedModel) -> None:
    """Records the time and the memory that the capture of each graph size takes."""
    marks: list[tuple[float, int]] = []

    def mark(part: float = 0.0, stage: str = "") -> None:
        marks.append((time.monotonic(), _reserved(world)))

    config = EngineConfig(max_num_seqs=SIZES[-1], kv_cache_bytes=world.cache_bytes)
    engine = Engine(loaded, config, on_progress=mark)
    mark()
    for size, (before, after) in zip(reversed(SIZES), pairwise(marks), strict=False):
        seconds, mib = after[0] - before[0], (after[1] - before[1]) / 2**20
        world.record(f"capture_{size}_s", seconds, mib=round(mib, 1))
    if not world.dry:
        world.expect(engine.path.graphs == len(SIZES), f"graphs: {engine.path.fallbacks}")


def _sizes(world: World, loaded: LoadedModel) -> None:
    """Compares the times and the logits of steps with and without graphs. For each graph size, one
    batch has this size, and another batch has one sequence less and is padded."""
    with_graphs, without = (
        world.engine(loaded, max_num_seqs=SIZES[-1], overlap=False) for _ in range(2)
    )
    disable_graphs(without)
    for size in DRY_SIZES if world.dry else SIZES:
        for batch in sorted({size, max(1, size - 1)}):
            _compare(world, with_graphs, without, batch, loaded.vocab_size)


def _compare(world: World, graphed: Engine, eager: Engine, batch: int, vocab: int) -> None:
    steps = 3 if world.dry else STEPS
    for number, prompt in enumerate(random_prompts(batch, batch, 30, vocab)):
        for engine in (graphed, eager):
            engine.add(number, prompt, greedy(steps + 3))
    firsts = [_first_tokens(engine) for engine in (graphed, eager)]
    pending = [engine.begin() for engine in (graphed, eager)]
    found, wanted = (_rows(step) for step in pending)
    same = [i for i in range(batch) if firsts[0].get(i) == firsts[1].get(i)]
    difference = (found[same] - wanted[same]).abs().max().item() / wanted.std().item()
    for engine, step in zip((graphed, eager), pending, strict=True):
        engine.finish(step)
    times = []
    for engine in (graphed, eager):
        times.append(world.timed(lambda engine=engine: _steps(engine, steps)) / steps)  # type: ignore[misc]
        run_to_end(engine)
    world.record(f"graph_{batch}_difference", difference, graph_s=times[0], eager_s=times[1])
    world.expect(
        difference <= TOLERANCE, f"the graph of {batch} rows: logits differ by {difference:.3g}"
    )


def _first_tokens(engine: Engine) -> dict[int, int | None]:
    """Runs steps until all sequences have their first token; returns these tokens."""
    found: dict[int, int | None] = {}
    while engine.stats()["waiting"] or not found:
        found |= {output.request: output.token for output in engine.step()}
    return found


def _rows(step: Any) -> torch.Tensor:
    """The logits of a step. The rows are sorted by request."""
    logits = step.logits
    if logits is None:
        raise CheckFailed("a decode step has no logits")
    order = [row for _, row in sorted((s.request, row) for s, row in step.rows.items())]
    rows: torch.Tensor = logits[order].clone()
    return rows


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _load_during_capture(world: World) -> None:
    """Loads models on another thread while graphs are captured."""
    loaded, done, loads = world.small(), threading.Event(), []

    def load() -> None:
        while not done.is_set():
            loads.append(world.embedded().name)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        engine = world.engine(loaded)
    finally:
        done.set()
        loader.join()
    world.record("loads_during_capture", len(loads))
    for fallback in engine.path.fallbacks if not world.dry else ():
        world.fault(f"after loads during the capture: {fallback}")
    engine.add(1, [1, 2, 3], greedy(8))
    run_to_end(engine)


def _evict(world: World) -> None:
    """Loads two models in turn. Only one may stay loaded (``max_models``), so each load evicts the
    other model. The memory of the evicted model must be freed."""
    gc.collect()
    _empty_cache(world)
    before = _allocated(world)
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        other = str(shutil.copytree(embedded.path(), Path(folder) / "other"))
        settings = Settings(
            device=world.device.type,
            allow=[other],
            max_models=1,
            max_running=16,
            kv_cache_bytes=world.cache_bytes,
        )
        models = Models(settings, lambda: None)
        gone: list[weakref.ref[Engine]] = []
        used: list[int] = []
        for name in ("embedded", other, "embedded", other):
            gone.append(_load(models, name))
            evicted = models.evict(())
            used.append(_allocated(world) - before)
            for reference in gone[:-1]:
                world.expect(reference() is None, f"the engine of {evicted} was not freed")
        models.close()
    world.record("bytes_with_one_model", used)
    world.expect(
        max(used) - used[0] <= KEPT_BYTES, f"an evicted model's memory was not freed: {used}"
    )


def _load(models: Models, name: str) -> weakref.ref[Engine]:
    """Loads a model as a worker does, and runs a short request. Returns a weak reference to the
    engine. With this reference, the caller checks that the engine is freed."""
    models.want(name)
    while not isinstance(event := models.events.get(), Ready | Failed):
        pass
    if isinstance(event, Failed):
        raise event.error
    models.loaded(event)
    event.engine.add(1, [1, 2, 3], greedy(4))
    run_to_end(event.engine)
    return weakref.ref(event.engine)


def _reserved(world: World) -> int:
    return 0 if world.dry else torch.cuda.memory_reserved()


def _allocated(world: World) -> int:
    return 0 if world.dry else torch.cuda.memory_allocated()


def _empty_cache(world: World) -> None:
    if not world.dry:
        torch.cuda.empty_cache()
