"""The sampling of a row gives equal bits alone and in a batch, whatever the other rows request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Query, Sampling
from tokenbus.workers.gpu.model.cpu_native.library import library
from tokenbus.workers.gpu.sampling.distributions import TokenOptions
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import sample, score

pytestmark = pytest.mark.skipif(
    library() is None, reason="no native code was compiled for this machine"
)
SIZES = (500, 4096, 131_072)
"""Sizes of vocabularies: not a multiple of ``races.PART``, a multiple, and so large that torch
divides a row among threads."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Gives torch two threads, so that it may divide a row among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.4]),
        top_p=st.sampled_from([1.0, 0.9, 0.5]),
        top_k=st.sampled_from([0, 5, 40]),
        min_p=st.sampled_from([0.0, 0.02]),
        top_logprobs=st.sampled_from([0, 0, 3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
    )


@settings(max_examples=15, deadline=None)
@given(
    of=st.lists(samplings(), min_size=2, max_size=9),
    size=st.sampled_from(SIZES),
    equal=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_a_row_does_not_depend_on_the_batch(
    of: list[Sampling], size: int, equal: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = 4 * torch.randn(len(of), size)
    if equal:
        # Many tokens have equal weights, of which top_p removes some.
        logits = logits.round()
    query = TokenOptions(query=Query(top=3, tokens=[1, 7]))
    rows = [
        Row(sampling, seed, i, 5, generated=[3, 3, 8], options=query if i % 2 else None)
        for i, sampling in enumerate(of)
    ]
    together = sample(logits, range(len(of)), rows)
    assert together.errors == {}
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [0], [row])
        assert alone.tokens == together.tokens[i : i + 1]
        assert alone.logprobs == together.logprobs[i : i + 1]
        assert alone.top.get(0) == together.top.get(i)
        assert alone.distributions.get(0) == together.distributions.get(i)


@pytest.mark.parametrize("size", SIZES)
def test_a_score_is_the_log_probability_of_a_sampled_token(size: int) -> None:
    torch.manual_seed(size)
    logits = 4 * torch.randn(6, size)
    ways = [Sampling(temperature=0.0), Sampling(), Sampling(top_logprobs=4)] * 2
    rows = [Row(way, 3, i, 1) for i, way in enumerate(ways)]
    sampled = sample(logits, range(6), rows)
    values, _ = score(logits, sampled.tokens).fetch()
    assert values == sampled.logprobs
    alone = [score(logits[i : i + 1].clone(), [t]) for i, t in enumerate(sampled.tokens)]
    assert [one.fetch()[0][0] for one in alone] == values
    _, likely = score(logits, sampled.tokens, 4).fetch()
    assert likely[2] == sampled.top[2]
