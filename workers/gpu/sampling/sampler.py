"""Samples tokens in one batched pass over the rows of a step, on the model's device.

Randomness is counter-based: the random numbers of a token depend only on the request's seed, the
sequence number and the token's position (``races.py``). So a request gets the same tokens in any
batch and on any worker. Only a rounding difference of the logits can change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isnan

import numpy as np
import torch

from ....protocol.sampling import Distribution
from ..model.device_queue import on_device
from .biases import Bias
from .candidates import Candidate, Candidates, greedy, packed_ids
from .distributions import Answers, answer
from .min_tokens import exclude
from .native_rows import reduce_rows
from .penalties import penalise
from .races import PART, costs_launches, draw_tokens, likeliest
from .row_parameters import Row, Rows, is_unprocessed

NAN = "the model's logits contain NaN"
INSPECTED = 5
"""Number of most likely tokens that ``inspect`` examines if the request does not have
``top_logprobs``."""
SHORT_BIAS = 1024
"""Sparse biases of at most this number of tokens are added for several rows together. For longer
biases, the temporary tensors would take too much of the device's memory."""
NOTHING_ALLOWED = "bias and mask forbid all tokens at this position; allow at least one"


@dataclass(slots=True)
class Sampled:
    """The token chosen from each row. Lists have one entry for each row."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities under the model's own distribution."""
    numbers: np.ndarray
    """``tokens`` and ``logprobs`` as float64 ``[2, rows]``."""
    top: dict[int, dict[int, float]] = field(default_factory=dict)
    """For rows whose requests have ``top_logprobs``: the log-probabilities of the most likely
    tokens and of the chosen token."""
    errors: dict[int, str] = field(default_factory=dict)
    """For rows from which no token could be chosen: the reason."""
    cut: dict[int, list[int]] = field(default_factory=dict)
    """For rows with ``inspect``: the tokens that a mask or a controller's bias forbids, among the
    most likely tokens."""
    allowed: dict[int, int] = field(default_factory=dict)
    """For rows with ``inspect`` that have a mask or a controller's bias: the number of allowed
    tokens."""
    biased: dict[int, dict[int, float]] = field(default_factory=dict)
    """For rows with ``inspect``: the controller's nonzero biases of the chosen token and of the
    most likely tokens that are not forbidden."""
    distributions: dict[int, Distribution] = field(default_factory=dict)
    """By row: the answers to the queries of controllers."""
    candidates: dict[int, Candidate] = field(default_factory=dict)
    """For rows whose requests ask for it: the distribution from which the token was drawn."""

    def top_of(self, row: int) -> dict[int, float]:
        """The log-probabilities that the output of a row reports. They always include the chosen
        token."""
        return self.top.get(row) or {self.tokens[row]: self.logprobs[row]}


@dataclass(slots=True)
class OnHost:
    """Host copies of a device's tensors. They have the dtypes in which they were computed, because
    a conversion on the device would cost kernel launches."""

    tokens: torch.Tensor
    """The chosen tokens, int64 ``[rows]``."""
    logprobs: torch.Tensor
    """The log-probabilities of the chosen tokens, ``[rows]``."""
    allowed: torch.Tensor | None
    """Whether each row allows any token; None if all rows allow a token."""

    @classmethod
    def of(
        cls, tokens: torch.Tensor, logprobs: torch.Tensor, allowed: torch.Tensor | None
    ) -> OnHost:
        """Starts the copies of these tensors to the host."""
        return cls(
            tokens.to("cpu", non_blocking=True),
            logprobs.to("cpu", non_blocking=True),
            None if allowed is None else allowed.to("cpu", non_blocking=True),
        )

    def numbers(self) -> np.ndarray:
        """float64 ``[3, rows]``: tokens, log-probabilities, and whether any token is allowed. The
        device must have finished the copies."""
        found = np.ones((3, len(self.tokens)))
        found[0], found[1] = self.tokens.numpy(), self.logprobs.float().numpy()
        if self.allowed is not None:
            found[2] = self.allowed.numpy()
        return found


@dataclass(slots=True, frozen=True)
class Numbers:
    """The results of rows that a CPU has reduced. They have the form of ``OnHost.numbers``."""

    values: np.ndarray

    def numbers(self) -> np.ndarray:
        """float64 ``[3, rows]``, in the form of ``OnHost.numbers``."""
        return self.values


