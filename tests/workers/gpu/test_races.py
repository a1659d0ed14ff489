"""The draws of tokens: their distribution, and how seldom a small change of the logits changes a
draw."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from tokenbus.workers.gpu.sampling import races
from tokenbus.workers.gpu.sampling.races import (
    Draws,
    draw_tokens,
    keys,
    log_uniforms,
    step_of,
    streams,
)


def draws(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first: int = 0,
) -> Draws:
    """The parameters of ``count`` rows, each with its own seed."""
    zeros = np.zeros(count, dtype=np.int64)
    return Draws(
        streams(first + np.arange(count), zeros),
        np.full(count, temperature, dtype=np.float32),
        zeros + top_k,
        np.full(count, top_p, dtype=np.float32),
        np.full(count, min_p, dtype=np.float32),
    )


def draw(logits: torch.Tensor, of: Draws) -> torch.Tensor:
    """The token of each row at position 3. A single row of logits is used for all rows."""
    count = len(of.streams)
    return draw_tokens(logits.expand(count, -1), of, np.full(count, 3))


def numbers_of(count: int, size: int, first: int = 0) -> torch.Tensor:
    """The logarithms of ``size`` uniform numbers for each of ``count`` seeds."""
    zeros = np.zeros(count, dtype=np.int64)
    of = keys(streams(first + np.arange(count), zeros), zeros)
    return log_uniforms(of, step_of(torch.arange(size)))


def some_logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def kept_weights(logits: torch.Tensor, of: Draws) -> torch.Tensor:
    """The weights after top_k, top_p and min_p of row 0, computed by definition: float64
    ``[vocab]``; 0 for a removed token."""
    ordered = logits.sort(descending=True, stable=True)
    size = len(logits)
    p = torch.softmax(ordered.values.double() / float(of.temperature[0]), -1)
    p[int(of.top_k[0]) or size :] = 0
    if of.top_p[0] < 1:
        p[p.cumsum(-1) - p >= float(of.top_p[0]) * p.sum()] = 0
    p[p < float(of.min_p[0]) * p[0]] = 0
    return torch.zeros(size, dtype=torch.float64).scatter(0, ordered.indices, p)


def deviation(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How many standard deviations chi-square is above or below its expected value (Wilson,
    Hilferty 1931). Cells with an expected count below 10 are merged."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert not counts[expected == 0].any()
    rare = expected < 10
    cells = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    found = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)])
    found, cells = found[cells >= 10], cells[cells >= 10]
    free = len(cells) - 1
    square = float(((found - cells) ** 2 / cells).sum())
    return ((square / free) ** (1 / 3) - 1 + 2 / (9 * free)) / math.sqrt(2 / (9 * free))


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.5},
        {"min_p": 0.05},
        {"top_k": 20},
        {"top_k": 7, "temperature": 1.7},
        {"top_p": 0.9},
        {"top_p": 0.97, "temperature": 1.5},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [300, 1000])
def test_draws_follow_the_distribution(size: int, cuts: dict[str, float]) -> None:
    row = some_logits(1, size)
    row[0, ::7] = -math.inf
    of = draws(40_000, **cuts)  # type: ignore[arg-type]
    counts = torch.bincount(draw(row, of), minlength=size)
    assert abs(deviation(counts, kept_weights(row[0], of))) < 4


def test_tokens_of_little_probability_are_drawn_as_often_as_that() -> None:
    """4,095 tokens have a probability of one millionth each."""
    count, size, little = 200_000, 4096, 1e-6
    row = torch.full((1, size), math.log(little))
    row[0, 77] = math.log1p(-(size - 1) * little)
    found = torch.bincount(draw(row, draws(count)), minlength=size)
    found[77] = 0
    expected = (size - 1) * little * count
    assert abs(int(found.sum()) - expected) < 4 * math.sqrt(expected)
    # The position of a token in the row makes no difference.
    parts = found.unflatten(0, (64, 64))
    for sums in (parts.sum(0), parts.sum(1)):
        assert abs(deviation(sums, torch.ones(64))) < 4


def test_the_smallest_random_numbers_are_as_many_as_they_should_be() -> None:
    """The smallest numbers decide whether an unlikely token is drawn. A limit of their precision
    would show here."""
    times = torch.cat([-numbers_of(1000, 4000, first=1000 * i) for i in range(5)])
    count = times.numel()
    for below in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        expected = count * -math.expm1(-below)
        assert abs(int((times < below).sum()) - expected) < 4 * math.sqrt(expected)
    smallest = times[times < 1e-4].sort().values
    assert (smallest.diff() > 0).all()


def key_of(mixed: int, number: int = 0) -> np.ndarray:
    """The key whose random number with index ``number`` is ``mixed``, by inverting SplitMix64."""
    back, mask = mixed, 2**64 - 1
    back ^= back >> 31 ^ back >> 62
    back = back * pow(0x94D049BB133111EB, -1, 2**64) & mask
    back ^= back >> 27 ^ back >> 54
    back = back * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    back ^= back >> 30 ^ back >> 60
    back -= (number + 1) * 0x9E3779B97F4A7C15
    return np.array([back & mask], dtype=np.uint64).astype(np.int64)


def test_the_first_and_the_last_of_all_numbers() -> None:
    """No number leads to a division by 0. With the largest number, a token wins against a token
    that is 10^14 times as likely."""
    zero = torch.zeros(1, dtype=torch.long)
    assert log_uniforms(key_of(0), zero).item() == -math.inf
    assert -log_uniforms(key_of(2**64 - 1), zero).item() == 2.0**-53
    row = torch.tensor([[0.0, -32.0, -math.inf]])
    for mixed, token in ((2**64 - 1, 1), (2**63, 0), (0, 0)):
        drawn = races._from_likeliest(row, draws(1, top_k=2), key_of(mixed, 1))
        assert drawn.item() == token


def by_inversion(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The tokens at the places ``at`` in the cumulative probabilities. Earlier releases drew tokens
    in this way."""
    summed = torch.softmax(logits.double(), -1).cumsum(-1)
    return torch.searchsorted(summed, at * summed[-1], right=True)


