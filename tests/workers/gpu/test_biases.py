"""Biases of controllers equal numbers that are added to the logits, and malformed biases are
refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.controller import biases
from tokenbus.workers.gpu.sampling.biases import Bias, read_bias
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import NOTHING_ALLOWED, sample

VOCAB = 150
"""More than two parts of 64 tokens, and not a multiple of 32, so that a mask's last word is not
full."""
INF = float("inf")

# Multiples of an eighth have exact sums in any order.
EIGHTHS = st.integers(-80, 80).map(lambda n: n / 8)
VALUES = st.one_of(EIGHTHS, st.just(-INF))
TOKENS = st.integers(0, VOCAB - 1)
SAMPLINGS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0])},
    optional={
        "logit_bias": st.dictionaries(TOKENS, EIGHTHS, max_size=4),
        "repetition_penalty": st.sampled_from([0.5, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "frequency_penalty": st.sampled_from([0.25, 2.0]),
        "top_k": st.integers(1, 9),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "top_logprobs": st.integers(1, 4),
    },
)


def encoded(values: dict[int, float] | list[float], vocab: int = VOCAB) -> bytes:
    """A bias as a controller worker sends it."""
    if isinstance(values, dict):
        tokens = np.array(list(values), dtype=np.int64)
        made = biases.sparse(tokens, np.array(list(values.values()), dtype=np.float32), vocab)
    else:
        made = biases.dense(np.array(values, dtype=np.float32), vocab)
    return made.encoded() if made is not None else b""


def bias_of(values: dict[int, float] | list[float]) -> Bias | None:
    """A bias as a GPU worker reads it."""
    data = encoded(values)
    return read_bias(np.frombuffer(data, dtype=np.uint32), VOCAB) if data else None


def added(values: dict[int, float] | list[float]) -> np.ndarray:
    """The numbers that a bias adds, by brute force."""
    if isinstance(values, list):
        return np.array(values, dtype=np.float32)
    return np.array([values.get(t, 0.0) for t in range(VOCAB)], dtype=np.float32)


def mask_of(tokens: set[int]) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words


@st.composite
def cases(draw: st.DrawFn) -> tuple[Row, dict[int, float] | list[float], set[int] | None]:
    """A row without its bias, the bias, and the tokens that the row's mask allows."""
    fields: dict[str, Any] = draw(SAMPLINGS)
    values: dict[int, float] | list[float] = draw(
        st.one_of(
            st.dictionaries(TOKENS, VALUES, max_size=100),
            st.lists(VALUES, min_size=VOCAB, max_size=VOCAB),
        )
    )
    allowed = draw(st.one_of(st.none(), st.sets(TOKENS, max_size=12)))
    texts = st.lists(TOKENS, max_size=5)
    row = Row(
        Sampling(**fields),
        seed=draw(st.integers(0, 2**32)),
        seq=draw(st.integers(0, 3)),
        position=draw(st.integers(0, 9)),
        prompt=draw(texts),
        generated=draw(texts),
        mask=None if allowed is None else mask_of(allowed),
    )
    return row, values, allowed


@given(st.lists(cases(), min_size=1, max_size=4), st.integers(0, 1000))
def test_rows_with_biases_are_sampled_as_from_logits_with_the_biases_added(
    drawn: list[tuple[Row, dict[int, float] | list[float], set[int] | None]], seed: int
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(len(drawn), VOCAB) * 24).round() / 8
    rows = [replace(row, bias=bias_of(values)) for row, values, _ in drawn]
    which = list(range(len(drawn)))
    got = sample(logits, which, rows)
    every = torch.log_softmax(logits, -1)
    bent = logits.numpy() + np.stack([added(values) for _, values, _ in drawn])
    for i, (row, values, allowed) in enumerate(drawn):
        # Samples this row alone, without a bias, from logits that include the bias.
        want = sample(torch.from_numpy(bent[i : i + 1].copy()), [0], [row])
        forbidden = {t for t in range(VOCAB) if added(values)[t] == -INF}
        may = (set(range(VOCAB)) if allowed is None else allowed) - forbidden
        if not may:
            assert got.errors[i] == NOTHING_ALLOWED
            continue
        assert i not in got.errors
        assert got.tokens[i] == want.tokens[0]
        assert got.tokens[i] in may
        # The log-probability is that of the model, without the bias.
        assert got.logprobs[i] == pytest.approx(every[i, got.tokens[i]].item(), abs=1e-4)
        if row.sampling.top_logprobs:
            most = row.sampling.top_logprobs
            shown = sorted((every[i, token].item() for token in got.top[i]), reverse=True)
            # If two logits are equal, either token may be among the likeliest.
            assert shown[:most] == pytest.approx(every[i].topk(most).values.tolist())
            assert got.tokens[i] in got.top[i]
            assert len(got.top[i]) <= most + 1


