"""From logits to tokens: one batched pass over the rows of a step, on the model's device.

Randomness is counter-based: the number that decides a token depends on the request's seed, its
sequence and the token's position alone. So a request gives the same tokens whatever else is in the
batch, and can be continued elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...protocol.sampling import Sampling

NAN = "the model's logits contain NaN"
INSPECTED = 5
"""The most likely tokens that are looked at with ``inspect``, where the request wants none."""
NOTHING_ALLOWED = "no token is allowed here: bias and mask forbid all of them"


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
    inspect: bool = False
    """Report the likeliest tokens that the mask forbids."""


@dataclass(slots=True)
class Sampled:
    """What was chosen from each row, as lists of the rows' length."""

    tokens: list[int]
    logprobs: list[float]
    """Under the model's own distribution."""
    top: list[dict[int, float]]
    errors: dict[int, str] = field(default_factory=dict)
    """Rows from which no token could be chosen."""
    cut: dict[int, list[int]] = field(default_factory=dict)
    """Of rows with ``inspect``: those of their most likely tokens that the mask forbids."""


@torch.inference_mode()
def sample(logits: torch.Tensor, which: Sequence[int], rows: Sequence[Row]) -> Sampled:
    """Chooses a token for each of ``rows``; row i is sampled from ``logits[which[i]]``.

    Several rows may use the same logits: the sequences that are forked from one prompt.
    """
    own = logits if list(which) == list(range(len(logits))) else logits[list(which)]
    # On a CPU, max is two and a half times as fast as argmax, and its result serves logsumexp too.
    best = own.max(-1)
    log_total = (own - best.values.unsqueeze(-1)).exp_().sum(-1).log_() + best.values
    chosen, allowed = _choose(own, best.indices, rows)
    logprobs = own.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - log_total
    results = torch.stack(
        [chosen.double(), logprobs.double(), allowed.double(), log_total.double()]
    )
    tokens, values, fine, totals = results.tolist()
    result = Sampled([int(t) for t in tokens], values, [])
    for i, total in enumerate(totals):
        if total != total or total in (float("inf"), float("-inf")):
            result.errors[i] = NAN
        elif not fine[i]:
            result.errors[i] = NOTHING_ALLOWED
    result.top = _top(own, log_total, rows, result)
    return result


def scores(
    logits: torch.Tensor, tokens: Sequence[int], most: int = 0
) -> tuple[list[float], Sequence[dict[int, float] | None]]:
    """The natural log-probability of each of ``tokens``, given the row of logits before it; and the
    ``most`` likely tokens of each row together with that token, None if ``most`` is 0."""
    at = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    every = torch.log_softmax(logits, -1)
    values: list[float] = every.gather(-1, at).squeeze(-1).tolist()
    if not most:
        return values, [None] * len(values)
    likely = every.topk(min(most, every.shape[-1]), -1)
    rows = zip(likely.indices.tolist(), likely.values.tolist(), tokens, values, strict=True)
    return values, [dict(zip(ids, p, strict=True)) | {t: value} for ids, p, t, value in rows]


