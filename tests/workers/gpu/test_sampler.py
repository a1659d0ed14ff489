"""The sampler turns rows of logits into tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.sampling.races import SORTED
from tokenbus.workers.gpu.sampling.row_parameters import Row, Rows
from tokenbus.workers.gpu.sampling.sampler import draw, sample

VOCAB = 50


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, VOCAB) * 3


def row(seed: int = 0, position: int = 0, seq: int = 0, **fields: Any) -> Row:
    extra = {k: fields.pop(k) for k in ("prompt", "generated", "mask") if k in fields}
    return Row(Sampling(**fields), seed, seq, position, **extra)


def draws(values: torch.Tensor, count: int = 3000, **fields: Any) -> torch.Tensor:
    """The share of draws of each token, over ``count`` seeds."""
    rows = [
        row(seed=s, temperature=fields.get("temperature", 1.0), **_rest(fields))
        for s in range(count)
    ]
    tokens = sample(values, [0] * count, rows).tokens
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB).double() / count


def _rest(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k != "temperature"}


def test_greedy_takes_the_best_token_and_reports_its_log_probability() -> None:
    values = logits()
    got = sample(values, [0], [row()])
    best = int(values.argmax())
    assert got.tokens == [best]
    wanted = torch.log_softmax(values, -1)[0, best].item()
    assert got.logprobs[0] == pytest.approx(wanted, abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    values = logits()
    wanted = torch.softmax(values[0].double(), -1)
    assert (draws(values) - wanted).abs().max() < 0.03


def test_temperature_divides_the_logits() -> None:
    values = logits()
    wanted = torch.softmax(values[0].double() / 2.5, -1)
    assert (draws(values, temperature=2.5) - wanted).abs().max() < 0.03


def test_top_k_keeps_the_k_best() -> None:
    values = logits()
    seen = draws(values, temperature=3.0, top_k=4).nonzero().flatten().tolist()
    assert set(seen) == set(values[0].topk(4).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    values = logits() / 3
    ordered = torch.softmax(values[0], -1).sort(descending=True)
    count = int((ordered.values.cumsum(-1) < 0.8).sum()) + 1
    seen = draws(values, top_p=0.8).nonzero().flatten().tolist()
    assert set(seen) <= set(ordered.indices[:count].tolist())
    assert len(seen) > 1


def test_min_p_is_relative_to_the_best() -> None:
    values = logits()
    p = torch.softmax(values[0], -1)
    allowed = (p >= 0.2 * p.max()).nonzero().flatten().tolist()
    assert set(draws(values, min_p=0.2).nonzero().flatten().tolist()) <= set(allowed)


def test_bias_and_penalties_move_the_choice_but_not_the_reported_probability() -> None:
    values = logits()
    best, other = int(values.argmax()), 7
    plain = torch.log_softmax(values, -1)[0]
    biased = sample(values, [0], [row(logit_bias={other: 100.0})])
    assert biased.tokens == [other]
    assert biased.logprobs[0] == pytest.approx(plain[other].item(), rel=1e-4)
    forbidden = sample(values, [0], [row(logit_bias={best: -100.0})])
    assert forbidden.tokens != [best]
    penalties: list[dict[str, Any]] = [
        {"frequency_penalty": 50.0},
        {"presence_penalty": 50.0},
        {"repetition_penalty": 100.0},
    ]
    for penalty in penalties:
        assert sample(values, [0], [row(generated=[best], **penalty)]).tokens != [best]
    assert sample(values, [0], [row(prompt=[best], presence_penalty=50.0)]).tokens == [best]
    seen_in_prompt = row(prompt=[best], repetition_penalty=100.0)
    assert sample(values, [0], [seen_in_prompt]).tokens != [best]


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    values = torch.full((1, VOCAB), -50.0)
    values[0, 1], values[0, 2], values[0, 3] = 4.0, 2.5, -1.0
    assert sample(values, [0], [row(prompt=[1], repetition_penalty=2.0)]).tokens == [2]
    values[0, 1], values[0, 2] = -1.0, -1.5
    assert sample(values, [0], [row(prompt=[1, 3], repetition_penalty=2.0)]).tokens == [2]


@pytest.mark.parametrize("size", [VOCAB, 2 * SORTED])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"top_p": 1e-50}, 40),
        ({"top_p": 1e-50, "top_k": 5}, 40),
        ({"logit_bias": {5: 1e39}}, 5),
        ({"logit_bias": {5: math.inf, 6: 1e19}}, 5),
        ({"presence_penalty": -1e39}, 7),
        ({"repetition_penalty": 1e-60}, 7),
        ({"repetition_penalty": 1e60, "top_k": 1}, 40),
    ],
)
def test_numbers_beyond_float32_have_the_effect_of_large_ones(
    given: dict[str, Any], wanted: int, size: int
) -> None:
    values = torch.zeros(1, size)
    values[0, 40], values[0, 7] = 20.0, 1.0
    got = sample(values, [0], [row(temperature=1.0, generated=[7], **given)])
    assert (got.tokens, got.errors) == ([wanted], {})


def test_a_mask_holds_at_any_temperature() -> None:
    words = np.zeros(2, dtype=np.uint32)
    words[1] = 1 << 3
    got = sample(logits(), [0], [row(mask=words, temperature=1e39)])
    assert (got.tokens, got.errors) == ([35], {})


def test_a_mask_allows_exactly_its_bits() -> None:
    values = logits()
    words = np.zeros(2, dtype=np.uint32)
    words[1] = 1 << 3
    assert sample(values, [0], [row(mask=words)]).tokens == [35]


def test_a_mask_that_allows_nothing_and_nan_are_errors_of_their_rows_alone() -> None:
    values = logits(3)
    values[1] = math.nan
    rows = [row(mask=np.zeros(2, dtype=np.uint32)), row(), row()]
    got = sample(values, [0, 1, 2], rows)
    assert sorted(got.errors) == [0, 1]
    assert "forbid all tokens" in got.errors[0]
    assert "NaN" in got.errors[1]
    assert got.tokens[2] == int(values[2].argmax())


def test_a_row_is_sampled_the_same_in_any_batch() -> None:
    values = logits(8)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5, "logit_bias": {3: 2.0}},
        {},
    ]
    rows = [row(seed=i, position=3, **kinds[i % 4]) for i in range(8)]
    together = sample(values, list(range(8)), rows)
    alone = [sample(values[i : i + 1], [0], [rows[i]]) for i in range(8)]
    assert together.tokens == [a.tokens[0] for a in alone]
    assert together.logprobs == [a.logprobs[0] for a in alone]


def test_top_logprobs_are_the_best_and_the_chosen_one() -> None:
    values = logits()
    plain = torch.log_softmax(values, -1)[0]
    got = sample(values, [0], [row(top_logprobs=3, logit_bias={9: 100.0})]).top[0]
    assert set(got) == {*plain.topk(3).indices.tolist(), 9}
    assert got[9] == pytest.approx(plain[9].item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_rows_with_top_logprobs_are_searched_for_likely_tokens(dtype: torch.dtype) -> None:
    # The sampler has a separate implementation for float32 on a CPU.
    values = logits(4).to(dtype)
    asking = row(top_logprobs=3)
    drawn = draw(values, None, Rows.of([row(), row(), asking, row(temperature=1.0)]))
    assert drawn.likely is not None
    assert [tuple(found.shape) for found in drawn.likely] == [(1, 3), (1, 3)]
    [(at, top)] = drawn.fetch().top.items()
    assert at == 2
    assert top == pytest.approx(sample(values[2:3], [0], [asking]).top[0])
