"""Compares the engine's decoding speed on a GPU with transformers and with the memory bandwidth.

The model has the shape of Llama 3 8B, with random weights in bfloat16. The program prints the
attention backend, the number of CUDA graphs and each figure on standard error as soon as they are
known. Without a CUDA device, the program prints a message and ends.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from typing import Any

import torch
from _models import llama
from _report import arguments, report
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from transformers import GenerationConfig

VOCAB = 128_256
PROMPT, NEW = 128, 128
CACHE_BYTES = 16 * 2**30


def make_model() -> Any:
    """A model with the shape of Llama 3 8B. Its random weights are made on the device."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = llama(
            vocab_size=VOCAB,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=8192,
            num_key_value_heads=8,
        )
    torch.set_default_dtype(torch.float32)
    return model


def bandwidth() -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * source.numel() / min(times)


def make_engine(loaded: LoadedModel, overlap: bool = True) -> Engine:
    """An engine with a worker's settings. Steps overlap on a GPU unless ``overlap`` is False."""
    config = EngineConfig(max_num_seqs=512, kv_cache_bytes=CACHE_BYTES, overlap=overlap)
    return Engine(loaded, config)


def step_seconds(
    loaded: LoadedModel, batch: int, *, graphs: bool = True, overlap: bool = True
) -> float:
    """The mean time of a decode step of ``batch`` sequences, in seconds."""
    rng = random.Random(1)
    engine = make_engine(loaded, overlap)
    if not graphs:
        engine._runner.drop_graphs()
    for number in range(batch):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT)]
        engine.add(number, prompt, Sampling(max_tokens=1000, ignore_eos=True))
    for _ in range(30):
        engine.step()
    started = time.perf_counter()
    for _ in range(100):
        engine.step()
    return (time.perf_counter() - started) / 100


def limit_seconds(loaded: LoadedModel, batch: int, bytes_per_s: float) -> float:
    """Minimum time of a decode step in seconds: the time to read the weights and the KV cache once,
    at the bandwidth ``bytes_per_s``."""
    model = loaded.model
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    per_token = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in loaded.layers.values()) * 2
    return float((weights + batch * (PROMPT + 80) * per_token) / bytes_per_s)


def throughput(loaded: LoadedModel, batch: int) -> tuple[float, float]:
    """Tokens per second of our engine and of transformers' continuous batching."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
    engine = make_engine(loaded)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, Sampling(max_tokens=NEW, ignore_eos=True))
    while engine.has_work:
        engine.step()
    ours = batch * NEW / (time.perf_counter() - started)
    del engine
    torch.cuda.empty_cache()
    model = loaded.model
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=NEW)
    started = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=config)
    return ours, batch * NEW / (time.perf_counter() - started)


NOTES = {
    "fast_attention": "1 if FlashAttention reads the blocks in place, otherwise 0",
    "graphs": "number of captured CUDA graphs; at most 15",
    "decode1_of_limit": "minimum time of a step at the measured memory bandwidth, divided by the "
    "step's measured time; batch of 1; at least 0.6",
    "decode64_of_limit": "decode1_of_limit for a batch of 64; at least 0.6",
    "throughput256_vs_generate_batch": "the engine's tokens/s, divided by tokens/s of "
    "transformers' generate_batch(); batch of 256; at least 1.5",
    "graphs_vs_eager_1": "time of a step without CUDA graphs, divided by the time with them; "
    "batch of 1",
    "graphs_vs_eager_64": "graphs_vs_eager_1 for a batch of 64",
    "overlap_vs_in_turn_1": "time of a step without overlap, divided by the time with overlap; "
    "batch of 1",
    "overlap_vs_in_turn_64": "overlap_vs_in_turn_1 for a batch of 64",
}


class Results(dict[str, float]):
    """The figures. Each figure is printed when it is set."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value)
        say(f"{name} {value:,.4g}")


def say(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def describe(loaded: LoadedModel, results: Results) -> None:
    """Prints the attention backend, the number of CUDA graphs, and the reasons for which a faster
    path is not used."""
    path = make_engine(loaded).path
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: {path.attention}")
    for fallback in path.fallbacks:
        say(f"slower than possible: {fallback}")
    results["fast_attention"] = float(path.attention.startswith("FlashAttention"))
    results["graphs"] = path.graphs


def main() -> None:
    """Runs all measurements and reports the figures."""
    args = arguments(__doc__)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if not torch.cuda.is_available():
        print(
            "{}" if args.json else "nothing was measured, because torch does not find a CUDA device"
        )
        return
    loaded = wrap_model("llama-3-8b shape", make_model())
    results = Results()
    describe(loaded, results)
    speed = bandwidth()
    results["bandwidth_gb_per_s"] = speed / 1e9
    for batch in (1, 64):
        usual = step_seconds(loaded, batch)
        results[f"decode{batch}_ms"] = 1000 * usual
        results[f"decode{batch}_of_limit"] = limit_seconds(loaded, batch, speed) / usual
        results[f"graphs_vs_eager_{batch}"] = step_seconds(loaded, batch, graphs=False) / usual
        in_turn = step_seconds(loaded, batch, overlap=False)
        results[f"overlap_vs_in_turn_{batch}"] = in_turn / usual
    ours, theirs = throughput(loaded, 256)
    results["tokens_per_s_256"] = ours
    results["throughput256_vs_generate_batch"] = ours / theirs
    report(results, NOTES, args.json)


if __name__ == "__main__":
    main()
