"""Excludes tokens that would end a sequence before it has ``min_tokens`` generated tokens.

The position of a row's token is the number of tokens that its sequence has generated before. So the
position alone decides whether the token may end the sequence. This is also true for the tokens of a
draft, if steps overlap, and after the sequence has moved from another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..model.device_queue import on_device

_MAX_INT64 = 2**63 - 1


class Least(NamedTuple):
    """The minimum length of a sequence."""

    min_tokens: int
    ends: Sequence[int]
    """The tokens that are excluded until the sequence has ``min_tokens`` tokens: end-of-sequence
    tokens and ids of ``stop``."""


class MinTokens:
    """The minimum lengths of the rows whose requests have ``min_tokens``. They are the same in each
    step."""

    def __init__(self, rows: Mapping[int, Least]) -> None:
        self._rows = np.array([*rows], dtype=np.int64)
        least = [min(one.min_tokens, _MAX_INT64) for one in rows.values()]
        self._least = np.array(least, dtype=np.int64)
        self._ends = [np.array(one.ends, dtype=np.int64) for one in rows.values()]

    @classmethod
    def of(cls, rows: Iterable[Least | None]) -> MinTokens | None:
        """The rows that have a minimum length; None if no row has one."""
        found = {i: one for i, one in enumerate(rows) if one is not None}
        return cls(found) if found else None

    def excluded(self, positions: np.ndarray) -> dict[int, np.ndarray]:
        """By row: the tokens that are excluded at these ``positions``. Rows without excluded tokens
        are left out."""
        below = np.flatnonzero(positions[self._rows] < self._least).tolist()
        return {int(self._rows[i]): self._ends[i] for i in below}


def exclude(logits: torch.Tensor, excluded: Mapping[int, np.ndarray]) -> None:
    """Sets the logits of excluded tokens to minus infinity, in place. ``excluded``: the excluded
    tokens, by row of ``logits``. If all allowed tokens of a row are excluded, the row is not
    changed."""
    rows = np.repeat(np.array([*excluded], dtype=np.int64), [len(e) for e in excluded.values()])
    places = np.stack([rows, np.concatenate([*excluded.values()])])
    index, tokens = on_device(places, logits.device)
    before = logits[index, tokens]
    logits[index, tokens] = float("-inf")
    empty = logits.amax(-1)[index] == float("-inf")
    logits[index, tokens] = before.masked_fill(~empty, float("-inf"))
