"""Measures systems with 1, 2, 4 and 8 GPU workers. The GPUs are simulated (``_standin_gpu.py``)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from _models import llama_folder
from controllers import FORWARD_S, system
from tokenbus.clients import Client
from tokenbus.clients.request_options import GenerateOptions

SIZES = (1, 2, 4, 8)
CONTROLLERS = 2
CONSTRAINT: GenerateOptions = {"controller": "regex", "controller_arg": r"([a-z]{1,8} )*"}


def throughputs(steps: int, streams: int) -> dict[int, float]:
    """For each number of GPU workers: the tokens per second of the whole system. Each worker has
    ``streams`` streams. Half of the streams have a constraint."""
    with tempfile.TemporaryDirectory(prefix="tb-bench-") as name:
        model = llama_folder(Path(name) / "model", eos=False)
        found = {}
        for size in SIZES:
            out = Path(name) / "waits.json"
            gpu = [str(Path(__file__).parent / "_standin_gpu.py"), str(FORWARD_S), str(out)]
            with system(gpu, model, gpus=size, controllers=CONTROLLERS) as running:
                _tokens_per_s(running.client, streams * size, 8)
                found[size] = _tokens_per_s(running.client, streams * size, steps)
    return found


def _tokens_per_s(client: Client, streams: int, new: int) -> float:
    """Tokens per second of all streams together. The clock starts when each stream has its first
    token."""
    options: GenerateOptions = {"max_tokens": new, "ignore_eos": True, "timeout_s": 600}
    steered: GenerateOptions = {**options, **CONSTRAINT}
    begun = [
        client.generate([7 + i, 8, 9], **(steered if i % 2 else options)) for i in range(streams)
    ]
    iterators = [iter(stream) for stream in begun]
    for iterator in iterators:
        next(iterator)
    began = time.perf_counter()
    for iterator in iterators:
        for _ in iterator:
            pass
    return streams * (new - 1) / (time.perf_counter() - began)
