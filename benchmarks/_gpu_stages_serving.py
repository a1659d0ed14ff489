"""Stage 7 of ``gpu_check.py``: profiles decode steps, and measures prompts and the bus."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _gpu_world import World, greedy, random_prompts, run_to_end
from _models import llama_folder
from _served import Loader, System
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.loader import LoadedModel
from torch.profiler import ProfilerActivity, profile

PROFILED = 5
"""Number of decode steps in the profile."""
ROWS = 25
"""Number of kernels to record. The kernels that take the most time are recorded."""
REGEX = {"controller": "regex", "controller_arg": r"([a-z]{1,8} )*"}
TARGET = 0.98
"""Target for tokens per second with a constraint, divided by tokens per second without a
constraint. Both are measured through the bus."""
ROUNDS = 3
LOG_CHARACTERS = 4000
"""If the system fails, this number of characters at the end of its log is recorded."""


def run(world: World) -> None:
    """Profiles and times a model of 8 billion parameters, then serves a model through the bus."""
    loaded = world.shape("8b")
    batch = 2 if world.dry else 64
    size = 2**26 if world.dry else 16 * 2**30
    engine = world.engine(loaded, kv_cache_bytes=size, max_num_seqs=batch + 4)
    _profile(world, engine, loaded, batch)
    _first_tokens(world, engine, loaded)
    _mixed_prefill(world, engine, loaded, batch)
    del engine, loaded
    if not world.dry:
        torch.cuda.empty_cache()
    _bus(world)


def _profile(world: World, engine: Engine, loaded: LoadedModel, batch: int) -> None:
    """Records the kernels of some decode steps, sorted by time."""
    _begin(engine, loaded, batch)
    activities = [ProfilerActivity.CPU]
    if not world.dry:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        for _ in range(PROFILED):
            engine.step()
        world.synchronize()
    _end(engine, batch)
    times = [(_microseconds(event), event.count, event.key) for event in found.key_averages()]
    for micros, count, name in sorted(times, reverse=True)[:ROWS]:
        if micros:
            world.record(f"kernel {name[:80]}", micros / PROFILED, calls=count / PROFILED)


def _microseconds(event: Any) -> float:
    """The time of a kernel in microseconds. Without a GPU: the time of an operation on the CPU,
    without the operations that it calls."""
    of_device = float(getattr(event, "self_device_time_total", 0.0))
    return of_device or float(event.self_cpu_time_total if not torch.cuda.is_available() else 0.0)


def _first_tokens(world: World, engine: Engine, loaded: LoadedModel) -> None:
    """Records the seconds to the first token of a single prompt."""
    for length in (16, 64) if world.dry else (128, 1024, 8192, 32_000):
        times = []
        for seed in range(1 if world.dry else 3):
            [prompt] = random_prompts(1000 * length + seed, 1, length, loaded.vocab_size)
            engine.add(0, prompt, greedy(1))
            times.append(world.timed(lambda: run_to_end(engine)))
        world.record(f"first_token_{length}_s", min(times), tokens_s=length / min(times))


def _mixed_prefill(world: World, engine: Engine, loaded: LoadedModel, batch: int) -> None:
    """Records the step times of a decoding batch during the prefill of a long prompt."""
    _begin(engine, loaded, batch)
    alone = [world.timed(engine.step) for _ in range(3 if world.dry else 20)]
    length = 200 if world.dry else 16_000
    [prompt] = random_prompts(5, 1, length, loaded.vocab_size)
    engine.add(batch, prompt, greedy(1))
    times, ended = [], False
    while not ended:
        began = time.perf_counter()
        ended = any(output.request == batch for output in engine.step())
        times.append(time.perf_counter() - began)
    _end(engine, batch)
    world.record("decode_step_s", statistics.median(alone), batch=batch)
    world.record("mixed_step_s", statistics.median(times), prompt=length, steps=len(times))


def _begin(engine: Engine, loaded: LoadedModel, batch: int) -> None:
    """Adds requests, and runs steps until all requests decode."""
    for number, prompt in enumerate(random_prompts(1, batch, 100, loaded.vocab_size)):
        engine.add(number, prompt, greedy(500))
    begun: set[int] = set()
    while len(begun) < batch:
        begun |= {output.request for output in engine.step()}
    for _ in range(5):
        engine.step()


def _end(engine: Engine, batch: int) -> None:
    for number in range(batch):
        engine.abort(number)
    while engine.has_work:
        engine.step()


def _bus(world: World) -> None:
    """Records tokens per second of streams through the bus, without and with a regex."""
    streams, tokens = (2, 20) if world.dry else (64, 400)
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        model = embedded.path() if world.dry else llama_folder(folder / "llama", eos=False)
        device = world.device.type
        size = world.cache_bytes if world.dry else 8 * 2**30
        settings = {"device": device, "speculation": "off", "kv_cache_bytes": str(size)}
        worker = [str(Path(__file__).parent / "_gpu_worker.py")]
        gpu = ("-m", "tokenbus.workers.gpu") if world.dry else worker
        try:
            with System(folder / "run", model, gpu, steered=True, **settings) as system:
                system.wait()
                with Loader("_serving_client.py", "count", system.front, str(model)) as client:
                    _rounds(world, client, streams, tokens)
        except SystemExit:
            # The log is deleted with its folder.
            world.record("log", (folder / "run" / "log").read_text()[-LOG_CHARACTERS:])
            raise


def _rounds(world: World, client: Loader, streams: int, tokens: int) -> None:
    """Runs streams without and with the regex in turn. The first round warms up."""
    ratios = []
    for number in range(1 + (1 if world.dry else ROUNDS)):
        found = {}
        for kind, options in (("free", {}), ("constrained", REGEX)):
            prompts = random_prompts(number, streams, 8, 4000)
            answer = client.run(prompts=prompts, tokens=tokens, options=options)
            found[kind] = answer["middle"]
        if number:
            ratios.append(found["constrained"] / found["free"])
            world.record("bus_tokens_s", found["free"], constrained=found["constrained"])
    middle = statistics.median(ratios)
    world.record("constrained_over_free", middle, target=TARGET)