@given(
    st.one_of(
        st.dictionaries(TOKENS, VALUES, min_size=1, max_size=140),
        st.lists(VALUES, min_size=VOCAB, max_size=VOCAB),
    )
)
def test_a_bias_is_read_as_it_was_written(values: dict[int, float] | list[float]) -> None:
    data = encoded(values)
    assert len(data) <= biases.bias_bytes(VOCAB)
    bias, want = bias_of(values), added(values)
    assert bias is not None
    assert [bias.of(t) for t in range(VOCAB)] == want.tolist()
    assert bias.forbidden(VOCAB).tolist() == (want == -INF).tolist()
    assert [biases.forbids(data, t) for t in range(VOCAB)] == (want == -INF).tolist()


def test_a_row_without_a_bias_is_not_copied_where_another_one_has_a_bias() -> None:
    """The token of a greedy row without a bias is computed from the unchanged logits."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 1.0
    rows = [Row(Sampling(), 0, 0, 0), Row(Sampling(), 0, 0, 0, bias=bias_of({9: 2.0}))]
    assert sample(logits, [0, 1], rows).tokens == [7, 9]
    assert logits.sum() == 2.0


def test_inspect_says_which_likely_tokens_a_bias_moved_and_which_it_forbade() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :5] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    bias = bias_of({0: -INF, 1: -2.0, 2: 0.0, 99: 50.0, 100: 1.0})
    row = Row(Sampling(), 0, 0, 0, bias=bias, inspect=True)
    got = sample(logits, [0], [row])
    assert got.tokens == [99]
    assert got.allowed == {0: VOCAB - 1}
    assert got.cut == {0: [0]}
    assert got.biased == {0: {1: -2.0, 99: 50.0}}


def words(pairs: int, *numbers: float | int) -> np.ndarray:
    """The words of an encoded bias: the number of pairs, then integers as u32 and other numbers as
    float32."""
    made = [pairs.to_bytes(4, "little")]
    made += [
        np.uint32(n).tobytes() if isinstance(n, int) else np.float32(n).tobytes() for n in numbers
    ]
    return np.frombuffer(b"".join(made), dtype=np.uint32)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (words(1, VOCAB, 1.0), "the controller's bias has token ids up to 150 or out of order"),
        (words(2, 5, 1.0, 5, 2.0), "the controller's bias has token ids up to 5 or out of order"),
        (words(2, 6, 1.0, 5, 2.0), "the controller's bias has token ids up to 6 or out of order"),
        (words(3, 6, 1.0), "the controller's bias has 3 pairs in 12 bytes"),
        (words(0, *[0.0] * 149), "the controller's bias has 149 values; the model has 150 tokens"),
        (np.zeros(0, dtype=np.uint32), "the controller's bias has 0 values"),
    ],
)
def test_a_malformed_bias_is_refused_with_its_reason(sent: np.ndarray, error: str) -> None:
    with pytest.raises(ControllerError, match=error):
        read_bias(sent, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_a_bias_changes_its_own_row_only(temperature: float) -> None:
    """A controller worker never sends NaN."""
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    nan = Bias(np.array([float("nan")], dtype=np.float32), np.array([7]))
    rows = [Row(Sampling(temperature=temperature), i, 0, 0) for i in range(3)]
    alone = sample(logits, [0, 1, 2], rows)
    rows[1] = replace(rows[1], bias=nan)
    got = sample(logits, [0, 1, 2], rows)
    assert not got.errors.keys() - {1}
    assert [got.tokens[0], got.tokens[2]] == [alone.tokens[0], alone.tokens[2]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_device_adds_biases_as_the_cpu_does() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, VOCAB) * 24).round() / 8
    dense = [i % 7 / 8 for i in range(VOCAB)]
    every = [bias_of({4: 9.0, 99: -INF}), bias_of(dense), bias_of({})]
    rows = [Row(Sampling(temperature=1.0), i, 0, 0, bias=bias) for i, bias in enumerate(every)]
    assert sample(logits.cuda(), [0, 1, 2], rows).tokens == sample(logits, [0, 1, 2], rows).tokens
