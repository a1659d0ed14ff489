"""On a GPU, the sampler takes a path with few launches. This path draws the same tokens as the path
for CPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.sampling import penalties, races, sampler
from tokenbus.workers.gpu.sampling.biases import Bias
from tokenbus.workers.gpu.sampling.row_parameters import Row, Rows

ROWS, VOCAB, STEPS = 12, 1000, 5
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "min_p": {"temperature": 0.9, "min_p": 0.1},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "presence": {"temperature": 0.8, "presence_penalty": 1.5},
    "rewards": {"repetition_penalty": 0.7},
    "bias": {"temperature": 0.8, "logit_bias": {3: 4.0, 7: -100.0}},
}


@pytest.fixture
def by_launches(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes the sampler treat tensors of the CPU like those of a device, until the patches are
    undone."""
    for module in (penalties, races, sampler):
        monkeypatch.setattr(module, "costs_launches", lambda tensor: True)
    return monkeypatch


def rows_of(mode: str, masks: str = "none", biased: bool = False) -> Rows:
    """Rows whose tokens are drawn in one mode, or in all modes in turn."""
    rng = np.random.default_rng(1)
    rows = []
    for i in range(ROWS):
        own = list(MODES)[i % len(MODES)] if mode == "mixed" else mode
        masked = masks == "all" or (masks == "some" and i % 2)
        words = rng.integers(0, 2**32, size=-(-VOCAB // 32), dtype=np.uint32)
        rows.append(
            Row(
                Sampling(**MODES[own]),
                seed=i,
                seq=i % 3,
                position=0,
                prompt=rng.integers(0, VOCAB, size=30).tolist(),
                generated=rng.integers(0, VOCAB, size=30).tolist(),
                mask=words if masked else None,
                bias=Bias(rng.normal(size=VOCAB).astype(np.float32)) if biased else None,
            )
        )
    return Rows.of(rows)


def tokens(rows: Rows) -> list[sampler.Sampled]:
    """The sampled tokens of ``STEPS`` steps."""
    found = []
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        # The rows have a gap between them, so that native code does not take them.
        logits = torch.randn(ROWS, VOCAB + 1, generator=generator)[:, :-1] * 3
        at = dataclasses.replace(rows, positions=rows.positions + step)
        found.append(sampler.draw(logits, None, at).fetch())
    return found


@pytest.mark.parametrize("masks", ["none", "some", "all"])
@pytest.mark.parametrize("mode", [*MODES, "mixed"])
def test_each_mode_draws_the_same_tokens(
    mode: str, masks: str, by_launches: pytest.MonkeyPatch
) -> None:
    found = tokens(rows_of(mode, masks))
    by_launches.undo()
    wanted = tokens(rows_of(mode, masks))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        assert ours.errors == theirs.errors == {}


def test_biases_draw_the_same_tokens(by_launches: pytest.MonkeyPatch) -> None:
    found = tokens(rows_of("mixed", "some", biased=True))
    by_launches.undo()
    wanted = tokens(rows_of("mixed", "some", biased=True))
    assert [step.tokens for step in found] == [step.tokens for step in wanted]


def test_a_mask_that_allows_nothing_is_an_error_of_its_row(
    by_launches: pytest.MonkeyPatch,
) -> None:
    rows = rows_of("temperature", "some")
    rows.masks[1] = np.zeros_like(rows.masks[1])
    assert tokens(rows)[0].errors == {1: sampler.NOTHING_ALLOWED}


def test_the_numbers_of_further_steps_are_those_of_each_step(
    by_launches: pytest.MonkeyPatch,
) -> None:
    rows = rows_of("temperature")
    tokens(rows)
    ahead = rows.parameters.draws.ahead
    assert ahead is not None
    assert len(ahead.logs) == races.MAX_AHEAD
    _, steps = races._competitors(VOCAB, torch.device("cpu"))
    for step in (0, 5, races.MAX_AHEAD - 1):
        positions = ahead.positions + step
        of = races.keys(rows.parameters.draws.streams, positions)
        found = ahead.at(positions)
        assert found is not None
        assert torch.equal(found, races.log_uniforms(of, steps))
    assert ahead.at(ahead.positions - 1) is None
    assert ahead.at(ahead.positions + races.MAX_AHEAD) is None
    assert ahead.at(ahead.positions + np.arange(ROWS)) is None


def test_equal_weights_at_the_limit_of_top_p_are_cut_alike(
    by_launches: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 2.0]).repeat(ROWS, VOCAB // 4)
    of = rows_of("top_p").parameters.draws
    weights = torch.softmax(logits, -1)
    found = races._keep_top_p(weights, of)
    by_launches.undo()
    assert torch.equal(found, races._keep_top_p(weights, of))


@pytest.mark.parametrize("temperature", [1e-38, 1e-43, 1e-300])
def test_a_temperature_near_zero_is_greedy(
    temperature: float, by_launches: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens(rows_of("greedy"))
    monkeypatch.setitem(MODES, "near zero", {"temperature": temperature})
    found = tokens(rows_of("near zero"))
    assert [step.tokens for step in found] == [step.tokens for step in wanted]
    assert all(step.errors == {} for step in found)
