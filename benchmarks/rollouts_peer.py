"""Compares the sampling of rollouts with llama.cpp's server: the groups of ``rollouts.py``, without
updates and without kills.

Both sides have the embedded model, one process with two threads, and 64 rollouts at a time, each
with the log-probability of each token. Here, a group is one request over the bus. At llama.cpp's
server, it is a request for each sample, because the server's ``n`` computes the prompt for each
sample too. The sides run one after another; the figure is the median over the rounds of the ratio.
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
EACH = 12
"""Number of groups that each of the ``GROUPS`` tasks samples in a round, one after another."""
ROUNDS = 5

Sample = Callable[[list[int], int], Awaitable[None]]
"""Samples a group of a prompt with a seed."""


def on_bus(client: AsyncClient) -> Sample:
    """Samples over the bus."""

    async def sample(prompt: list[int], seed: int) -> None:
        stream = client.generate(
            prompt, n=SAMPLES, max_tokens=NEW, temperature=1.0, ignore_eos=True, seed=seed
        )
        samples = await stream.wait()
        assert all(len(one.tokens) == len(one.logprobs) == NEW for one in samples)

    return sample


def at_llamacpp(http: Http) -> Sample:
    """Samples at llama.cpp's server."""

    async def one(prompt: list[int], seed: int) -> None:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": NEW, "temperature": 1.0}
        body |= {"samplers": ["temperature"], "n_probs": 1, "ignore_eos": True, "seed": seed}
        answer = await http.post("/completion", body | {"return_tokens": True})
        assert len(answer["tokens"]) == NEW

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
) -> list[tuple[float, float]]:
    """The tokens per second of both sides, for each round."""
    each, rounds = (2, 2) if quick else (EACH, ROUNDS)
    found = []
    async with AsyncClient(system.front, patience_s=PATIENCE_S) as client:
        sides = on_bus(client), at_llamacpp(Http(peer.address))
        for number in range(-1, rounds):
            ours, theirs = [await tokens_per_s(side, prompts, each) for side in sides]
            if number >= 0:  # The first runs fill caches.
                found.append((ours, theirs))
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
            pairs = asyncio.run(measure(system, peer, prompts, given.quick))
    results = {
        "rollouts_vs_llamacpp": statistics.median(ours / theirs for ours, theirs in pairs),
        "tokens_per_s": statistics.median(ours for ours, _ in pairs),
        "llamacpp_tokens_per_s": statistics.median(theirs for _, theirs in pairs),
    }
    report(results, {"rollouts_vs_llamacpp": "at least 1.3"}, given.json)


if __name__ == "__main__":
    main()
