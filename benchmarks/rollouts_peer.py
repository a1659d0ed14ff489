"""Compares the sampling of rollouts with llama.cpp's server. The rollouts are the groups of
``rollouts.py``, without updates and without kills.

Both sides have the embedded model, one process with two threads, and 64 rollouts at a time. On the
bus, a group is one request, and its answer has the log-probability of each token. At llama.cpp's
server, each sample of a group is a separate request. This server is measured with
log-probabilities, which a trainer needs, and without log-probabilities. The sides run one after
another. A figure is the median of the ratios of all rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _llamacpp import HOW, SERVER, LlamaServer
from _programs_doors import Http
from _report import arguments, report
from _rollouts_system import GROUPS, NEW, PATIENCE_S, PROMPTS, SAMPLES, SETTINGS
from _served import System
from tokenbus.clients import AsyncClient
from tokenbus.workers.gpu.model.loader import load_model

CONTEXT = 128
"""Maximum number of tokens of a slot of llama.cpp's server."""
EACH = 4
"""Number of groups that each of the ``GROUPS`` tasks samples in a round, one after another."""
ROUNDS = 5

Sample = Callable[[list[int], int], Awaitable[None]]
"""Draws the samples of a group, from a prompt and a seed."""


def on_bus(client: AsyncClient) -> Sample:
    """Samples over the bus."""

    async def sample(prompt: list[int], seed: int) -> None:
        stream = client.generate(
            prompt, n=SAMPLES, max_tokens=NEW, temperature=1.0, ignore_eos=True, seed=seed
        )
        samples = await stream.wait()
        assert all(len(one.tokens) == len(one.logprobs) == NEW for one in samples)

    return sample


def at_llamacpp(http: Http, logprobs: bool) -> Sample:
    """Samples at llama.cpp's server."""

    async def one(prompt: list[int], seed: int) -> None:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": NEW, "temperature": 1.0}
        body |= {"samplers": ["temperature"], "ignore_eos": True, "seed": seed}
        answer = await http.post(
            "/completion", body | {"n_probs": int(logprobs), "return_tokens": True}
        )
        assert len(answer["tokens"]) == NEW
        assert len(answer.get("completion_probabilities", ())) == NEW * logprobs

    async def sample(prompt: list[int], seed: int) -> None:
        await asyncio.gather(*(one(prompt, SAMPLES * seed + i) for i in range(SAMPLES)))

    return sample


async def tokens_per_s(sample: Sample, prompts: list[list[int]], each: int) -> float:
    """Runs ``GROUPS`` tasks with ``each`` groups; returns the sampled tokens per second."""

    async def run(task: int) -> None:
        for number in range(each):
            await sample(prompts[(task + number) % len(prompts)], each * task + number)

    began = time.perf_counter()
    await asyncio.gather(*(run(task) for task in range(GROUPS)))
    return GROUPS * each * SAMPLES * NEW / (time.perf_counter() - began)


async def measure(
    system: System, peer: LlamaServer, prompts: list[list[int]], quick: bool
) -> list[tuple[float, ...]]:
    """The tokens per second of each round: over the bus, and at llama.cpp's server with and without
    log-probabilities."""
    each, rounds = (2, 2) if quick else (EACH, ROUNDS)
    found = []
    async with AsyncClient(system.front, patience_s=PATIENCE_S) as client:
        http = Http(peer.address)
        sides = on_bus(client), at_llamacpp(http, True), at_llamacpp(http, False)
        for number in range(-1, rounds):
            speeds = [await tokens_per_s(side, prompts, each) for side in sides]
            if number >= 0:  # The first runs fill caches.
                found.append(tuple(speeds))
    return found


def main() -> None:
    """Measures and reports."""
    given = arguments(__doc__)
    if not SERVER.exists():
        raise SystemExit(HOW)
    loaded = load_model("embedded")
    prompts = [loaded.tokenizer.encode(text) for text in PROMPTS]
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        model = folder / "model"
        loaded.model.save_pretrained(model)
        loaded.tokenizer.save_pretrained(model)
        with (
            System(folder / "run", Path("embedded"), threads="2", **SETTINGS) as system,
            LlamaServer(folder / "peer", model, GROUPS * SAMPLES, CONTEXT) as peer,
        ):
            system.wait(PATIENCE_S)
            peer.wait()
            rounds = asyncio.run(measure(system, peer, prompts, given.quick))
    bus, llamacpp, plain = [statistics.median(speeds) for speeds in zip(*rounds, strict=True)]
    results = {
        "rollouts_vs_llamacpp": statistics.median(ours / theirs for ours, theirs, _ in rounds),
        "vs_llamacpp_without_logprobs": statistics.median(a / b for a, _, b in rounds),
        "tokens_per_s": bus,
        "llamacpp_tokens_per_s": llamacpp,
        "llamacpp_without_logprobs_tokens_per_s": plain,
    }
    report(results, {"rollouts_vs_llamacpp": "at least 1.3"}, given.json)


if __name__ == "__main__":
    main()
