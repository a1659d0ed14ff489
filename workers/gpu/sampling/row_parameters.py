"""How tokens are to be chosen from the rows of logits of a step: the sampling parameters of their
requests as columns, and what else each row is chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....protocol.sampling import Sampling
from .biases import Bias
from .distributions import TokenOptions
from .races import Draws, streams

_MAX_INT64 = 2**63 - 1
_NO_DRAWS = Draws(*(np.zeros(0, dtype=of) for of in ("i8", "f4", "i8", "f4", "f4")))


@dataclass(slots=True)
class Row:
    """How to choose from one row of logits."""

    sampling: Sampling
    seed: int
    seq: int
    position: int
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    """Read only where the request has penalties."""
    mask: np.ndarray | None = None
    """Allowed tokens: bit i of u32 words, little-endian; None allows all."""
    bias: Bias | None = None
    """The controller's bias, added to the logits after the request's own."""
    inspect: bool = False
    """Report the likeliest tokens that the mask forbids."""
    options: TokenOptions | None = None
    """Those of the controller; only the query is used here."""


class RowParameters:
    """The sampling parameters of n rows that stay the same from token to token, as columns."""

    def __init__(self, rows: Sequence[tuple[Sampling, int, int]]) -> None:
        """``rows``: sampling parameters, seed and number of the sequence of each row."""
        samplings = [sampling for sampling, _, _ in rows]
        self.seeds = [seed for _, seed, _ in rows]
        self.temperature = np.array([s.temperature for s in samplings], dtype=np.float32)
        self.random_rows = np.flatnonzero(self.temperature > 0)
        """The rows that are not greedy."""
        self.random: list[int] = self.random_rows.tolist()
        self.draws = _draws([rows[i] for i in self.random])
        """How the tokens of these are drawn."""
        self.bent = [i for i, s in enumerate(samplings) if _bends(s)]
        """The rows whose logits bias or penalties change."""
        self.any_bias = any(s.logit_bias for s in samplings)
        """Whether any request has biases, which may forbid tokens."""
        self.samplings = samplings
        self.top_logprobs = {i: s.top_logprobs for i, s in enumerate(samplings) if s.top_logprobs}
        self.plain = not (self.random or self.bent)
        """Whether all of them take the most likely token."""

    def __len__(self) -> int:
        return len(self.seeds)


def _bends(s: Sampling) -> bool:
    """Whether bias or penalties change a row's logits."""
    return bool(
        s.logit_bias or s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    )


def _draws(rows: Sequence[tuple[Sampling, int, int]]) -> Draws:
    samplings = [sampling for sampling, _, _ in rows]
    if not samplings:
        return _NO_DRAWS
    seeds = np.array([seed for _, seed, _ in rows], dtype=np.uint64)
    return Draws(
        streams(seeds, np.array([seq for _, _, seq in rows], dtype=np.uint64)),
        np.array([s.temperature for s in samplings], dtype=np.float32),
        np.array([min(s.top_k, _MAX_INT64) for s in samplings], dtype=np.int64),
        np.array([s.top_p for s in samplings], dtype=np.float32),
        np.array([s.min_p for s in samplings], dtype=np.float32),
    )


@dataclass(slots=True)
class Rows:
    """How to choose from the n rows of a step."""

    parameters: RowParameters
    positions: np.ndarray
    """int64 ``[n]``: the position of each one's token, counted from the first that was generated.
    """
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    """By row, where it has one: the allowed tokens, as ``Row.mask``."""
    biases: dict[int, Bias] = field(default_factory=dict)
    """By row, where it has one: as ``Row.bias``."""
    seen: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    """By row, where the request has penalties: prompt, and generated tokens."""
    inspected: Sequence[int] = ()
    """The rows with ``inspect``."""
    options: dict[int, TokenOptions] = field(default_factory=dict)
    """By row, where it has any: as ``Row.options``. Overrides are in ``parameters`` already."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """The columns of these rows."""
        parameters = RowParameters([(row.sampling, row.seed, row.seq) for row in rows])
        return cls(
            parameters,
            np.array([row.position for row in rows], dtype=np.int64),
            {i: row.mask for i, row in enumerate(rows) if row.mask is not None},
            {i: row.bias for i, row in enumerate(rows) if row.bias is not None},
            {i: (rows[i].prompt, rows[i].generated) for i in parameters.bent},
            [i for i, row in enumerate(rows) if row.inspect],
            {i: row.options for i, row in enumerate(rows) if row.options is not None},
        )
