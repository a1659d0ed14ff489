"""Answers the queries of controllers about the distribution of a sequence's next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ....protocol.sampling import Distribution, Override, Query
from ..model.device_queue import on_device
from .races import likeliest, row_sums

LOWEST = float(torch.finfo(torch.float32).min)
"""A log-probability of minus infinity is reported as this number, which JSON can represent."""


class TokenOptions(NamedTuple):
    """A controller's sampling options for the next token, in addition to its mask and its bias."""

    query: Query | None = None
    override: Override | None = None


@dataclass(slots=True)
class Answers:
    """The answers to the queries of some rows. Before ``fetch``, the device may still copy the
    tensors to the host."""

    queries: Mapping[int, Query]
    """The queries, by row of the step."""
    numbers: torch.Tensor
    """float64 ``[2, num_queries]``: the rank of the sampled token (0 if no token was sampled), and
    the entropy of the distribution. All tensors of this class are on the host, and become valid
    when the device has finished the copy."""
    likely: tuple[torch.Tensor, torch.Tensor] | None
    """The most likely tokens ``[num_queries, most]`` and their log-probabilities."""
    scores: torch.Tensor | None
    """``[num_queries, most]``: for each query, the log-probabilities of the tokens that it names,
    padded at the right."""

    def fetch(
        self, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()
    ) -> dict[int, Distribution]:
        """The answer for each row with a query. ``tokens``: the sampled tokens of all rows of the
        step. ``logprobs``: their log-probabilities. Both are empty if no token was sampled
        (``look``). The device must have finished the copy."""
        ranks, entropies = self.numbers.tolist()
        likely = [part.tolist() for part in self.likely] if self.likely is not None else None
        scores = self.scores.tolist() if self.scores is not None else None
        found = {}
        for place, (row, query) in enumerate(self.queries.items()):
            token, logprob = (tokens[row], logprobs[row]) if tokens else (-1, 0.0)
            answer = Distribution(logprob=logprob, rank=int(ranks[place]), entropy=entropies[place])
            if likely is not None and query.top:
                ids, values = (part[place][: query.top] for part in likely)
                answer.top = dict(zip(ids, values, strict=True))
            if scores is not None and query.tokens:
                answer.scores = dict(zip(query.tokens, scores[place], strict=False))
            for reported in (answer.top, answer.scores):
                if token in reported:
                    # The sampler's log-probability replaces the log-probability here, because the
                    # two may differ in the last bit.
                    reported[token] = logprob
            found[row] = answer
        return found


@torch.inference_mode()
def look(logits: torch.Tensor, looks: Sequence[tuple[int, Query]]) -> Answers:
    """Answers queries about rows of ``logits`` ``[rows, vocab]``, without sampling. ``looks``:
    pairs of a row and a query. The key of an answer is the index of its pair in ``looks``."""
    rows = on_device(np.array([row for row, _ in looks], dtype=np.int64), logits.device)
    own = logits.index_select(0, rows)
    ranks = torch.zeros(len(looks), device=logits.device)
    return _answered(own, ranks, dict(enumerate(query for _, query in looks)))


@torch.inference_mode()
def answer(logits: torch.Tensor, chosen: torch.Tensor, queries: Mapping[int, Query]) -> Answers:
    """Answers queries about rows of ``logits`` ``[rows, vocab]``. ``chosen`` ``[rows]``: the token
    that was sampled from each row. Does not wait for a CUDA device."""
    device = logits.device
    own = logits
    if list(queries) != list(range(len(logits))):
        rows = on_device(np.array(list(queries), dtype=np.int64), device)
        own, chosen = logits.index_select(0, rows), chosen.index_select(0, rows)
    sampled = own.gather(-1, chosen.unsqueeze(-1))
    # On a CPU, summing floats takes a third of the time of summing booleans.
    more_likely = torch.empty(own.shape, dtype=torch.float32, device=device)
    return _answered(own, torch.gt(own, sampled, out=more_likely).sum(-1) + 1, queries)


def _answered(own: torch.Tensor, ranks: torch.Tensor, queries: Mapping[int, Query]) -> Answers:
    """The answers to queries about the rows of ``own`` ``[num_queries, vocab]``. ``ranks``
    ``[num_queries]``: the ranks of the sampled tokens."""
    device = own.device
    every = torch.log_softmax(own, -1).clamp_(min=LOWEST)
    # Infinite log-probabilities are clamped, so that a probability of 0 adds 0 to the entropy.
    entropies = -row_sums(torch.softmax(own, -1).mul_(every)).squeeze(-1)
    numbers = torch.stack([ranks.double(), entropies.double()]).to("cpu", non_blocking=True)
    most = min(max(query.top for query in queries.values()), own.shape[-1])
    likely = None
    if most:
        ids = likeliest(own, most)[1]
        values = every.gather(-1, ids)
        likely = ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)
    named = _named(queries)
    scores = None
    if named is not None:
        scores = every.gather(-1, on_device(named, device)).to("cpu", non_blocking=True)
    return Answers(queries, numbers, likely, scores)


def _named(queries: Mapping[int, Query]) -> np.ndarray | None:
    """The tokens that queries name, int64 ``[num_queries, most]``, padded with 0; None if no query
    names tokens."""
    most = max(len(query.tokens) for query in queries.values())
    if not most:
        return None
    named = np.zeros((len(queries), most), dtype=np.int64)
    for place, query in enumerate(queries.values()):
        named[place, : len(query.tokens)] = query.tokens
    return named