@dataclass(slots=True)
class Drawn:
    """The token chosen from each row. Before ``fetch``, the device may still copy the tensors to
    the host."""

    rows: Rows
    vocab: int
    tokens: torch.Tensor
    """The chosen tokens, int64 ``[rows]``, on the device."""
    on_host: OnHost | Numbers
    """Tokens, log-probabilities and errors on the host; valid when the device has finished the
    copies."""
    likely: tuple[torch.Tensor, torch.Tensor] | None = None
    """The most likely tokens of the rows that report them (``_likely_rows``), and their
    log-probabilities, ``[num_likely_rows, most]`` each. They are also copied to the host."""
    answers: Answers | None = None
    """The answers to the queries of controllers."""
    candidates: Candidates | None = None
    """The distributions that rows report. Greedy rows, and rows that draw from the model's own
    distribution, are left out."""

    def fetch(self) -> Sampled:
        """Converts the results to Python numbers. The device must have finished the copies."""
        numbers = self.on_host.numbers()
        tokens, values, fine = numbers.tolist()
        result = Sampled(list(map(int, tokens)), values, numbers[:2])
        # A sum that contains NaN is NaN.
        if isnan(sum(values)) or 0 in fine:
            broken = np.flatnonzero(np.isnan(numbers[1])).tolist()
            forbidden = np.flatnonzero(numbers[2] == 0).tolist()
            result.errors = dict.fromkeys(forbidden, NOTHING_ALLOWED)
            result.errors |= dict.fromkeys(broken, NAN)
        if self.likely is not None:
            _report_likely(result, self.rows, *self.likely)
        if self.answers is not None:
            result.distributions = self.answers.fetch(result.tokens, result.logprobs)
        if self.rows.parameters.reporting:
            _report_candidates(result, self)
        for i in self.rows.inspected:
            mask, bias = self.rows.masks.get(i), self.rows.biases.get(i)
            if mask is not None or bias is not None:
                result.allowed[i] = _count(mask, bias, self.vocab)
        return result


def sample(logits: torch.Tensor, indices: Sequence[int], rows: Sequence[Row]) -> Sampled:
    """Chooses a token for each of ``rows``; row i is sampled from ``logits[indices[i]]``.

    Several rows may use the same logits. For example, the forks of one prompt do.
    """
    drawn = draw(logits, indices, Rows.of(rows))
    if drawn.tokens.is_cuda:
        torch.cuda.current_stream(drawn.tokens.device).synchronize()
    return drawn.fetch()


def draw(logits: torch.Tensor, indices: Sequence[int] | None, rows: Rows) -> Drawn:
    """Chooses a token for each of ``rows``, without waiting for the device. Row i is sampled from
    ``logits[indices[i]]``, or from ``logits[i]`` if ``indices`` is None."""
    row_logits = _rows_of(logits, indices)
    drawn = _drawn(row_logits, rows)
    if rows.options:
        queries = {i: o.query for i, o in rows.options.items() if o.query is not None}
        if queries:
            drawn.answers = answer(row_logits, drawn.tokens, queries)
    if rows.parameters.reporting:
        drawn.candidates = _candidates(row_logits, drawn.tokens, rows)
    return drawn


@torch.inference_mode()
def _candidates(logits: torch.Tensor, chosen: torch.Tensor, rows: Rows) -> Candidates | None:
    """The distributions that some rows report; None if all of these rows are greedy or draw from
    the model's own distribution."""
    parameters = rows.parameters
    places = {row: place for place, row in enumerate(parameters.random)}
    indices = [i for i in parameters.reporting if i in places and not _is_unprocessed(rows, i)]
    if not indices:
        return None
    index = _ints(indices, logits)
    draws = parameters.draws.of(np.array([places[i] for i in indices]))
    asked = {i: parameters.samplings[i] for i in indices}
    return Candidates.of(asked, _process_logits(logits[index], indices, rows), chosen[index], draws)


def _is_unprocessed(rows: Rows, i: int) -> bool:
    """Whether row i draws from the model's own distribution."""
    return (
        i not in rows.masks
        and i not in rows.biases
        and i not in rows.excluded
        and is_unprocessed(rows.parameters.samplings[i])
    )


