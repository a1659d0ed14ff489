"""Applies the penalties of requests to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ....protocol.sampling import Sampling
from ..model.device_queue import on_device
from .biases import MAX_BIAS
from .races import costs_launches
from .token_counts import TokenCounts

MAX_ENTRIES = 2**18
"""Rows are processed in groups that have at most this number of penalised tokens. A row with more
penalised tokens is processed alone. This number bounds the memory of the temporary tensors."""
MAX_FACTOR = 1e6
"""Bound on the factor by which a ``repetition_penalty`` changes a logit, so that logits stay finite
in float32 (``MAX_BIAS``). A factor that is 0 or infinite in float32 would make logits NaN."""
Penalised = tuple[int, Sampling, TokenCounts]
"""A row of logits, the sampling parameters of its request, and the counts of its sequence's
tokens."""


@np.errstate(over="ignore", invalid="ignore")
def penalise(logits: torch.Tensor, penalised: Sequence[Penalised]) -> None:
    """Applies penalties to rows of ``logits`` ``[rows, vocab]``, in place."""
    apply = _penalise_at_once if costs_launches(logits) else _penalise
    for part in _parts(penalised):
        rows = np.array([row for row, _, _ in part], dtype=np.int64)
        every = [counts.tokens for _, _, counts in part]
        sizes = [len(tokens) for tokens in every]
        factors = np.array([sampling.repetition_penalty for _, sampling, _ in part])
        factors = factors.clip(1 / MAX_FACTOR, MAX_FACTOR)
        amounts = [_amounts(sampling, counts) for _, sampling, counts in part]
        apply(
            logits,
            np.repeat(rows, sizes),
            np.concatenate(every),
            np.repeat(factors, sizes),
            np.concatenate(amounts),
        )


def _parts(penalised: Sequence[Penalised]) -> Iterator[list[Penalised]]:
    part: list[Penalised] = []
    entries = 0
    for one in penalised:
        size = len(one[2].tokens)
        if part and entries + size > MAX_ENTRIES:
            yield part
            part, entries = [], 0
        if size:
            part.append(one)
            entries += size
    if part:
        yield part


def _amounts(sampling: Sampling, counts: TokenCounts) -> np.ndarray:
    """The numbers that are added to the logits of tokens, float64. Tokens that were not generated
    have 0."""
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if not presence and not frequency:
        return np.zeros(len(counts.tokens))
    amounts = (presence + frequency * counts.counts).clip(-MAX_BIAS, MAX_BIAS)
    return np.where(counts.counts > 0, -amounts, 0.0)


def _penalise(
    logits: torch.Tensor,
    rows: np.ndarray,
    tokens: np.ndarray,
    factors: np.ndarray,
    amounts: np.ndarray,
) -> None:
    """Applies penalties on a CPU. Entry i of each array is for the logit of token ``tokens[i]`` in
    row ``rows[i]``. ``factors``: the repetition penalties. ``amounts``: the numbers to add."""
    index = (torch.from_numpy(rows), torch.from_numpy(tokens))
    factor = torch.from_numpy(factors.astype(np.float32)).to(logits.dtype)
    amount = torch.from_numpy(amounts.astype(np.float32)).to(logits.dtype)
    old = logits[index]
    new = torch.where(old > 0, old / factor, old * factor)
    # Adding 0 would change the sign of a logit of -0.
    logits[index] = torch.where(amount != 0, new + amount, new)


def _penalise_at_once(
    logits: torch.Tensor,
    rows: np.ndarray,
    tokens: np.ndarray,
    factors: np.ndarray,
    amounts: np.ndarray,
) -> None:
    """``_penalise`` with few kernel launches: one copy from the host, one update of each token."""
    places = rows * logits.shape[1] + tokens
    numbers = np.concatenate([factors, 1 / factors, amounts]).astype(np.float32)
    # All numbers are copied in one int64 buffer: first the places, then the float32 values, two in
    # each word.
    padded = np.pad(numbers, (0, len(numbers) % 2)).view(np.int64)
    columns = on_device(np.concatenate([places, padded]), logits.device)
    values = columns[len(places) :].view(torch.float32)[: len(numbers)]
    factor, inverse, added = values.view(3, -1)
    flat, index = logits.view(-1), columns[: len(places)]
    old = flat.index_select(0, index)
    flat.index_copy_(0, index, torch.addcmul(added, old, torch.where(old > 0, inverse, factor)))
