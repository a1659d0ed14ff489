"""Draws a token from each row of logits. Rounding differences of the logits rarely change the
token.

The candidates run a race. A candidate of weight ``w`` arrives after the time ``E / w``, where ``E``
is an independent exponential random number. The candidate that arrives first is drawn. Candidate i
wins with probability ``w[i] / sum(w)``. In logarithms this is the Gumbel-max trick (Gumbel 1954;
Maddison, Tarlow, Minka 2014). A change of the logits by 1e-6 changes the winner only if the two
earliest arrivals are nearly equal. Inverting the cumulative distribution would be far more
sensitive: a change of one weight moves the boundaries of all later tokens.

If all tokens of the vocabulary are candidates, the vocabulary is divided into parts of a few
hundred tokens. The parts race first. The weight of a part is the sum of its tokens' weights. Then
the tokens of the winning part race. The probabilities are the same, and a vocabulary of 131,072
tokens needs only 768 random numbers. With ``top_k``, only the tokens that ``top_k`` keeps race.

The random numbers are counter-based: SplitMix64 (Steele, Lea, Flood 2014) computes each number from
the row's key and the candidate's number. It uses 64-bit integers, so all devices compute equal
numbers. The key is derived from (seed, sequence, position). The logarithm of a uniform number is
-E. A uniform number has 53 bits, so even a token of probability 1e-9 is drawn with this
probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from ..model.device_queue import on_device

PART = 64
"""Number of tokens in each part of a row in ``likeliest`` and in ``sampler._best``."""
CACHED = 2**18
"""Maximum number of logits that a CPU processes at a time. They take 1 MiB, and stay in the CPU's
cache."""
AHEAD_BYTES = 2**25
"""Maximum number of bytes of random numbers that CUDA computes ahead."""
MAX_AHEAD = 32
"""Maximum number of steps whose random numbers are computed at a time."""
SORTED = 2**13
"""Up to this number of tokens, it is faster on a CPU to sort the weights than to search bit by bit
(``_least_kept``)."""
_UNIT = torch.tensor(2.0**-53, dtype=torch.float64)
_PLACES = 2**40
"""The counter of the first token in a part; the counters of the parts themselves begin at 0."""
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}
Integers = TypeVar("Integers", np.ndarray, torch.Tensor)


@dataclass(slots=True)
class Draws:
    """The sampling parameters of the n rows that are not greedy, as arrays of length n.
    Temperatures are above 0."""

    streams: np.ndarray
    """int64: for each row, the number that selects its stream of random numbers (function
    ``streams``)."""
    temperature: np.ndarray
    top_k: np.ndarray
    """int64; the value 0 keeps all tokens."""
    top_p: np.ndarray
    min_p: np.ndarray
    any_temperature: bool = field(init=False)
    """Whether any temperature differs from 1. The next three flags: whether any row has ``top_k``,
    ``top_p`` or ``min_p``."""
    any_top_k: bool = field(init=False)
    any_top_p: bool = field(init=False)
    any_min_p: bool = field(init=False)
    ahead: Ahead | None = field(init=False, default=None)
    """On CUDA: the random numbers of the next steps."""
    _columns: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.any_temperature = bool((self.temperature != 1).any())
        self.any_top_k = bool(self.top_k.any())
        self.any_top_p = bool((self.top_p < 1).any())
        self.any_min_p = bool(self.min_p.any())

    @property
    def limit(self) -> np.ndarray:
        """``top_p`` in float64; infinite for rows whose ``top_p`` keeps all tokens."""
        return np.where(self.top_p < 1, self.top_p.astype(np.float64), math.inf)

    def column(self, name: str, device: torch.device) -> torch.Tensor:
        """The array of this name on a device, ``[n, 1]``. The array is copied to CUDA once, because
        a batch has the same parameters in each step."""
        found = self._columns.get(name)
        if found is None:
            found = on_device(getattr(self, name), device).unsqueeze(-1)
            if device.type == "cuda":
                self._columns[name] = found
        return found

    def of(self, rows: np.ndarray | slice) -> Draws:
        """The parameters of some rows."""
        return Draws(
            self.streams[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
        )


@dataclass(slots=True)
class Ahead:
    """The logarithms of a batch's random numbers for several consecutive steps.

    These numbers do not depend on logits. So a device can compute the numbers of many steps at
    once, with the kernel launches of one step.
    """

    positions: np.ndarray
    """``[rows]``: the positions of the first step."""
    logs: torch.Tensor
    """The logarithms, float64 ``[steps, rows, candidates]``."""

    def at(self, positions: np.ndarray) -> torch.Tensor | None:
        """The numbers of the step at these positions; None if the numbers of this step have not
        been computed."""
        step = int(positions[0] - self.positions[0])
        if not 0 <= step < len(self.logs) or (positions - self.positions != step).any():
            return None
        return self.logs[step]

    def precedes(self, positions: np.ndarray) -> bool:
        """Whether the step at these positions follows the last computed step."""
        return bool((positions - self.positions == len(self.logs)).all())


def costs_launches(tensor: torch.Tensor) -> bool:
    """Whether each operation on the tensor costs a kernel launch. If so, few large operations are
    faster than many small operations."""
    return tensor.is_cuda


def streams(seeds: np.ndarray, seqs: np.ndarray) -> np.ndarray:
    """Numbers that select the streams of random numbers: one for each sequence, int64
    ``[num_seqs]``."""
    return _mixed(seeds.astype(np.int64) + seqs.astype(np.int64) * _GOLDEN)


def keys(of: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The key of each row's random numbers, int64 ``[rows]``. ``of``: for each row, its number from
    ``streams``."""
    return _mixed(of + positions * _GOLDEN)


