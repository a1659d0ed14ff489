"""Stage 3 of ``gpu_check.py``: checks that the device and the CPU sample the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from _gpu_world import World, no_waiting
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.sampling import races, sampler
from tokenbus.workers.gpu.sampling.biases import Bias
from tokenbus.workers.gpu.sampling.row_parameters import Row, Rows
from tokenbus.workers.gpu.sampling.sampler import Sampled, draw, guess, score

ROWS = 64
MAX_DIFFERENT = 1e-3
"""Maximum share of the tokens that may differ between the device and the CPU. Some tokens differ
because kernels sum in different orders."""
LOGPROB_TOLERANCE = 1e-4
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "temperature_1": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "all_cuts": {"temperature": 1.2, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "logit_bias": {"temperature": 0.0, "logit_bias": {1: 20.0, 7: -5.0}},
    "top_logprobs": {"temperature": 0.8, "top_logprobs": 5},
}


def run(world: World) -> None:
    """Samples in every mode from the same logits on the device and on the CPU."""
    vocabularies = (4096,) if world.dry else (4096, 32_000, 128_256)
    for vocab in vocabularies:
        steps = 2 if world.dry else 16
        for mode in (*MODES, "mixed", "masks", "masks_greedy", "biases"):
            different, total = 0, 0
            for step in range(steps):
                different += _different(world, mode, vocab, step)
                total += ROWS
            world.record(f"different_{mode}_{vocab}", different, of=total)
            world.expect(
                different <= MAX_DIFFERENT * total,
                f"{mode}, vocabulary {vocab}: {different} of {total} tokens differ from the CPU's",
            )
        _check_scores(world, vocab)


def _different(world: World, mode: str, vocab: int, step: int) -> int:
    """The number of rows for which the device and the CPU sample different tokens."""
    logits = _logits(vocab, step)
    rows = _rows(mode, vocab, step)
    which = [(i * 5) % ROWS for i in range(ROWS)]
    expected = draw(logits, which, rows).fetch()
    ours = _on_device(world, logits)
    with no_waiting(world), _path_of_the_device(world):
        drawn = draw(ours, which, rows)
        guessed = guess(ours, which, rows)
    world.synchronize()
    found = drawn.fetch()
    world.expect(
        found.tokens == guessed.tolist(),
        f"{mode}, {vocab} tokens: the guessed and the sampled token differ",
    )
    world.expect(found.errors == expected.errors, f"{mode}, {vocab} tokens: {found.errors}")
    _check_logprobs(world, mode, expected, found)
    return sum(a != b for a, b in zip(expected.tokens, found.tokens, strict=True))


@contextmanager
def _path_of_the_device(world: World) -> Iterator[None]:
    """Makes the sampler of a dry run execute the GPU's code path on the CPU."""
    if not world.dry:
        yield
        return
    before = races.costs_launches
    for module in (races, sampler):
        module.costs_launches = lambda tensor: True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in (races, sampler):
            module.costs_launches = before  # type: ignore[attr-defined]


def _check_logprobs(world: World, mode: str, expected: Sampled, found: Sampled) -> None:
    same = np.equal(expected.tokens, found.tokens)
    difference = np.abs(np.subtract(expected.logprobs, found.logprobs))[same].max(initial=0.0)
    world.expect(
        difference <= LOGPROB_TOLERANCE, f"{mode}: a log-probability differs by {difference:.3g}"
    )
    world.expect(
        expected.top.keys() == found.top.keys(),
        f"{mode}: the device and the CPU give top_logprobs for different rows",
    )


def _check_scores(world: World, vocab: int) -> None:
    logits, tokens = _logits(vocab, 0), [(i * 31) % vocab for i in range(ROWS)]
    expected, _ = score(logits, tokens, 3).fetch()
    ours = _on_device(world, logits)
    with no_waiting(world):
        scores = score(ours, tokens, 3)
    world.synchronize()
    found, _ = scores.fetch()
    difference = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    world.record(f"score_difference_{vocab}", difference)
    world.expect(
        difference <= LOGPROB_TOLERANCE, f"scores of {vocab} tokens differ by {difference:.3g}"
    )


def _logits(vocab: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, vocab, generator=generator) * 3


def _on_device(world: World, logits: torch.Tensor) -> torch.Tensor:
    """Copies logits to the device. In a dry run, the copy has gaps between its rows. torch accepts
    these gaps, but the native code for the CPU does not. So a dry run fails if it executes the
    native code instead of the GPU's code path."""
    if not world.dry:
        return logits.to(world.device)
    wide = torch.zeros(len(logits), logits.shape[1] + 1)
    wide[:, :-1] = logits
    return wide[:, :-1]


def _rows(mode: str, vocab: int, step: int) -> Rows:
    """The sampling parameters, masks and biases of the rows."""
    rng = random.Random(f"{mode} {step}")
    rows = []
    for i in range(ROWS):
        own = mode
        if mode == "mixed":
            own = rng.choice(list(MODES))
        fallback = {"temperature": 0.0 if mode == "masks_greedy" else 0.7}
        rows.append(
            Row(
                Sampling(**MODES.get(own, fallback)),
                seed=rng.randrange(2**63),
                seq=i % 3,
                position=step,
                prompt=[rng.randrange(vocab) for _ in range(20)],
                generated=[rng.randrange(vocab) for _ in range(20)],
                mask=_mask(rng, vocab) if own.startswith("masks") else None,
                bias=_bias(rng, vocab, dense=i % 2 == 0) if own == "biases" else None,
            )
        )
    return Rows.of(rows)


def _mask(rng: random.Random, vocab: int) -> np.ndarray | None:
    """A random mask in u32 words; None for some rows."""
    if rng.random() < 0.2:
        return None
    generator = np.random.default_rng(rng.randrange(2**31))
    words = generator.integers(0, 2**32, size=-(-vocab // 32), dtype=np.uint32)
    words[rng.randrange(len(words) - 1)] = 2**32 - 1
    return words


def _bias(rng: random.Random, vocab: int, dense: bool) -> Bias:
    generator = np.random.default_rng(rng.randrange(2**31))
    if dense:
        return Bias(generator.normal(size=vocab).astype(np.float32))
    tokens = np.sort(generator.choice(vocab, size=100, replace=False)).astype(np.int64)
    return Bias(generator.normal(size=100).astype(np.float32), tokens)
