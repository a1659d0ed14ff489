"""Which tokens are a tie, for tests that compare runs with different kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling

from . import shapes
from .ties import Asked

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return shapes.tiny_model()


def likeliest(model: Any) -> tuple[int, int, float]:
    """The two likeliest tokens after the prompt, and the difference of their logits."""
    values, ids = torch.topk(shapes.logits_after(model, PROMPT), 2)
    first, second = ids.tolist()
    return first, second, (values[0] - values[1]).item()


@pytest.mark.parametrize(("closer", "tied"), [(0.0, False), (1e-5, True), (1e-2, False)])
def test_greedy_tokens_are_a_tie_if_their_biased_logits_are_close(
    model: Any, closer: float, tied: bool
) -> None:
    a, b, gap = likeliest(model)
    bias = {b: gap - closer} if closer else {}
    asked = Asked(model, PROMPT, Sampling(max_tokens=9, logit_bias=bias))
    known = len(shapes.ties)
    assert asked.tied([], 0, a, b) is tied
    del shapes.ties[known:]


def test_a_drawn_token_and_another_are_seldom_a_tie(model: Any) -> None:
    found = []
    known = len(shapes.ties)
    for seed in range(50):
        asked = Asked(model, PROMPT, Sampling(max_tokens=9, temperature=1.0, seed=seed))
        found.append(asked.tied([], 0, 5, 6))
    assert not any(found)
    del shapes.ties[known:]