def _report_candidates(result: Sampled, drawn: Drawn) -> None:
    """Reports the distribution of each row whose request asks for it."""
    rows, found = drawn.rows, drawn.candidates
    samplings, random = rows.parameters.samplings, set(rows.parameters.random)
    for i in rows.parameters.reporting:
        asked = samplings[i]
        if i not in random:
            result.candidates[i] = greedy(result.tokens[i], asked.processed_logprobs, asked.kept)
            continue
        result.candidates[i] = Candidate(
            result.logprobs[i] if asked.processed_logprobs else None,
            drawn.vocab if asked.kept else None,
        )
    if found is None:
        return
    if found.processed:
        values = torch.cat(found.processed).tolist()
        for i, value in zip(found.processed_rows, values, strict=True):
            result.candidates[i] = result.candidates[i]._replace(processed=value)
    if found.kept:
        for i, kept in zip(found.kept_rows, torch.cat(found.kept).numpy(), strict=True):
            result.candidates[i] = result.candidates[i]._replace(kept=packed_ids(kept))


def _drawn(logits: torch.Tensor, rows: Rows) -> Drawn:
    """Chooses a token from each row of logits, as ``draw`` does, but does not answer queries."""
    most = _most_likely(rows)
    reduced = reduce_rows(logits)
    if reduced is None:
        return _draw_by_torch(logits, rows, most)
    tokens, numbers = reduced
    best = torch.from_numpy(tokens)
    likely = None
    if most:
        reporting, of_best = _likely_rows(rows), torch.from_numpy(numbers[1].copy())
        likely = _likely_of(
            _rows_of(logits, reporting),
            _rows_of(best, reporting),
            _rows_of(of_best, reporting),
            most,
        )
    if not rows.unchanged:
        best = _change(logits, best, rows, numbers)
    return Drawn(rows, logits.shape[-1], best, Numbers(numbers), likely)


@torch.inference_mode()
def _change(
    logits: torch.Tensor, best: torch.Tensor, rows: Rows, numbers: np.ndarray
) -> torch.Tensor:
    """Called if some rows may not take their ``best`` token. Chooses the token of each row again.
    Updates ``numbers``, which contains the results for the best tokens."""
    likely = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    chosen, allowed = _choose(logits, rows, best)
    less = logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - likely
    numbers[0] = chosen.numpy()
    numbers[1] += less.numpy()
    if allowed is not None:
        numbers[2] = allowed.numpy()
    return chosen


@torch.inference_mode()
def _draw_by_torch(logits: torch.Tensor, rows: Rows, most: int) -> Drawn:
    """Does the work of ``_drawn`` with torch's operations, on any device. ``most``: number of most
    likely tokens to report."""
    chosen, allowed = _choose(logits, rows)
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    on_host = OnHost.of(chosen, logprobs, allowed)
    likely = _likely(_rows_of(every, _likely_rows(rows)), most) if most else None
    return Drawn(rows, logits.shape[-1], chosen, on_host, likely)


@torch.inference_mode()
def guess(logits: torch.Tensor, indices: Sequence[int], rows: Rows) -> torch.Tensor:
    """The tokens that ``draw`` would choose, without other results: int64 ``[rows]``, on the
    device."""
    row_logits = _rows_of(logits, indices)
    chosen, _ = _choose(row_logits, rows)
    return chosen


@dataclass(slots=True)
class Scores:
    """The log-probabilities of scored tokens. Before ``fetch``, the device may still copy the
    tensors to the host."""

    tokens: Sequence[int]
    values: torch.Tensor
    """The log-probabilities of ``tokens``, ``[num_tokens]``. All tensors of this class are on the
    host, and become valid when the device has finished the copy."""
    likely: tuple[torch.Tensor, torch.Tensor] | None
    """The most likely tokens ``[num_tokens, most]`` and their log-probabilities."""

    def fetch(self) -> tuple[list[float], Sequence[dict[int, float] | None]]:
        """Two lists with an entry for each token. The first has the log-probability of the token.
        The second has the log-probabilities of the most likely tokens and of the token itself; None
        if they were not requested. The device must have finished the copy."""
        values: list[float] = self.values.tolist()
        if self.likely is None:
            return values, [None] * len(values)
        ids, logprobs = (tensor.tolist() for tensor in self.likely)
        rows = zip(ids, logprobs, self.tokens, values, strict=True)
        return values, [dict(zip(i, p, strict=True)) | {t: value} for i, p, t, value in rows]


