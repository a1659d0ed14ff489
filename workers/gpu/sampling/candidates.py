"""Reports the distribution that a token was drawn from, for requests that ask for it.

A trainer that learns from sampled tokens needs two facts about each token. The first is its
log-probability after bias, penalties, mask and temperature. The second is its candidates: the
tokens that ``top_k``, ``top_p``, ``min_p`` and the mask allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ....protocol.sampling import MAX_KEPT
from .races import Draws, costs_launches, kept_tokens

LAUNCHED = 16
"""Number of rows that a GPU processes at a time. This number bounds the memory of the float64
tensors."""


class Candidate(NamedTuple):
    """The report about one token, in the form that a column contains."""

    processed: float | None = None
    """``Token.processed``; None if the request does not ask for it."""
    kept: int | bytes | None = None
    """``Token.kept``: the number of candidates, or their ids, each as a u32. None if the request
    does not ask for it."""


@dataclass(slots=True)
class Candidates:
    """Reports about the tokens of some rows, while they are copied to the host."""

    rows: Sequence[int]
    processed: list[torch.Tensor]
    """``Token.processed`` of each row's token, float64 ``[rows]`` in parts. The parts are joined
    when they are read, because a copy to the host may arrive late."""
    kept: list[torch.Tensor]
    """Whether each token was a candidate, bool ``[rows, vocab]`` in parts."""

    @classmethod
    def of(
        cls, rows: Sequence[int], processed_logits: torch.Tensor, chosen: torch.Tensor, draws: Draws
    ) -> Candidates:
        """Computes the reports. ``processed_logits`` ``[rows, vocab]``: the logits after biases,
        penalties and masks. ``chosen`` ``[rows]``: the drawn tokens."""
        step = LAUNCHED if costs_launches(processed_logits) else 1
        processed, kept = [], []
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            left, values = processed_logprobs(processed_logits[part], chosen[part], draws.of(part))
            kept.append(left.to("cpu", non_blocking=True))
            processed.append(values.to("cpu", non_blocking=True))
        return cls(rows, processed, kept)


def processed_logprobs(
    processed_logits: torch.Tensor, chosen: torch.Tensor, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token is a candidate, bool ``[rows, vocab]``; and the log-probability of each
    ``chosen`` token among the candidates, float64 ``[rows]``. The arguments are those of
    ``Candidates.of``.

    On a CPU, if a call has a single row, the bits of the results depend only on this row.
    """
    kept = kept_tokens(processed_logits, draws)
    scaled = (processed_logits.double() - processed_logits.amax(-1, keepdim=True)) / draws.column(
        "temperature", processed_logits.device
    ).double()
    scaled = scaled.masked_fill_(kept.logical_not(), float("-inf"))
    if costs_launches(processed_logits):
        total = scaled.exp().sum(-1).log()
    else:
        total = torch.from_numpy(np.log(np.exp(scaled.numpy()).sum(-1)))
    return kept, scaled.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - total


def candidate_columns(
    candidates: Sequence[Candidate],
) -> tuple[bytes, list[int | bytes | None]]:
    """``TokenColumns.processed`` and ``TokenColumns.kept`` of rows with these reports. A column is
    empty if no row has its field."""
    processed = [one.processed for one in candidates]
    kept = [one.kept for one in candidates]
    return (
        b"" if all(one is None for one in processed) else np.array(processed, "<f8").tobytes(),
        [] if all(one is None for one in kept) else kept,
    )


def packed_ids(kept: np.ndarray) -> int | bytes:
    """``Token.kept`` in the form of a column: the ids of the candidates, or their number if there
    are more than ``MAX_KEPT`` or if all tokens are candidates. ``kept``: whether each token was a
    candidate."""
    ids = np.flatnonzero(kept)
    return len(ids) if len(ids) == len(kept) or len(ids) > MAX_KEPT else _u32(ids)


def _u32(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def greedy(token: int, processed: bool, kept: bool) -> Candidate:
    """The report about a greedy token, which was the only candidate."""
    return Candidate(0.0 if processed else None, _u32([token]) if kept else None)
