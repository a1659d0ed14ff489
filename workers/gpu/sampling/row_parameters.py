"""The inputs of sampling, without the logits: sampling parameters as columns, and the mask, bias
and tokens of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....protocol.sampling import Sampling
from .biases import Bias, bias_of_request
from .distributions import TokenOptions
from .min_tokens import Least, MinTokens
from .races import Draws, streams
from .token_counts import TokenCounts, has_penalties

_MAX_INT64 = 2**63 - 1
_NO_DRAWS = Draws(*(np.zeros(0, dtype=of) for of in ("i8", "f4", "i8", "f4", "f4")))


@dataclass(slots=True)
class Row:
    """The sampling inputs of one row of logits."""

    sampling: Sampling
    seed: int
    seq: int
    position: int
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    """The generated tokens. Prompt and generated tokens are read only if the request has penalties
    and ``counts`` is None."""
    mask: np.ndarray | None = None
    """The allowed tokens, as u32 words: the bit of token i is ``1 << i % 32`` in word ``i // 32``.
    None allows all tokens."""
    bias: Bias | None = None
    """The controller's bias, which is added to the logits after the request's ``logit_bias``."""
    inspect: bool = False
    """Whether to report the most likely tokens that the mask forbids."""
    options: TokenOptions | None = None
    """The controller's options. Only ``query`` is read. ``override`` has no effect in
    ``Rows.of``."""
    least: Least | None = None
    """The minimum length of the sequence, if its request has ``min_tokens``."""
    logit_bias: Bias | None = None
    """The request's ``logit_bias``; if None, it is read from ``sampling``."""
    counts: TokenCounts | None = None
    """The counts of prompt and generated tokens, if they have been counted."""


MIN_TEMPERATURE = 1e-6
"""If the temperature of a row is lower, the row is greedy, because its scaled logits could exceed
float32."""
MIN_TOP_P = np.finfo(np.float32).tiny
"""A lower ``top_p`` could be 0 in float32, and would then exclude all tokens."""
MAX_TEMPERATURE = 1e20
"""If a temperature is higher, it is reduced to this temperature. An infinite temperature would
change the logit of a forbidden token to NaN."""


class RowParameters:
    """The sampling parameters of n rows, as columns. If controllers override parameters in a step,
    a separate object is made for this step."""

    def __init__(
        self,
        rows: Sequence[tuple[Sampling, int, int]],
        min_tokens: MinTokens | None,
        biases: dict[int, Bias],
    ) -> None:
        """``rows``: sampling parameters, seed and sequence number of each row. ``min_tokens``: the
        minimum lengths of the rows' sequences. ``biases``: by row, the ``logit_bias`` of its
        request, if the request has one."""
        samplings = [sampling for sampling, _, _ in rows]
        self.seeds = [seed for _, seed, _ in rows]
        self.temperature = _temperatures(samplings)
        self.temperature[self.temperature < MIN_TEMPERATURE] = 0.0
        self.random_rows = np.flatnonzero(self.temperature > 0)
        """The rows that are not greedy."""
        self.random: list[int] = self.random_rows.tolist()
        self.draws = _draws([rows[i] for i in self.random])
        """The parameters of the rows that are not greedy."""
        self.changed = [i for i, s in enumerate(samplings) if _changes_logits(s)]
        """The rows whose requests have a ``logit_bias`` or penalties."""
        self.biases = biases
        """By row: the ``logit_bias`` of its request, which may forbid tokens. Rows whose requests
        have no ``logit_bias`` are left out."""
        self.penalised = [i for i, s in enumerate(samplings) if has_penalties(s)]
        """The rows whose requests have penalties."""
        self.samplings = samplings
        self.top_logprobs = {i: s.top_logprobs for i, s in enumerate(samplings) if s.top_logprobs}
        self.reporting = [i for i, s in enumerate(samplings) if s.processed_logprobs or s.kept]
        """The rows whose requests ask for the distributions from which their tokens are drawn."""
        self.min_tokens = min_tokens
        self.plain = not (self.random or self.changed)
        """Whether all rows take the most likely token of unchanged logits."""

    def __len__(self) -> int:
        return len(self.seeds)