def test_the_last_bits_of_logits_decide_a_handful_of_a_hundred_thousand_draws() -> None:
    size, rows, each = 32_000, 50, 2000
    generator = torch.Generator().manual_seed(1)
    changed = by_sum = 0
    for number in range(rows):
        row = some_logits(1, size, number)
        noisy = row * (1 + 1e-6 * torch.randn(1, size, generator=generator))
        of = draws(each, first=number * each)
        numbers = keys(of.streams, np.full(each, 3))
        weights = [races._probabilities(x, of).expand(each, -1) for x in (row, noisy)]
        pair = [races._race(x, numbers) for x in weights]
        if number == 0:
            assert torch.equal(pair[0][:100], draw(row, of.of(slice(100))))
        changed += int((pair[0] != pair[1]).sum())
        at = torch.rand(each, generator=generator, dtype=torch.float64)
        by_sum += int((by_inversion(row[0], at) != by_inversion(noisy[0], at)).sum())
    assert changed <= 5
    assert by_sum >= 50


@pytest.mark.parametrize("size", [50, 1000, 5003])
def test_a_row_is_drawn_the_same_in_any_batch(size: int) -> None:
    count = 150
    logits = some_logits(count, size)
    # Like those of a model in bfloat16, many logits are equal.
    logits[::2] = logits[::2].bfloat16().float()
    of = draws(count)
    random = np.random.default_rng(0)
    of = Draws(
        of.streams,
        random.choice([0.3, 1.0, 1.0, 2.0], count).astype(np.float32),
        random.choice([0, 0, 1, 5, 20, 700, 2**40], count),
        random.choice([1.0, 1.0, 0.5, 0.9, 0.999], count).astype(np.float32),
        random.choice([0.0, 0.0, 0.01], count).astype(np.float32),
    )
    together = draw(logits, of)
    alone = [draw(logits[i : i + 1], of.of(np.array([i]))) for i in range(count)]
    assert together.tolist() == [int(token) for token in alone]
    order = random.permutation(count)
    other = draw(logits[torch.from_numpy(order)], of.of(order))
    assert other.tolist() == together[torch.from_numpy(order)].tolist()