def uniforms(rows: Sequence[Row]) -> np.ndarray:
    """One number in [0, 1) for each row, from (seed, sequence, position): splitmix64, chained
    (Steele, Lea, Flood 2014)."""
    state = np.array([row.seed for row in rows], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in ([row.seq for row in rows], [row.position for row in rows]):
            state = _mix(state + np.array(part, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _choose(
    own: torch.Tensor, best: torch.Tensor, rows: Sequence[Row]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row, and whether the row allows any token at all."""
    chosen = best.clone()
    allowed = torch.ones(len(rows), dtype=torch.bool, device=own.device)
    bending = _changed_rows(rows, best)
    places = {i: place for place, i in enumerate(bending)}
    at = _ints(bending, own)
    bent = _bend(own[at], [rows[i] for i in bending]) if bending else own
    if bending:
        chosen[at] = bent.max(-1).indices
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if random == bending and random:
        chosen[at] = _draw(bent, [rows[i] for i in random])
    elif random:
        index = _ints(random, own)
        drawn = own[index]
        for k, i in enumerate(random):
            if i in places:
                drawn[k] = bent[places[i]]
        chosen[index] = _draw(drawn, [rows[i] for i in random])
    if bending:
        allowed[at] = bent.gather(-1, chosen[at].unsqueeze(-1)).squeeze(-1) > float("-inf")
    return chosen, allowed


# --- what changes the logits ----------------------------------------------------------------------


def _changed_rows(rows: Sequence[Row], best: torch.Tensor) -> list[int]:
    """The rows whose logits must be changed before a token is chosen.

    A greedy row with a mask and nothing else is not among them where the mask allows the best
    token: no other token would be chosen.
    """
    found = []
    tokens: list[int] | None = None
    for i, row in enumerate(rows):
        if row.mask is not None and not row.sampling.temperature and not _bends(row):
            tokens = best.tolist() if tokens is None else tokens
            if not _allows(row.mask, tokens[i]):
                found.append(i)
        elif row.mask is not None or _bends(row):
            found.append(i)
    return found


def _allows(mask: np.ndarray | None, token: int) -> bool:
    return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)


def _bend(bent: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Bias, penalties and masks put into the logits of these rows, which are changed."""
    _add_bias(bent, rows)
    _penalise(bent, rows)
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if masked:
        words = np.stack([~row.mask for row in rows if row.mask is not None])
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        forbidden = torch.from_numpy(bits[:, : bent.shape[1]]).view(torch.bool).to(bent.device)
        if len(masked) == len(rows):
            bent.masked_fill_(forbidden, float("-inf"))
        else:
            index = _ints(masked, bent)
            bent[index] = bent[index].masked_fill_(forbidden, float("-inf"))
    return bent


def _bends(row: Row) -> bool:
    """Whether bias or penalties change a row's logits."""
    s = row.sampling
    return bool(
        s.logit_bias or s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    )


def _add_bias(bent: torch.Tensor, rows: Sequence[Row]) -> None:
    entries = [(i, t, b) for i, row in enumerate(rows) for t, b in row.sampling.logit_bias.items()]
    if entries:
        where, tokens, amounts = zip(*entries, strict=True)
        index = (_ints(where, bent), _ints(tokens, bent))
        bent.index_put_(index, torch.tensor(amounts, device=bent.device), accumulate=True)


def _penalise(bent: torch.Tensor, rows: Sequence[Row]) -> None:
    seen: list[tuple[int, int, float]] = []
    less: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        s = row.sampling
        if s.repetition_penalty != 1:
            every = set(row.prompt) | set(row.generated)
            seen += [(i, t, s.repetition_penalty) for t in every]
        if s.presence_penalty or s.frequency_penalty:
            for token, count in Counter(row.generated).items():
                less.append((i, token, s.presence_penalty + s.frequency_penalty * count))
    if seen:
        where, tokens, amounts = zip(*seen, strict=True)
        index = (_ints(where, bent), _ints(tokens, bent))
        factor = torch.tensor(amounts, device=bent.device, dtype=bent.dtype)
        old = bent[index]
        bent[index] = torch.where(old > 0, old / factor, old * factor)
    if less:
        where, tokens, amounts = zip(*less, strict=True)
        index = (_ints(where, bent), _ints(tokens, bent))
        change = -torch.tensor(amounts, device=bent.device, dtype=bent.dtype)
        bent.index_put_(index, change, accumulate=True)


def _ints(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


# --- drawing --------------------------------------------------------------------------------------


def _draw(bent: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A token for each row, at its temperature, from the tokens that its cuts leave.

    Rows with cuts are sorted, the others are not: a row must not depend on the others in its batch.
    """
    device = bent.device
    temperature = torch.tensor([r.sampling.temperature for r in rows], device=device)
    scaled = bent.double() / temperature.double().unsqueeze(-1)
    at = torch.from_numpy(uniforms(rows)).to(device)
    chosen = torch.empty(len(rows), dtype=torch.long, device=device)
    cut = [_cuts(r.sampling) for r in rows]
    whole = [i for i, c in enumerate(cut) if not c]
    if whole:
        index = _ints(whole, bent)
        chosen[index] = _invert(torch.softmax(scaled[index], -1), at[index])
    some = [i for i, c in enumerate(cut) if c]
    if some:
        index = _ints(some, bent)
        ordered, ids = scaled[index].sort(dim=-1, descending=True, stable=True)
        kept = _cut(torch.softmax(ordered, -1), [rows[i].sampling for i in some])
        place = _invert(kept, at[index])
        chosen[index] = ids.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return chosen


def _cuts(s: Sampling) -> bool:
    return bool(s.top_k or s.top_p < 1 or s.min_p)


def _cut(probabilities: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Sorted probabilities with those set to 0 that top_k, top_p and min_p leave out, in turn."""
    device, size = probabilities.device, probabilities.shape[-1]
    most = [min(s.top_k or size, size) for s in samplings]
    top_k = torch.tensor(most, device=device).unsqueeze(-1)
    top_p = torch.tensor([s.top_p for s in samplings], device=device).unsqueeze(-1)
    min_p = torch.tensor([s.min_p for s in samplings], device=device).unsqueeze(-1)
    kept = probabilities * (torch.arange(size, device=device) < top_k)
    before = kept.cumsum(-1) - kept
    kept = kept * (before < top_p * kept.sum(-1, keepdim=True))
    return kept * (kept >= min_p * kept[:, :1])


def _invert(probabilities: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulated probability passes ``at`` of the total."""
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    found = torch.searchsorted(cumulated, at.unsqueeze(-1) * total, right=True).squeeze(-1)
    # Rounding may lead past the last token that has any probability: then that one.
    last = (probabilities > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(found, last)


# --- the most likely tokens -----------------------------------------------------------------------


def _top(
    own: torch.Tensor, log_total: torch.Tensor, rows: Sequence[Row], result: Sampled
) -> list[dict[int, float]]:
    """For each row its most likely tokens and the chosen one, with their log-probabilities."""
    chosen = [{t: p} for t, p in zip(result.tokens, result.logprobs, strict=True)]
    inspected = [i for i, row in enumerate(rows) if row.inspect and row.mask is not None]
    most = max(row.sampling.top_logprobs for row in rows)
    if inspected:
        most = max(most, INSPECTED)
    if not most:
        return chosen
    values, ids = own.topk(min(most, own.shape[-1]), -1)
    logprobs = (values - log_total.unsqueeze(-1)).tolist()
    likely = ids.tolist()
    for i in inspected:
        n = rows[i].sampling.top_logprobs or INSPECTED
        result.cut[i] = [t for t in likely[i][:n] if not _allows(rows[i].mask, t)]
    found = []
    for i, (row, tokens) in enumerate(zip(rows, likely, strict=True)):
        n = row.sampling.top_logprobs
        found.append(dict(zip(tokens[:n], logprobs[i][:n], strict=True)) | chosen[i])
    return found
