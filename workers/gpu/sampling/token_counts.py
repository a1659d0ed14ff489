"""Counts how often each token occurs in a sequence. Penalties depend on these counts.

Like vLLM's bin counts, the counts are updated token by token. So a step does not have to read the
whole text of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ....protocol.sampling import Sampling


def has_penalties(s: Sampling) -> bool:
    """Whether a request has any penalty."""
    return bool(s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty)


@dataclass(slots=True, frozen=True, eq=False)
class TokenCounts:
    """The distinct tokens of a sequence and their counts. The arrays are never written to, so forks
    and queued work share them."""

    tokens: np.ndarray
    """int64, ascending: the distinct tokens of ``prompt`` and of the generated tokens."""
    counts: np.ndarray
    """int64: how often each of ``tokens`` was generated."""
    prompt: np.ndarray
    """int64, ascending: the distinct tokens of the prompt. Empty if the request does not have a
    ``repetition_penalty``, because the other penalties ignore the prompt."""
    total: int = 0
    """Number of generated tokens that have been counted."""

    @classmethod
    def of(cls, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int] = ()) -> Self:
        """Counts the tokens of a sequence from the beginning."""
        read = prompt if sampling.repetition_penalty != 1 else ()
        distinct = np.unique(np.array(read, dtype=np.int64))
        return cls(distinct, np.zeros(len(distinct), dtype=np.int64), distinct).plus(generated)

    def plus(self, generated: Sequence[int]) -> Self:
        """The counts after further generated tokens."""
        if not generated:
            return self
        if len(generated) == 1:
            new, times = np.array(generated, dtype=np.int64), np.ones(1, dtype=np.int64)
        else:
            new, times = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        places = self.tokens.searchsorted(new)
        known = np.zeros(len(new), dtype=np.bool_)
        inside = places < len(self.tokens)
        known[inside] = self.tokens[places[inside]] == new[inside]
        counts = self.counts.copy()
        counts[places[known]] += times[known]
        if known.all():
            return self._changed(self.tokens, counts, len(generated))
        at, fresh = places[~known], new[~known]
        tokens = np.insert(self.tokens, at, fresh)
        return self._changed(tokens, np.insert(counts, at, times[~known]), len(generated))

    def minus(self, generated: Sequence[int]) -> Self:
        """The counts after the tokens ``generated`` have been dropped from the end of the
        sequence."""
        if not generated:
            return self
        dropped, times = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        counts = self.counts.copy()
        counts[self.tokens.searchsorted(dropped)] -= times
        kept = counts > 0
        kept[self.tokens.searchsorted(self.prompt)] = True
        return self._changed(self.tokens[kept], counts[kept], -len(generated))

    def _changed(self, tokens: np.ndarray, counts: np.ndarray, more: int) -> Self:
        return type(self)(tokens, counts, self.prompt, self.total + more)