def is_unprocessed(s: Sampling) -> bool:
    """Whether a request's sampling parameters do not change the model's own distribution. A mask or
    a controller's bias may still change it."""
    cut = s.top_k or s.top_p < 1 or s.min_p
    return s.temperature == 1 and not cut and not _changes_logits(s)


def _changes_logits(s: Sampling) -> bool:
    """Whether a request's biases or penalties change its logits."""
    return bool(s.logit_bias) or has_penalties(s)


def _draws(rows: Sequence[tuple[Sampling, int, int]]) -> Draws:
    samplings = [sampling for sampling, _, _ in rows]
    if not samplings:
        return _NO_DRAWS
    seeds = np.array([seed for _, seed, _ in rows], dtype=np.uint64)
    return Draws(
        streams(seeds, np.array([seq for _, _, seq in rows], dtype=np.uint64)),
        _temperatures(samplings),
        np.array([min(s.top_k, _MAX_INT64) for s in samplings], dtype=np.int64),
        np.array([max(s.top_p, MIN_TOP_P) for s in samplings], dtype=np.float32),
        np.array([s.min_p for s in samplings], dtype=np.float32),
    )


def _temperatures(samplings: Sequence[Sampling]) -> np.ndarray:
    return np.array([min(s.temperature, MAX_TEMPERATURE) for s in samplings], dtype=np.float32)


def _logit_bias(row: Row) -> Bias | None:
    return row.logit_bias or bias_of_request(row.sampling.logit_bias)


def _counts(row: Row) -> TokenCounts:
    return row.counts or TokenCounts.of(row.sampling, row.prompt, row.generated)


@dataclass(slots=True)
class Rows:
    """The sampling inputs of the n rows of a step."""

    parameters: RowParameters
    positions: np.ndarray
    """int64 ``[n]``: the position of each row's token, counted from the first generated token."""
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    """By row: the allowed tokens (``Row.mask``). Rows without a mask are left out."""
    biases: dict[int, Bias] = field(default_factory=dict)
    """By row: the controller's bias (``Row.bias``). Rows without a bias are left out."""
    counts: dict[int, TokenCounts] = field(default_factory=dict)
    """For rows whose requests have penalties: the counts of the sequence's tokens."""
    inspected: Sequence[int] = ()
    """The rows with ``inspect``."""
    options: dict[int, TokenOptions] = field(default_factory=dict)
    """By row: the controller's options (``Row.options``). Rows without options are left out.
    ``SampledBatch.rows`` has applied each ``override`` to ``parameters``."""
    excluded: dict[int, np.ndarray] = field(init=False, default_factory=dict)
    """For each row whose sequence may not end yet: the tokens that would end it, int64."""

    def __post_init__(self) -> None:
        if self.parameters.min_tokens is not None:
            self.excluded = self.parameters.min_tokens.excluded(self.positions)

    @property
    def unchanged(self) -> bool:
        """Whether all rows take the most likely token of unchanged logits."""
        decided = self.masks or self.biases or self.excluded
        return self.parameters.plain and not decided

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """Makes the columns of these rows."""
        parameters = RowParameters(
            [(row.sampling, row.seed, row.seq) for row in rows],
            MinTokens.of([row.least for row in rows]),
            {i: bias for i, row in enumerate(rows) if (bias := _logit_bias(row)) is not None},
        )
        return cls(
            parameters,
            np.array([row.position for row in rows], dtype=np.int64),
            {i: row.mask for i, row in enumerate(rows) if row.mask is not None},
            {i: row.bias for i, row in enumerate(rows) if row.bias is not None},
            {i: _counts(rows[i]) for i in parameters.penalised},
            [i for i, row in enumerate(rows) if row.inspect],
            {i: row.options for i, row in enumerate(rows) if row.options is not None},
        )