@pytest.mark.parametrize("size", [50, 1000, 10_007])
def test_the_fewest_tokens_that_reach_top_p_are_kept(size: int) -> None:
    """The number of kept tokens ranges from a few to nearly all. If two tokens are equally likely,
    the token with the lower id is kept."""
    shares, scales = (0.3, 0.9, 0.999, 1.0), (0.0, 0.5, 2.0)
    rows = torch.cat([some_logits(1, size, 5) * scale for scale in scales])
    logits = torch.cat([rows, (2 * rows).round() / 2]).repeat(len(shares), 1)
    of = draws(len(logits))
    of = dataclasses.replace(of, top_p=np.repeat(shares, 2 * len(scales)).astype(np.float32))
    weights = races._probabilities(logits, of)
    kept = races._keep_top_p(weights.clone(), of)
    for i, row in enumerate(logits):
        wanted = kept_weights(row, of.of(np.array([i])))
        assert torch.equal(kept[i] > 0, wanted > 0)
        assert torch.equal(kept[i], weights[i] * (wanted > 0))


@pytest.mark.parametrize("size", [10, 300, 4096, 40_010])
def test_of_equal_logits_the_lower_tokens_are_the_likelier(size: int) -> None:
    logits = some_logits(6, size).bfloat16().float()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[2, 3:] = -math.inf
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    for most in (1, 2, 5, 20, 130, size // 2, size):
        if most <= size:
            values, ids = races.likeliest(logits, most)
            assert torch.equal(ids, ordered.indices[:, :most])
            assert torch.equal(values, ordered.values[:, :most])


# --- random numbers -------------------------------------------------------------------------------


def test_numbers_are_those_of_splitmix64_on_any_device() -> None:
    """The expected numbers are the first outputs of the reference implementation for the seed
    1234567."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    state = np.int64(1234567) + np.arange(4) * races._GOLDEN
    got = races._mixed(state.copy())
    assert got.astype(np.uint64).tolist() == wanted
    assert races._mixed(torch.from_numpy(state.copy())).tolist() == got.tolist()
    uniform = log_uniforms(np.array([1234567]), step_of(torch.arange(4))).exp()[0]
    assert uniform.tolist() == pytest.approx([number / 2**64 for number in wanted])


def test_no_two_keys_are_equal() -> None:
    seeds, seqs, positions = (grid.ravel() for grid in np.mgrid[0:60, 0:20, 0:1000])
    assert len(np.unique(keys(streams(seeds, seqs), positions))) == len(seeds)
    large = np.array([2**63 - 1, 2**63 - 2, 2**64 - 1], dtype=np.uint64)
    assert len(set(keys(streams(large, large), np.arange(3)).tolist())) == 3


def test_neighbouring_numbers_are_independent() -> None:
    """Numbers are compared along seeds, sequences, positions and tokens, at several distances."""
    seeds, seqs, positions = (grid.ravel() for grid in np.mgrid[0:12, 0:12, 0:64])
    of = keys(streams(seeds, seqs), positions)
    numbers = log_uniforms(of, step_of(torch.arange(100))).exp()
    grid = numbers.reshape(12, 12, 64, 100)
    counts = torch.histc(numbers, bins=256, min=0, max=1)
    assert abs(deviation(counts, torch.ones(256))) < 4
    for axis in range(4):
        for apart in (1, 2, 5):
            length = grid.shape[axis] - apart
            one, other = grid.narrow(axis, 0, length), grid.narrow(axis, apart, length)
            for change in (lambda x: x, torch.log, lambda x: (x * 256).frac()):
                pair = torch.stack([change(one).ravel(), change(other).ravel()])
                assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.5 / math.sqrt(one.numel())


@pytest.mark.parametrize("vary", [0, 1, 2], ids=["seed", "sequence", "position"])
def test_a_token_says_nothing_of_the_next_one(vary: int) -> None:
    """Counts pairs of draws whose seed, sequence or position differs by one, with and without
    top_k. All 64 pairs are as frequent as independent draws."""
    count = 40_000
    columns = [np.full(count, 3), np.full(count, 2), np.full(count, 5)]
    columns[vary] = np.arange(count)
    row = torch.linspace(0, 1.5, 8).expand(count, -1)
    p = torch.softmax(row[0].double(), -1)
    for top_k in (0, 7):
        of = dataclasses.replace(draws(count, top_k=top_k), streams=streams(*columns[:2]))
        left = p * (torch.arange(8) >= (1 if top_k else 0))
        pairs = torch.outer(left, left).ravel()
        tokens = draw_tokens(row, of, columns[2])
        counts = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
        assert abs(deviation(counts, pairs)) < 4