def log_uniforms(of: np.ndarray, steps: torch.Tensor) -> torch.Tensor:
    """The logarithm of a uniform number in [0, 1) for each row's key and each candidate; float64
    ``[rows, candidates]``. ``steps``: a result of ``step_of``, ``[candidates]`` or ``[rows,
    candidates]``."""
    if costs_launches(steps):
        mixed = _mixed(steps + on_device(of, steps.device).unsqueeze(-1))
        # ``_UNIT`` is a tensor of float64, so the product is float64, in one operation.
        return (mixed.bitwise_right_shift_(11).bitwise_and_(2**53 - 1) * _UNIT).log_()
    # NumPy starts an operation in half of the time that torch needs.
    mixed = torch.from_numpy(_mixed(steps.numpy() + of[:, None]))
    return ((mixed >> 11) & (2**53 - 1)).double().mul_(2.0**-53).log_()


def _logs_of_all(draws: Draws, positions: np.ndarray, steps: torch.Tensor) -> torch.Tensor:
    """``log_uniforms`` of the rows' keys at these positions. On CUDA, if a batch has drawn in two
    consecutive steps, also computes the numbers of its next steps."""
    count, candidates = len(positions), len(steps)
    before = draws.ahead
    found = before.at(positions) if before is not None else None
    if found is not None and found.shape[-1] == candidates:
        return found
    num_steps = 1
    if before is not None and before.precedes(positions):
        num_steps = max(1, min(MAX_AHEAD, AHEAD_BYTES // (8 * count * candidates)))
    # The previous numbers are freed before the next ones take memory.
    draws.ahead = before = found = None
    further = positions + np.arange(num_steps)[:, None]
    logs = log_uniforms(keys(draws.streams, further).ravel(), steps)
    logs = logs.view(num_steps, count, candidates)
    draws.ahead = Ahead(positions, logs)
    return logs[0]


def step_of(numbers: Integers) -> Integers:
    """Each candidate's counter times SplitMix64's increment, in int64."""
    return numbers * _GOLDEN


def draw_tokens(logits: torch.Tensor, draws: Draws, positions: np.ndarray) -> torch.Tensor:
    """Draws a token from each row of ``logits`` ``[rows, vocab]``, float32; returns int64
    ``[rows]``. A row's token does not depend on other rows. ``positions``: the position of each
    row's token in its sequence."""
    count, size = logits.shape
    step = count if costs_launches(logits) else max(1, CACHED // size)
    if costs_launches(logits) and not draws.any_top_k:
        _, steps = _competitors(size, logits.device)
        weights = _left_weights(logits, draws)
        return _race_with(weights, _logs_of_all(draws, positions, steps))
    of = keys(draws.streams, positions)
    if step >= count and not draws.any_top_k:
        return _from_all(logits, draws, of)
    few = (draws.top_k > 0) & (draws.top_k < size)
    if step >= count and few.all():
        return _from_likeliest(logits, draws, of)
    chosen = torch.empty(count, dtype=torch.long, device=logits.device)
    for race, which in ((_from_likeliest, few), (_from_all, ~few)):
        some = np.flatnonzero(which)
        for first in range(0, len(some), step):
            if len(some) == count:
                rows = slice(first, first + step)
                chosen[rows] = race(logits[rows], draws.of(rows), of[rows])
            else:
                part = some[first : first + step]
                index = on_device(part, logits.device)
                chosen[index] = race(logits[index], draws.of(part), of[part])
    return chosen


# --- from the whole vocabulary --------------------------------------------------------------------


def _from_all(logits: torch.Tensor, draws: Draws, of: np.ndarray) -> torch.Tensor:
    """Draws from all tokens that ``top_p`` and then ``min_p`` keep."""
    return _race(_left_weights(logits, draws), of)


def _left_weights(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The weights of all tokens; 0 for tokens that ``top_p`` or ``min_p`` removes."""
    weights = _probabilities(logits, draws)
    if draws.any_top_p:
        weights = _keep_top_p(weights, draws)
    if draws.any_min_p:
        least = draws.column("min_p", logits.device)
        weights *= _as_floats(torch.ge, weights, least * weights.amax(-1, keepdim=True))
    return weights


def _race(weights: torch.Tensor, of: np.ndarray) -> torch.Tensor:
    """The winners of races among all tokens. ``of``: the keys of the random numbers."""
    _, steps = _competitors(weights.shape[-1], weights.device)
    return _race_with(weights, log_uniforms(of, steps))


def _race_with(weights: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """The winners of races among all tokens. First a part of the vocabulary wins, and then a token
    of this part. ``logs``: the logarithms of random numbers, first for the parts, then for the
    places in a part."""
    count, size = weights.shape
    part, steps = _competitors(size, weights.device)
    parts = len(steps) - part
    if size % part:
        weights = torch.nn.functional.pad(weights, (0, parts * part - size))
    split = torch.unflatten(weights, -1, (parts, part))
    won = (split.sum(-1) / logs[:, :parts]).argmin(-1)
    within = split[_up_to(count, weights.device), won]
    place = (within / logs[:, parts:]).argmin(-1)
    drawn = torch.add(place, won, alpha=part)
    # If all weights of a row are 0, the index may be after the last token.
    return drawn.clamp_(max=size - 1) if size % part else drawn


@lru_cache(maxsize=16)
def _competitors(size: int, device: torch.device) -> tuple[int, torch.Tensor]:
    """Returns two values. The first is the number of tokens in a part, about the square root of the
    vocabulary size. The second is the results of ``step_of``, first for the parts, then for the
    tokens in a part."""
    part = 1 << ((size - 1).bit_length() // 2)
    numbers = [np.arange(-(-size // part)), _PLACES + np.arange(part)]
    return part, on_device(step_of(np.concatenate(numbers)), device)


@lru_cache(maxsize=64)
def _up_to(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


def _probabilities(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The probabilities of all tokens of these rows at their temperatures, as a new tensor."""
    if draws.any_temperature:
        # The largest logit becomes 0, so that a low temperature does not multiply rounding errors.
        by = draws.column("temperature", logits.device)
        if costs_launches(logits):
            # On a GPU, the largest logit is not subtracted, which saves two launches. Logits from a
            # GPU have greater rounding errors anyway.
            return torch.softmax(logits / by, -1)
        logits = (logits - logits.amax(-1, keepdim=True)).div_(by)
    return torch.softmax(logits, -1)


def _as_floats(
    compare: Callable[..., torch.Tensor], one: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """The result of a comparison as 0 and 1 in float32. On a CPU, multiplying weights with these
    numbers takes a tenth of the time of multiplying them with booleans."""
    return compare(one, other, out=torch.empty_like(one))


def _keep_top_p(weights: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Orders the weights of a row in descending order, and equal weights by token. Sets a weight to
    0 if the sum of the weights before it is at least ``top_p`` of the total."""
    # If ``top_p`` keeps all tokens, the limit is infinite, so that rounding does not remove a
    # token.
    share = draws.column("limit", weights.device)
    limit = share * row_sums(weights, torch.float64)
    least = _least_kept(weights, limit)
    if costs_launches(weights):
        return _without_equals(weights, limit, least)
    kept = _as_floats(torch.ge, weights, least).mul_(weights)
    exceeds = row_sums(kept) - least >= limit
    if exceeds.any():
        # Only rows above the limit are corrected, so that a row's weights do not depend on the
        # batch.
        kept = torch.where(exceeds, _without_equals(weights, limit, least), kept)
    return kept


def _without_equals(
    weights: torch.Tensor, limit: torch.Tensor, least: torch.Tensor
) -> torch.Tensor:
    """Sets weights below ``least`` to 0. Keeps the first weights that equal ``least`` until the sum
    of the kept weights reaches ``limit``."""
    above = _as_floats(torch.gt, weights, least).mul_(weights)
    room = ((limit - row_sums(above, torch.float64)) / least).ceil_()
    equal = weights == least
    equal &= equal.cumsum(-1) <= room
    return torch.where(equal, weights, above)


def row_sums(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of each row of ``values`` ``[rows, n]``; returns ``[rows, 1]``. On a CPU, NumPy
    computes the sums, so that a row's sum does not depend on the other rows. torch would divide a
    single long row among threads."""
    if costs_launches(values) or dtype not in _NUMPY_TYPES or values.device.type != "cpu":
        return values.sum(-1, keepdim=True, dtype=dtype)
    summed = values.numpy().sum(-1, keepdims=True, dtype=_NUMPY_TYPES[dtype])
    return torch.from_numpy(summed)


def _least_kept(weights: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """For each row: the least weight such that the sum of all greater weights is below
    ``limit``."""
    if costs_launches(weights) or weights.shape[-1] <= SORTED:
        if costs_launches(weights):
            ordered = weights.sort(-1, descending=True).values
        else:
            # NumPy is several times as fast as torch, because it sorts only the values.
            ordered = torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        if costs_launches(weights):
            return ordered.masked_fill_(before >= limit, math.inf).amin(-1, keepdim=True)
        last = (before < limit).sum(-1, keepdim=True) - 1
        return ordered.gather(-1, last.clamp_(min=0))
    # Searches bit by bit, from the highest bit. This is possible because positive floats are in the
    # same order as the integers with the same bits.
    bits, above = torch.zeros(len(weights), 1, dtype=torch.int32), torch.empty_like(weights)
    for bit in range(29, -1, -1):
        tried = bits + (1 << bit)
        torch.gt(weights, tried.view(torch.float32), out=above)
        reached = row_sums(above.mul_(weights)) >= limit
        bits = torch.where(reached, tried, bits)
    return (bits + 1).view(torch.float32)


def kept_tokens(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Whether each token may be drawn, bool ``[rows, vocab]``. A token may be drawn if bias and
    mask allow it, and ``top_k``, ``top_p`` and ``min_p`` keep it. The arguments are the same as in
    ``draw_tokens``."""
    size = logits.shape[-1]
    kept = logits > float("-inf")
    few = (draws.top_k > 0) & (draws.top_k < size)
    cut = ~few & ((draws.top_p < 1) | (draws.min_p > 0))
    for left, which in ((_left_of_all, cut), (_left_of_likeliest, few)):
        if which.all():
            kept &= left(logits, draws)
        elif which.any():
            some = np.flatnonzero(which)
            index = on_device(some, logits.device)
            kept[index] &= left(logits[index], draws.of(some))
    return kept


def _left_of_all(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Whether ``top_p`` and ``min_p`` keep each token, bool ``[rows, vocab]``."""
    return _left_weights(logits, draws) > 0


def _left_of_likeliest(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Whether ``top_k``, ``top_p`` and ``min_p`` keep each token, bool ``[rows, vocab]``."""
    ids, weights = _likeliest_weights(logits, draws)
    left = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    return left.scatter_(-1, ids, weights > 0)


# --- from the likeliest tokens --------------------------------------------------------------------


def _from_likeliest(logits: torch.Tensor, draws: Draws, of: np.ndarray) -> torch.Tensor:
    """Draws from the tokens that ``top_k``, ``top_p`` and then ``min_p`` keep."""
    ids, kept = _likeliest_weights(logits, draws)
    place = (kept / log_uniforms(of, step_of(ids))).argmin(-1, keepdim=True)
    return ids.gather(-1, place).squeeze(-1)


def _likeliest_weights(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row ``[rows, most]``, and their weights in float64; 0 for tokens
    that ``top_k``, ``top_p`` or ``min_p`` removes."""
    device, most = logits.device, int(draws.top_k.max())
    values, ids = likeliest(logits, most)
    by = draws.column("temperature", device)
    kept = ((values - values[:, :1]).double() / by).exp_()
    if (draws.top_k != most).any():
        kept *= _up_to(most, device) < draws.column("top_k", device)
    if draws.any_top_p:
        summed = kept.cumsum(-1)
        kept *= summed - kept < draws.column("top_p", device) * summed[:, -1:]
    if draws.any_min_p:
        kept *= kept >= draws.column("min_p", device)
    return ids, kept


def likeliest(logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logits of each row in descending order, and their tokens, ``[rows, most]``
    each. Equal logits are ordered by token."""
    size = logits.shape[-1]
    if 2 * most > size:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.values[:, :most], ordered.indices[:, :most]
    ids = _up_to(size, logits.device)
    values = logits
    parts = size // PART
    if 2 * most < parts:
        # The ``most`` likeliest tokens are in the ``most`` parts with the greatest maxima.
        within = parts * PART
        split = torch.unflatten(logits[:, :within], -1, (parts, PART))
        maxima = _ranks(split.amax(-1), _up_to(parts, logits.device))
        won = maxima.topk(most, -1).indices
        found = split[_up_to(len(logits), logits.device).unsqueeze(-1), won].flatten(1)
        tokens = (won.unsqueeze(-1) * PART + _up_to(PART, logits.device)).flatten(1)
        rest = ids[within:].expand(len(logits), -1)
        values = torch.cat([found, logits[:, within:]], -1)
        ids = torch.cat([tokens, rest], -1)
    places = _ranks(values, ids).topk(most, -1).indices
    return values.gather(-1, places), ids.expand_as(values).gather(-1, places)


def _ranks(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Integers that are ordered like the float32 ``values``. Among equal values, a lower id has a
    higher integer. If ``topk`` received the values themselves, ``k`` would decide which of several
    equal values it returns."""
    bits = (values + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) - ids


# --- random numbers -------------------------------------------------------------------------------


def _mixed(numbers: Integers) -> Integers:
    """SplitMix64's step and output, in place, for int64 with overflow."""
    numbers += _GOLDEN
    numbers ^= (numbers >> 30) & (2**34 - 1)
    numbers *= _FIRST
    numbers ^= (numbers >> 27) & (2**37 - 1)
    numbers *= _SECOND
    numbers ^= (numbers >> 31) & (2**33 - 1)
    return numbers
