"""Reports the distribution from which a token was drawn, for requests that ask for it.

A trainer that learns from sampled tokens needs two facts about each token. The first is the
log-probability with which it was drawn, after bias, penalties, mask and temperature. The second is
the *candidates*: the tokens that ``top_k``, ``top_p``, ``min_p`` and the mask allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ....protocol.sampling import MAX_KEPT, Sampling
from ..model.device_queue import on_device
from .races import CACHED, Draws, costs_launches, kept_tokens

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
    """Reports about the tokens of some rows. The parts of a column are joined only when the column
    is read, because the device may still copy the tensors to the host."""

    processed_rows: Sequence[int]
    """The rows that report ``Token.processed``."""
    processed: list[torch.Tensor]
    """``Token.processed`` of each of ``processed_rows``, float64 ``[rows]`` in parts."""
    kept_rows: Sequence[int]
    """The rows that report ``Token.kept``."""
    kept: list[torch.Tensor]
    """By row of ``kept_rows``: whether each token was a candidate, bool ``[rows, vocab]`` in
    parts."""

    @classmethod
    def of(
        cls,
        asked: Mapping[int, Sampling],
        processed_logits: torch.Tensor,
        chosen: torch.Tensor,
        draws: Draws,
    ) -> Candidates:
        """Computes the reports. ``asked``: by row, the parameters of its request.
        ``processed_logits`` ``[rows, vocab]``: the logits of these rows after biases, penalties and
        masks. ``chosen`` ``[rows]``: the drawn tokens."""
        rows, samplings = list(asked), list(asked.values())
        step = LAUNCHED
        if not costs_launches(processed_logits):
            step = max(1, CACHED // processed_logits.shape[-1])
        wants_processed = np.array([s.processed_logprobs for s in samplings])
        wants_kept = np.array([s.kept for s in samplings])
        found = cls(_selected(rows, wants_processed), [], _selected(rows, wants_kept), [])
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            logits, cut = processed_logits[part], draws.of(part)
            kept = kept_tokens(logits, cut)
            if wants_processed[part].any():
                which = _which(wants_processed[part], logits)
                by = cut.column("temperature", logits.device)
                values = processed_logprobs(
                    logits[which], chosen[part][which], kept[which], by[which]
                )
                found.processed.append(values.to("cpu", non_blocking=True))
            if wants_kept[part].any():
                which = _which(wants_kept[part], logits)
                found.kept.append(kept[which].to("cpu", non_blocking=True))
        return found


def processed_logprobs(
    processed_logits: torch.Tensor,
    chosen: torch.Tensor,
    kept: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """The log-probability of each ``chosen`` token among the candidates, float64 ``[rows]``.
    ``kept``: a result of ``kept_tokens``. ``temperature``: float32 ``[rows, 1]``.

    On a CPU, NumPy computes the sums, so that the bits of a row's result do not depend on the other
    rows.
    """
    scaled = processed_logits.double() - processed_logits.amax(-1, keepdim=True)
    scaled = scaled.div_(temperature.double()).masked_fill_(kept.logical_not(), float("-inf"))
    of_chosen = scaled.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    if costs_launches(processed_logits):
        return of_chosen - scaled.exp_().sum(-1).log()
    weights = scaled.numpy()
    return of_chosen - torch.from_numpy(np.log(np.exp(weights, out=weights).sum(-1)))


def _selected(rows: Sequence[int], which: np.ndarray) -> list[int]:
    return [row for row, wanted in zip(rows, which, strict=True) if wanted]


def _which(wanted: np.ndarray, like: torch.Tensor) -> slice | torch.Tensor:
    """An index that selects the wanted rows. If all rows are wanted, indexing does not copy the
    rows."""
    if wanted.all():
        return slice(None)
    return on_device(np.flatnonzero(wanted), like.device)


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
    """``Token.kept`` in the form of a column. This is the ids of the candidates. If there are more
    than ``MAX_KEPT`` candidates, or if all tokens are candidates, it is their number. ``kept``:
    whether each token was a candidate."""
    ids = np.flatnonzero(kept)
    return len(ids) if len(ids) == len(kept) or len(ids) > MAX_KEPT else _u32(ids)


def _u32(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def greedy(token: int, processed: bool, kept: bool) -> Candidate:
    """The report about a greedy token, which was the only candidate."""
    return Candidate(0.0 if processed else None, _u32([token]) if kept else None)
