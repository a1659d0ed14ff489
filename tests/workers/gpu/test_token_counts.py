"""Biases and penalties that are computed from arrays equal those of plain loops over the whole
text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.sampling import penalties, sampler
from tokenbus.workers.gpu.sampling.biases import Bias, bias_of_request
from tokenbus.workers.gpu.sampling.token_counts import TokenCounts

VOCAB = 40
TOKENS = st.lists(st.integers(0, 11), max_size=12)
PENALTIES = st.sampled_from([0.0, 0.1, -0.7, 1.3])
SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.3]),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
)
CHANGES = st.one_of(
    st.tuples(st.just("append"), TOKENS),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("fork"), st.none()),
    st.tuples(st.just("count"), st.none()),
)


def penalised(row: torch.Tensor, s: Sampling, prompt: list[int], new: list[int]) -> torch.Tensor:
    """A row with penalties that are computed token by token."""
    row = row.clone()
    factor = torch.tensor(s.repetition_penalty, dtype=torch.float32)
    for token in {*prompt, *new} if s.repetition_penalty != 1 else ():
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in Counter(new).items():
        amount = np.float32(s.presence_penalty + s.frequency_penalty * count)
        row[token] += -torch.tensor(amount)
    return row


def noise(rows: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, ::5], logits[:, 1::9] = -0.0, -torch.inf
    return logits


def bits(logits: torch.Tensor) -> bytes:
    return logits.numpy().tobytes()


@settings(max_examples=80, deadline=None)
@given(SAMPLINGS, TOKENS, st.lists(CHANGES, min_size=3, max_size=10), TOKENS, st.integers(0, 99))
def test_counts_follow_appended_and_dropped_tokens_and_forks(
    sampling: Sampling,
    prompt: list[int],
    changes: list[tuple[str, object]],
    draft: list[int],
    seed: int,
) -> None:
    sequence = Sequence(1, 0, list(prompt), len(prompt), sampling, 1000)
    others: list[Sequence] = []
    for change, value in changes:
        if change == "append":
            assert isinstance(value, list)
            sequence.tokens += value
        elif change == "drop":
            assert isinstance(value, int)
            # Some of the dropped tokens have been counted.
            sequence.count_tokens()
            sequence.drop(min(value, sequence.num_generated))
        else:
            counts = sequence.count_tokens()
            if change == "fork":
                others.append(
                    Sequence(
                        1, 1, list(sequence.tokens), len(prompt), sampling, 1000, counts=counts
                    )
                )
    texts = [list(one.generated) for one in (sequence, *others)]
    counted = [one.count_tokens() for one in (sequence, *others)]
    texts += [[*texts[0], *draft[:i]] for i in range(len(draft))]
    counted += [counted[0].plus(draft[:i]) for i in range(len(draft))]
    logits = noise(len(texts), seed)
    wanted = [
        penalised(row, sampling, prompt, text) for row, text in zip(logits, texts, strict=True)
    ]
    penalties.penalise(logits, [(i, sampling, counts) for i, counts in enumerate(counted)])
    assert bits(logits) == bits(torch.stack(wanted))


def test_rows_with_many_tokens_are_penalised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "MAX_ENTRIES", 7)
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=0.2)
    texts = [[1, 2, 3, 3], [], [*range(20)], [4, 5], [6]]
    logits = noise(len(texts), 3)
    wanted = [penalised(row, sampling, [9], text) for row, text in zip(logits, texts, strict=True)]
    counts = [TokenCounts.of(sampling, [9], text) for text in texts]
    penalties.penalise(logits, [(i, sampling, one) for i, one in enumerate(counts)])
    assert bits(logits) == bits(torch.stack(wanted))


@pytest.mark.parametrize("short", [0, 5, 1024])
@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_requests_are_added_exactly(
    short: int, launches: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "SHORT_BIAS", short)
    monkeypatch.setattr(sampler, "costs_launches", lambda logits: launches)
    given = [{7: 0.1, 3: -100.0}, {}, {i: 0.3 * i for i in range(39, 4, -1)}]
    biases = [bias_of_request(one) for one in given]
    assert biases[1] is None
    order = [2, 0, 1, 2, 0]
    logits = noise(len(order), 5).to(dtype)
    wanted = logits.clone()
    for row, which in enumerate(order):
        for token, value in given[which].items():
            wanted[row, token] += torch.tensor(value, dtype=torch.float32).to(dtype)
    added: list[tuple[int, Bias]] = []
    for row, which in enumerate(order):
        bias = biases[which]
        if bias is not None:
            added.append((row, bias))
    sampler._add_biases(logits, added)
    assert torch.equal(logits, wanted)
