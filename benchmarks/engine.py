"""Compares the engine with transformers on this machine: with ``generate``, and with transformers'
continuous batching.

The model is a Llama with 21 million random parameters, and sampling is greedy. Everything runs in
one process. Other work on the machine can only slow a run. So each time is the minimum over several
runs. There are two exceptions: transformers runs the requests of different lengths only once, and
the results of ``prefixes`` and ``host_time`` are medians.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _models import VOCAB, llama
from _report import arguments, report
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from transformers import GenerationConfig

BATCH = 32
Prompts = list[list[int]]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """``count`` random token ids."""
    return [rng.randrange(VOCAB) for _ in range(count)]


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_in_turn(runs: int, *works: Callable[[], object]) -> list[float]:
    """The minimum time of each function in ``works``, in seconds. The functions run in turn, so
    that other load affects all of them."""
    times = [[timed(work) for work in works] for _ in range(runs)]
    return [min(column) for column in zip(*times, strict=True)]


# --- transformers ---------------------------------------------------------------------------------


def generate(model: Any, prompts: Prompts, new: int) -> None:
    """Runs transformers' ``generate`` on one static batch. The prompts are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )


def generate_static(model: Any, prompts: Prompts, new: Sequence[int]) -> None:
    """Runs ``generate`` on static batches of 32 requests. A batch runs until its longest request
    has ended."""
    for i in range(0, len(prompts), BATCH):
        generate(model, prompts[i : i + BATCH], max(new[i : i + BATCH]))