@torch.inference_mode()
def score(logits: torch.Tensor, tokens: Sequence[int], most: int = 0) -> Scores:
    """Computes the natural log-probability of token i of ``tokens`` in row i of ``logits``. Also
    finds the ``most`` most likely tokens of each row. Does not wait for a CUDA device."""
    wanted = _ints(tokens, logits).unsqueeze(-1)
    reduced = reduce_rows(logits)
    if reduced is not None:
        best, of_best = torch.from_numpy(reduced[0]), torch.from_numpy(reduced[1][1])
        less = logits.gather(-1, wanted) - logits.gather(-1, best.unsqueeze(-1))
        values = of_best + less.squeeze(-1)
        return Scores(tokens, values, _likely_of(logits, best, of_best, most) if most else None)
    every = torch.log_softmax(logits, -1)
    values = every.gather(-1, wanted).squeeze(-1)
    return Scores(tokens, values.to("cpu", non_blocking=True), _likely(every, most))


def _rows_of(values: torch.Tensor, indices: Sequence[int] | None) -> torch.Tensor:
    """Selects the rows ``indices``, or all rows if ``indices`` is None."""
    if indices is None or list(indices) == list(range(values.shape[0])):
        return values
    return values[_ints(indices, values)]


def _best(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row. On a CPU, this function first finds the maximum of each
    part of a row, and then the index in one part. ``torch.max`` with indices would take eight times
    as long."""
    size = logits.shape[-1]
    whole = size - size % PART
    if costs_launches(logits) or not whole:
        return logits.max(-1).indices
    most = torch.unflatten(logits[:, :whole], -1, (-1, PART)).amax(-1)
    if whole < size:
        most = torch.cat([most, logits[:, whole:].amax(-1, keepdim=True)], -1)
    first = most.max(-1).indices.unsqueeze(-1) * PART
    places = (first + torch.arange(PART)).clamp_(max=size - 1)
    return places.gather(-1, logits.gather(-1, places).max(-1).indices.unsqueeze(-1)).squeeze(-1)


def _choose(
    logits: torch.Tensor, rows: Rows, best: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the chosen token of each row, and whether each row allows any token (None if all rows
    allow a token). ``best``: the most likely tokens, if they are known. This tensor is
    overwritten."""
    random = rows.parameters.random
    changed = _changed_rows(rows, logits, best)
    if len(random) == len(logits) and changed in ([], random):
        # If all rows are random, they do not need to be selected.
        processed_logits = _process_logits(logits.clone(), changed, rows) if changed else logits
        chosen = _draw(processed_logits, rows)
        return chosen, _allowed(processed_logits, chosen, rows) if changed else None
    chosen = _best(logits) if best is None else best
    if not changed and not random:
        return chosen, None
    places = {i: place for place, i in enumerate(changed)}
    at = _ints(changed, logits)
    processed_logits = _process_logits(logits[at], changed, rows) if changed else logits
    if changed:
        chosen[at] = processed_logits.max(-1).indices
    if random == changed:
        chosen[at] = _draw(processed_logits, rows)
    elif random:
        index = _ints(random, logits)
        both = [(k, places[i]) for k, i in enumerate(random) if i in places]
        drawn = logits if len(random) == len(logits) and not both else logits[index]
        if both:
            to, of = zip(*both, strict=True)
            drawn[_ints(to, logits)] = processed_logits[_ints(of, logits)]
        chosen[index] = _draw(drawn, rows)
    allowed = _allowed(processed_logits, chosen[at], rows) if changed else None
    if allowed is not None and len(changed) < len(logits):
        every = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        every[at] = allowed
        allowed = every
    return chosen, allowed


def _allowed(
    processed_logits: torch.Tensor, chosen: torch.Tensor, rows: Rows
) -> torch.Tensor | None:
    """Whether the chosen token of each row is allowed. None if no row has a mask or a bias."""
    if not rows.masks and not rows.biases and not rows.parameters.biases:
        return None
    return processed_logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) > float("-inf")


