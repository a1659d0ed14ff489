"""At the client's request, each token has a report of the distribution from which it was drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.columns import kept_of
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import MAX_KEPT, Sampling
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.sampling import candidates
from tokenbus.workers.gpu.sampling.candidates import processed_logprobs
from tokenbus.workers.gpu.sampling.races import Draws, kept_tokens
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import sample

from ...worlds.gpu_worker_loop import Loop
from .moved import Moving, finish, give, token_messages

VOCAB = 200
CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.6, "temperature": 1.3},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    {"temperature": 0.0},
    {"logit_bias": {3: 4.0, 5: -100.0}},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.8},
]
MASK = np.random.default_rng(1).integers(0, 2**32, size=-(-VOCAB // 32), dtype=np.uint32)


def rows() -> tuple[torch.Tensor, list[Row]]:
    """Rows of logits with all kinds of sampling, each with and without a mask."""
    found = []
    for number, cut in enumerate(CUTS):
        given = {"temperature": 1.0, **cut}
        sampling = Sampling(processed_logprobs=True, kept=True, **given)
        found += [Row(sampling, number, 0, 4, [3, 9], [9, 11], m) for m in (None, MASK)]
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (len(found), VOCAB)))
    return logits.float(), found


def wanted(logits: np.ndarray, row: Row) -> tuple[set[int], np.ndarray]:
    """The candidates of a row and the log-probabilities of all tokens, computed plainly."""
    s, values = row.sampling, logits.astype(np.float64)
    for token, bias in s.logit_bias.items():
        values[token] += bias
    for token in {*row.prompt, *row.generated} if s.repetition_penalty != 1 else ():
        values[token] *= 1 / s.repetition_penalty if values[token] > 0 else s.repetition_penalty
    for token in set(row.generated):
        values[token] -= s.presence_penalty
    if row.mask is not None:
        allowed = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:VOCAB]
        values[allowed == 0] = -np.inf
    order = np.argsort(-values, kind="stable")
    if s.temperature == 0:
        return {int(order[0])}, np.where(np.arange(VOCAB) == order[0], 0.0, -np.inf)
    values /= s.temperature
    kept = [int(t) for t in order if values[t] > -np.inf][: s.top_k or VOCAB]
    weights = np.exp(values[kept] - values[kept].max())
    if s.top_p < 1:
        before = np.cumsum(weights) - weights
        kept = [t for t, b in zip(kept, before, strict=True) if b < s.top_p * weights.sum()]
    most = values[kept].max()
    kept = [t for t in kept if np.exp(values[t] - most) >= s.min_p]
    logprobs = np.full(VOCAB, -np.inf)
    logprobs[kept] = values[kept] - most - np.log(np.exp(values[kept] - most).sum())
    return set(kept), logprobs


def test_each_kind_of_sampling_reports_what_was_left() -> None:
    logits, every = rows()
    drawn = sample(logits, range(len(every)), every)
    for i, row in enumerate(every):
        kept, logprobs = wanted(logits[i].numpy(), row)
        processed, packed = drawn.candidates[i]
        assert packed is not None
        found = kept_of(packed)
        assert found == (VOCAB if len(kept) == VOCAB else sorted(kept))
        assert drawn.tokens[i] in kept
        assert processed == pytest.approx(logprobs[drawn.tokens[i]], abs=1e-5)


def test_without_a_cut_the_processed_log_probability_is_the_models_own() -> None:
    logits, every = rows()
    drawn = sample(logits, range(len(every)), every)
    assert drawn.candidates[0] == (drawn.logprobs[0], VOCAB)


def test_the_report_of_a_row_does_not_depend_on_the_batch() -> None:
    logits, every = rows()
    together = sample(logits, range(len(every)), every).candidates
    for i, row in enumerate(every):
        assert sample(logits[i : i + 1], [0], [row]).candidates[0] == together[i]


def test_the_report_of_a_row_does_not_depend_on_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, every = rows()
    one_block = sample(logits, range(len(every)), every).candidates
    monkeypatch.setattr(candidates, "CACHED", 5 * VOCAB)
    assert sample(logits, range(len(every)), every).candidates == one_block


def test_a_cpu_computes_the_reports_of_many_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call for each row, one request with ``n`` 128 slows down all other streams."""
    blocks: list[int] = []

    def counted(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        blocks.append(len(logits))
        return kept_tokens(logits, draws)

    monkeypatch.setattr(candidates, "kept_tokens", counted)
    size = candidates.CACHED // 64
    asked = [Row(Sampling(kept=True, temperature=1.0, top_k=9), i, 0, 0) for i in range(128)]
    sample(torch.zeros(1, size), [0] * 128, asked)
    assert blocks == [64, 64]


def test_log_probabilities_are_computed_only_for_rows_that_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_rows: list[int] = []

    def counted(logits: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(logits))
        return processed_logprobs(logits, *more)

    monkeypatch.setattr(candidates, "processed_logprobs", counted)
    options: list[dict[str, Any]] = [{"kept": True}, {"processed_logprobs": True}]
    for asked in (options[:1], options):
        every = [Row(Sampling(temperature=1.0, top_k=2, **one), 1, 0, 0) for one in asked]
        found = sample(torch.zeros(1, 9), [0] * len(asked), every).candidates
    assert num_rows == [1]
    assert (found[0].processed, found[1].kept) == (None, None)
    assert kept_of(found[0].kept) == [0, 1]  # type: ignore[arg-type]
    assert found[1].processed == pytest.approx(-np.log(2))


def test_more_candidates_than_the_bound_are_counted() -> None:
    size = MAX_KEPT + 2
    row = Row(Sampling(kept=True, temperature=1.0, logit_bias={0: -float("inf")}), 1, 0, 0)
    found = sample(torch.zeros(1, size), [0], [row]).candidates[0]
    assert found == (None, size - 1)


def test_only_requests_that_ask_get_a_report() -> None:
    found = sample(torch.zeros(2, 9), [0, 1], [Row(Sampling(), 1, 0, 0)] * 2)
    assert found.candidates == {}


BODY: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 9,
    "ignore_eos": True,
    "temperature": 0.9,
    "top_p": 0.7,
    "seed": 3,
    "processed_logprobs": True,
    "kept": True,
}