def generate_continuous(model: Any, prompts: Prompts, new: Sequence[int]) -> None:
    """Runs transformers' continuous batching. Each request has its own length."""
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for prompt, count in zip(prompts, new, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
        done = 0
        while done < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(
                    "transformers' continuous batching did not return a result within a minute"
                )
            if result.error is not None:
                raise RuntimeError(result.error)
            done += result.is_finished()


# --- our engine -----------------------------------------------------------------------------------


class Ours:
    """Our engine. It has a copy of the model that transformers runs."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.engine = Engine(loaded, EngineConfig(kv_cache_bytes=512 * 2**20))
        self._next = 0

    def add(self, prompt: list[int], new: int) -> int:
        """Adds a request; returns its number."""
        self._next += 1
        self.engine.add(self._next, prompt, Sampling(max_tokens=new, ignore_eos=True))
        return self._next

    def run(self, prompts: Prompts, new: Sequence[int]) -> None:
        """Runs requests to their ends. For a fair comparison, the prompts must not be in the prefix
        cache."""
        for prompt, count in zip(prompts, new, strict=True):
            self.add(prompt, count)
        sampled = 0
        while self.engine.has_work:
            sampled += len(self.engine.step())
        assert sampled == sum(new)

    def ttft(self, prompt: list[int]) -> float:
        """Seconds from the request to its first token."""
        self.add(prompt, 1)
        started = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - started


def against_generate(model: Any, ours: Ours, runs: int) -> dict[str, float]:
    """Our engine's tokens per second, divided by transformers' tokens per second. One figure is for
    requests of equal lengths, and two are for requests of different lengths."""
    rng = random.Random(1)

    def uniform_set() -> Prompts:
        return [random_tokens(rng, 32) for _ in range(BATCH)]

    sets = iter([uniform_set() for _ in range(2 * runs + 2)])
    ours.run(next(sets), [64] * BATCH)
    generate(model, next(sets), 64)
    theirs, mine = best_in_turn(
        runs,
        lambda: generate(model, next(sets), 64),
        lambda: ours.run(next(sets), [64] * BATCH),
    )
    results = {"uniform_vs_generate": theirs / mine, "uniform_tokens_per_s": 64 * BATCH / mine}
    lengths = [rng.randrange(16, 513) for _ in range(64)]
    new = [rng.randrange(16, 257) for _ in range(64)]
    ragged = [[random_tokens(rng, n) for n in lengths] for _ in range(2)]
    continuous, static = best_in_turn(
        1,
        lambda: generate_continuous(model, ragged[0], new),
        lambda: generate_static(model, ragged[0], new),
    )
    mine = min(timed(partial(ours.run, p, new)) for p in ragged)
    results["ragged_vs_generate_batch"] = continuous / mine
    results["ragged_vs_generate"] = static / mine
    results["ragged_tokens_per_s"] = sum(new) / mine
    return results


def one_stream(model: Any, ours: Ours, runs: int) -> dict[str, float]:
    """For a single request: our engine's tokens per second, divided by the tokens per second of
    ``generate``."""
    rng = random.Random(7)
    prompts = iter([[random_tokens(rng, 32)] for _ in range(2 * runs + 2)])
    ours.run(next(prompts), [64])
    generate(model, next(prompts), 64)
    theirs, mine = best_in_turn(
        runs,
        lambda: generate(model, next(prompts), 64),
        lambda: ours.run(next(prompts), [64]),
    )
    return {"one_stream_vs_generate": theirs / mine, "one_stream_tokens_per_s": 64 / mine}


def prefixes(ours: Ours, runs: int) -> dict[str, float]:
    """Measures the time to the first token of prompts with 1,508 tokens. Returns this time if 1,500
    tokens are cached, divided by this time if no token is cached."""
    rng = random.Random(2)
    ratios = []
    for _ in range(runs):
        shared = random_tokens(rng, 1500)
        cold = ours.ttft([*shared, *random_tokens(rng, 8)])
        warm = min(ours.ttft([*shared, *random_tokens(rng, 8)]) for _ in range(3))
        ratios.append(warm / cold)
    return {"prefix_ttft_ratio": statistics.median(ratios)}


def forks(ours: Ours, runs: int) -> dict[str, float]:
    """Makes 7 forks of a sequence with a prompt of 512 tokens. Returns the time of one fork, and
    the number of used KV blocks one step after the forks, divided by the number before the
    forks."""
    rng = random.Random(3)
    engine = ours.engine
    times = []
    for _ in range(runs):
        request = ours.add(random_tokens(rng, 512), 50)
        engine.step()
        engine.step()
        one = engine.stats()["kv_blocks_used"]
        times.append(timed(partial(engine.fork, request, 0, 7)) / 7)
        engine.step()
        eight = engine.stats()["kv_blocks_used"]
        engine.abort(request)
        engine.step()
    return {"fork8_kv_blocks": eight / one, "fork_us": 1e6 * min(times)}


def splices(ours: Ours, runs: int) -> dict[str, float]:
    """The time to append 32 tokens by a splice, divided by the time to decode 32 tokens."""
    rng = random.Random(4)
    engine = ours.engine
    decoded, spliced = [], []
    for _ in range(runs):
        request = ours.add(random_tokens(rng, 64), 400)
        engine.step()

        def decode() -> None:
            for _ in range(32):
                engine.step()

        known = random_tokens(rng, 32)

        def splice(request: int = request, known: list[int] = known) -> None:
            engine.splice(request, 0, 0, known)
            engine.step()

        decoded.append(timed(decode))
        spliced.append(timed(splice))
        engine.abort(request)
    return {"splice_vs_decode": min(spliced) / min(decoded)}


def host_time(ours: Ours, steps: int) -> dict[str, float]:
    """Measures the host's time for a step of 32 sequences. The forward is replaced by constant
    logits, so this is the time for scheduling, packing, sampling and results. Returns this time in
    microseconds, and this time divided by the time of a forward. The forward's time is
    measured in additional steps, before and after the steps without a forward."""
    rng = random.Random(5)
    engine = ours.engine
    requests = [ours.add(random_tokens(rng, 32), 4000) for _ in range(BATCH)]
    for _ in range(5):
        engine.step()
    runner: Any = engine._runner
    forward, logits = runner.backend.forward, torch.randn(BATCH, VOCAB)
    forwards: list[float] = []

    def timed_forward(*inputs: Any) -> Any:
        started = time.perf_counter()
        output = forward(*inputs)
        forwards.append(time.perf_counter() - started)
        return output

    def forward_steps() -> None:
        runner.backend.forward = timed_forward
        for _ in range(steps // 10):
            engine.step()

    forward_steps()
    runner.backend.forward = lambda *_: logits
    times = [timed(engine.step) for _ in range(steps)]
    runner.forget_mirrors()  # The steps without a forward did not write keys and values.
    forward_steps()
    runner.backend.forward = forward
    for request in requests:
        engine.abort(request)
    host = statistics.median(times)
    return {"host_us_per_step": 1e6 * host, "host_vs_forward": host / statistics.median(forwards)}


def compiled(loaded: LoadedModel, runs: int) -> dict[str, float]:
    """The number of steps per second with torch.compile, divided by the number without
    torch.compile. 32 sequences decode."""
    rng = random.Random(6)
    times = []
    for through in (False, True):
        engine = Engine(loaded, EngineConfig(kv_cache_bytes=256 * 2**20, compiled=through))
        for number in range(BATCH):
            engine.add(number, random_tokens(rng, 32), Sampling(max_tokens=900, ignore_eos=True))
        for _ in range(20):
            engine.step()
        times.append(min(timed(engine.step) for _ in range(20 * runs)))
    return {"compiled_vs_eager": times[0] / times[1]}


NOTES = {
    "uniform_vs_generate": "the engine's tokens/s, divided by tokens/s of transformers' "
    "generate(); 32 requests with 64 new tokens; at least 1.0",
    "one_stream_vs_generate": "the engine's tokens/s, divided by tokens/s of transformers' "
    "generate(); one request with 64 new tokens; at least 1.5",
    "ragged_vs_generate_batch": "the engine's tokens/s, divided by tokens/s of transformers' "
    "continuous batching; 64 requests with prompts of 16 to 512 tokens and 16 to 256 new tokens; "
    "at least 2.5",
    "ragged_vs_generate": "the engine's tokens/s, divided by tokens/s of transformers' "
    "generate() with static batches of 32; requests of ragged_vs_generate_batch; at least 1.5",
    "prefix_ttft_ratio": "time to the first token if 1,500 prompt tokens are cached, divided by "
    "this time if no token is cached; at most 0.1",
    "fork8_kv_blocks": "KV blocks of a sequence and its 7 forks, divided by KV blocks of the "
    "sequence alone; prompt of 512 tokens; at most 1.3",
    "fork_us": "microseconds of a fork, without a forward",
    "splice_vs_decode": "time to append 32 tokens by a splice, divided by the time to decode 32 "
    "tokens; at most 0.2",
    "host_us_per_step": "microseconds of a step of 32 sequences, without the forward; at most "
    "1,500",
    "host_vs_forward": "host_us_per_step divided by the time of the forward",
    "compiled_vs_eager": "decode steps/s with torch.compile, divided by decode steps/s without "
    "it; batch of 32",
}


def main() -> None:
    """Runs all measurements and reports the figures."""
    args = arguments(__doc__)
    runs = 2 if args.quick else 5
    # The engine needs its own copy of the model, because the engine changes the layout of the
    # weights.
    model = llama()
    ours = Ours(wrap_model("bench", llama()))
    results = against_generate(model, ours, runs)
    results |= one_stream(model, ours, runs)
    results |= prefixes(ours, runs)
    results |= forks(ours, runs)
    results |= splices(ours, runs)
    results |= host_time(ours, 50 * runs)
    results |= compiled(ours.loaded, runs)
    report(results, NOTES, args.json)


if __name__ == "__main__":
    main()