def _draw(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Draws a token for each row that is not greedy. ``logits``: the logits of these rows."""
    p = rows.parameters
    return draw_tokens(logits, p.draws, rows.positions[p.random_rows])


# --- what changes the logits ----------------------------------------------------------------------


def _changed_rows(rows: Rows, logits: torch.Tensor, best: torch.Tensor | None) -> list[int]:
    """The rows whose logits must be changed before a token is chosen.

    On a CPU, a greedy row is left out if it has only a mask or a minimum length, and its best token
    is allowed. This token is then chosen anyway. On other devices, such a row is not left out,
    because the best token is not on the host.
    """
    found = set(rows.parameters.changed).union(rows.biases)
    tokens: list[int] | None = None
    for i in (*rows.masks, *rows.excluded):
        if i not in found and not costs_launches(logits) and not rows.parameters.temperature[i]:
            if tokens is None:
                tokens = (_best(logits) if best is None else best).tolist()
            ends = rows.excluded.get(i, ())
            if _allows(rows.masks.get(i), tokens[i]) and tokens[i] not in ends:
                continue
        found.add(i)
    return sorted(found)


def _allows(mask: np.ndarray | None, token: int) -> bool:
    return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)


def _count(mask: np.ndarray | None, bias: Bias | None, vocab: int) -> int:
    """Number of the ``vocab`` tokens that a mask and a bias allow."""
    allowed = np.ones(vocab, dtype=np.bool_)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)
    if bias is not None:
        allowed = allowed & ~bias.forbidden(vocab)
    return int(np.count_nonzero(allowed))


def _process_logits(logits: torch.Tensor, indices: Sequence[int], rows: Rows) -> torch.Tensor:
    """Applies biases, penalties, masks and minimum lengths to the logits of these rows, in
    place."""
    samplings = rows.parameters.samplings
    for biases in (rows.parameters.biases, rows.biases):
        if biases:
            _add_biases(logits, [(k, biases[i]) for k, i in enumerate(indices) if i in biases])
    if rows.counts:
        penalised = [(k, i) for k, i in enumerate(indices) if i in rows.counts]
        penalise(logits, [(k, samplings[i], rows.counts[i]) for k, i in penalised])
    masked = [place for place, i in enumerate(indices) if i in rows.masks]
    if masked:
        words = np.stack([rows.masks[indices[place]] for place in masked])
        forbidden = _forbidden(words, logits)
        if len(masked) == len(indices):
            logits.masked_fill_(forbidden, float("-inf"))
        else:
            index = _ints(masked, logits)
            logits[index] = logits[index].masked_fill_(forbidden, float("-inf"))
    if rows.excluded:
        excluded = {k: rows.excluded[i] for k, i in enumerate(indices) if i in rows.excluded}
        if excluded:
            exclude(logits, excluded)
    return logits


def _forbidden(words: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """Whether masks ``[rows, words]`` forbid each token, ``[rows, vocab]``. The device receives the
    masks as bits, because booleans would take eight times as many bytes."""
    vocab = logits.shape[1]
    if not costs_launches(logits):
        bits = np.unpackbits((~words).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, :vocab].view(np.bool_))
    packed = on_device(words.view(np.int32), logits.device).unsqueeze(-1)
    return ((packed & _bits(logits.device)) == 0).flatten(1)[:, :vocab]


@lru_cache(maxsize=16)
def _bits(device: torch.device) -> torch.Tensor:
    """The values of the 32 bits of a word, int32."""
    return on_device((np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32), device)


def _add_biases(logits: torch.Tensor, biased: Sequence[tuple[int, Bias]]) -> None:
    """Adds biases to rows. ``biased``: pairs of row and bias."""
    if not costs_launches(logits) and logits.dtype == torch.float32:
        # NumPy reads the biases in place.
        rows = logits.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            for place, bias in biased:
                rows[place, slice(None) if bias.tokens is None else bias.tokens] += bias.values
        return
    dense = [(place, bias.values) for place, bias in biased if bias.tokens is None]
    if dense:
        index = _ints([place for place, _ in dense], logits)
        logits.index_add_(
            0,
            index,
            _stacked([v for _, v in dense], logits.device).to(logits.dtype),
        )
    sparse = [(place, bias) for place, bias in biased if bias.tokens is not None]
    _add_short(logits, [(place, bias) for place, bias in sparse if len(bias.values) <= SHORT_BIAS])
    _add_long(logits, [(place, bias) for place, bias in sparse if len(bias.values) > SHORT_BIAS])


def _add_short(logits: torch.Tensor, biased: Sequence[tuple[int, Bias]]) -> None:
    """Adds sparse biases with few kernel launches."""
    if not biased:
        return
    counts = [len(bias.values) for _, bias in biased]
    where = np.repeat(np.array([place for place, _ in biased], dtype=np.int64), counts)
    tokens = np.concatenate([bias.tokens for _, bias in biased])
    amounts = np.concatenate([bias.values for _, bias in biased])
    indices = (
        on_device(where, logits.device),
        on_device(tokens, logits.device),
    )
    amount = on_device(amounts, logits.device).to(logits.dtype)
    logits.index_put_(indices, amount, accumulate=True)


def _add_long(logits: torch.Tensor, biased: Sequence[tuple[int, Bias]]) -> None:
    """Adds sparse biases row by row. If several rows have the same bias, it is copied to the device
    only once."""
    places: dict[Bias, list[int]] = {}
    for place, bias in biased:
        places.setdefault(bias, []).append(place)
    for bias, rows in places.items():
        assert bias.tokens is not None
        index = on_device(bias.tokens, logits.device)
        amount = on_device(bias.values, logits.device).to(logits.dtype)
        for row in rows:
            logits[row].index_copy_(0, index, logits[row].index_select(0, index) + amount)


def _stacked(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Stacks float32 arrays as the rows of one tensor. For CUDA, each array is copied only once on
    the host."""
    rows = torch.empty((len(arrays), len(arrays[0])), pin_memory=device.type == "cuda")
    np.stack(arrays, out=rows.numpy())
    return rows.to(device, non_blocking=True)


def _ints(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return on_device(np.array(values, dtype=np.int64), like.device)


# --- the most likely tokens -----------------------------------------------------------------------


def _most_likely(rows: Rows) -> int:
    """The number of most likely tokens to find for each row that reports them."""
    wanted = rows.parameters.top_logprobs
    most = max(wanted.values()) if wanted else 0
    if rows.inspected and any(i in rows.masks or i in rows.biases for i in rows.inspected):
        most = max(most, INSPECTED)
    return most


def _likely_rows(rows: Rows) -> list[int]:
    """The rows that report their most likely tokens. The time to find these tokens does not depend
    on the other rows, which may belong to other clients."""
    found = set(rows.parameters.top_logprobs)
    found.update(i for i in rows.inspected if i in rows.masks or i in rows.biases)
    return sorted(found)


def _likely(every: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The most likely tokens of each row and their log-probabilities, ``[rows, most]`` each, copied
    to the host. ``every``: the log-probabilities of all tokens."""
    if not most:
        return None
    logprobs, ids = every.topk(min(most, every.shape[-1]), -1)
    return ids.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)


def _likely_of(
    logits: torch.Tensor, best: torch.Tensor, of_best: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens of each row on a CPU and their log-probabilities, ``[rows, most]``
    each. ``of_best``: the log-probability of each row's ``best`` token, float64 ``[rows]``. As in
    ``_change``, the log-probability of another token is ``of_best`` plus the difference of the two
    logits."""
    values, ids = likeliest(logits, min(most, logits.shape[-1]))
    less = values - logits.gather(-1, best.unsqueeze(-1))
    return ids, of_best.unsqueeze(-1) + less


def _report_likely(result: Sampled, rows: Rows, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Reports the most likely tokens of each row whose request needs them. With ``inspect``, also
    reports how mask and bias affect them."""
    likely = dict(zip(_likely_rows(rows), ids.tolist(), strict=True))
    values = dict(zip(likely, logprobs.tolist(), strict=True))
    wanted = rows.parameters.top_logprobs
    for i, n in wanted.items():
        top = dict(zip(likely[i][:n], values[i][:n], strict=True))
        result.top[i] = top | {result.tokens[i]: result.logprobs[i]}
    for i in rows.inspected:
        mask, bias = rows.masks.get(i), rows.biases.get(i)
        if mask is None and bias is None:
            continue
        seen = likely[i][: wanted.get(i, INSPECTED)]
        added = {t: bias.of(t) for t in (*seen, result.tokens[i])} if bias is not None else {}
        result.cut[i] = [t for t in seen if not _allows(mask, t) or added.get(t) == -inf]
        result.biased[i] = {t: b for t, b in added.items() if b and b != -inf}