def entries(folder: Path, loaded: LoadedModel, flags: int, **more: Any) -> list[Token]:
    loop = Loop(folder, loaded, speculation=bool(more.get("drafts")))
    body = BODY | {name: value for name, value in more.items() if name != "drafts"}
    give(loop, b"GENERATE", body, flags)
    finish(loop)
    return sorted((e for m in token_messages(loop) for e in m), key=lambda e: (e.seq, e.pos))


def test_entries_and_columns_have_the_same_report(tmp_path: Path, embedded: LoadedModel) -> None:
    plain = entries(tmp_path, embedded, 0, n=2)
    assert all(isinstance(e.processed, float) and e.token in e.kept for e in plain)  # type: ignore[operator]
    assert entries(tmp_path, embedded, Flag.COLUMNS, n=2) == plain


def test_drafts_do_not_change_the_report(tmp_path: Path, embedded: LoadedModel) -> None:
    again = {"prompt": [5, 6, 7, 8] * 9, "max_tokens": 24, "temperature": 0.5}
    plain = entries(tmp_path, embedded, 0, **again)
    assert entries(tmp_path, embedded, Flag.COLUMNS, drafts=True, **again) == plain


@pytest.mark.parametrize("flags", [0, Flag.COLUMNS])
def test_a_moved_stream_keeps_its_reports(
    tmp_path: Path, embedded: LoadedModel, flags: int
) -> None:
    moving = Moving(tmp_path, embedded, b"GENERATE", BODY | {"n": 2}, flags)
    for cut in (1, 4):
        moving.check(cut)
