"""The answers to queries of controllers equal those by brute force. An override changes the
sampling of the next token. A moved stream replays the same numbers."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import Distribution, Override, Query, Sampling
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.controller.python import Controller, Decision, PythonProgram, go_on, sample
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.sampling import sampler
from tokenbus.workers.gpu.sampling.biases import Bias
from tokenbus.workers.gpu.sampling.distributions import TokenOptions
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from ...worlds.steered_engine import Bench, counting
from .controlled import Workers, check_nothing_is_left
from .moved import give
from .moved import transcript as transcript_of

pytestmark = pytest.mark.usefixtures("no_waiting")

VOCAB = 150
"""More than two parts of 64 tokens, and not a multiple of 32, so that a mask's last word is not
full."""
LOWEST = float(torch.finfo(torch.float32).min)
TOKENS = st.integers(0, VOCAB - 1)
QUERIES = st.builds(Query, st.integers(0, 64), st.lists(TOKENS, max_size=5, unique=True))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row with or without a query. Its bias, temperature and penalties do not change the
    answer."""
    query = draw(st.one_of(st.none(), QUERIES))
    bias = Bias(np.array([9.0], dtype=np.float32), np.array([draw(TOKENS)]))
    return Row(
        Sampling(temperature=draw(st.sampled_from([0.0, 1.0])), logit_bias={3: 2.0}),
        seed=draw(st.integers(0, 99)),
        seq=0,
        position=draw(st.integers(0, 9)),
        bias=draw(st.sampled_from([None, bias])),
        options=TokenOptions(query) if query is not None else None,
    )


@given(st.lists(rows(), min_size=1, max_size=4), st.integers(0, 1000), st.booleans())
def test_answers_are_those_of_brute_force_over_the_logits(
    drawn: list[Row], seed: int, impossible: bool
) -> None:
    torch.manual_seed(seed)
    # With multiples of an eighth, many logits are equal.
    logits = (torch.randn(len(drawn), VOCAB) * 16).round() / 8
    if impossible:
        logits[:, 5] = -float("inf")
    got = sampler.sample(logits.clone(), list(range(len(drawn))), drawn)
    every = torch.log_softmax(logits.double(), -1)
    for i, row in enumerate(drawn):
        query = row.options.query if row.options is not None else None
        if query is None:
            assert i not in got.distributions
            continue
        found, token = got.distributions[i], got.tokens[i]
        assert found.logprob == got.logprobs[i]
        assert found.rank == 1 + int((logits[i] > logits[i, token]).sum())
        possible = every[i][every[i] > -float("inf")]
        assert found.entropy == pytest.approx(-(possible.exp() * possible).sum().item(), abs=1e-4)
        order = sorted(range(VOCAB), key=lambda t: (-logits[i, t].item(), t))
        assert list(found.top) == order[: query.top]
        assert list(found.scores) == query.tokens
        for reported in (found.top, found.scores):
            for t, value in reported.items():
                assert value == pytest.approx(max(LOWEST, every[i, t].item()), abs=1e-4)


def test_a_query_changes_no_token_and_no_number_of_the_other_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    plain = [Row(Sampling(temperature=1.0), i, 0, 0) for i in range(3)]
    asking = [*plain[:2], Row(Sampling(temperature=1.0), 2, 0, 0, options=TokenOptions(Query(4)))]
    alone = sampler.sample(logits, [0, 1, 2], plain)
    got = sampler.sample(logits, [0, 1, 2], asking)
    assert (got.tokens, got.logprobs) == (alone.tokens, alone.logprobs)
    assert list(got.distributions) == [2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_device_answers_as_the_cpu_does() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, VOCAB)
    asking = [Row(Sampling(), 0, 0, 0, options=TokenOptions(Query(8, [3, 4]))) for _ in range(2)]
    here = sampler.sample(logits, [0, 1], asking).distributions
    there = sampler.sample(logits.cuda(), [0, 1], asking).distributions
    for i, one in here.items():
        assert list(there[i].top) == list(one.top)
        assert (there[i].rank, list(there[i].scores)) == (one.rank, list(one.scores))
        assert there[i].entropy == pytest.approx(one.entropy, abs=1e-4)


# --- in the engine --------------------------------------------------------------------------------


PROMPT = "def add(a, b):\n    "


def tokens_under(
    loaded: LoadedModel, sampling: Sampling, overlap: bool, override: Override | None
) -> list[int]:
    """The tokens of a sequence. Its controller overrides sampling parameters from the third token
    on."""
    bench = Bench(counting(loaded, overlap))
    seen = 0

    def answers(update: StepSequence) -> list[StepResult]:
        nonlocal seen
        seen += 1
        result = StepResult(update.request, update.seq, "sample")
        result.override = override if seen > 2 else None
        return [result]

    bench.add(1, loaded.tokenizer.encode(PROMPT), sampling)
    bench.run(answers)
    return bench.client(1).tokens[0]


def test_overrides_hold_for_their_tokens_only(embedded: LoadedModel, overlap: bool) -> None:
    hot = Sampling(temperature=1.5, seed=3, max_tokens=12)
    cold = Sampling(max_tokens=12)
    free = tokens_under(embedded, hot, overlap, None)
    greedy = tokens_under(embedded, hot, overlap, Override(temperature=0.0))
    other = tokens_under(embedded, hot, overlap, Override(seed=4))
    assert greedy[:2] == other[:2] == free[:2]
    assert len({tuple(tokens[2:]) for tokens in (free, greedy, other)}) == 3
    # With such a small ``top_p``, sampling is greedy.
    assert tokens_under(embedded, hot, overlap, Override(top_p=1e-6)) == greedy
    assert tokens_under(embedded, cold, overlap, Override(seed=4)) == tokens_under(
        embedded, cold, overlap, None
    )


# --- in a stream that moves -----------------------------------------------------------------------


class Watches(Controller):
    """At every fourth token, logs all answers to its query so far."""

    query = Query(top=3, tokens=[10, 11])

    def __init__(self) -> None:
        self.read: list[str] = []

    def mid_process(self, fork_group: list[int]) -> Decision:
        return sample(None, {20: 1.0})

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        self.read += [line(d) for d in self.distributions]
        if len(self.read) % 4 == 0:
            self.log(*self.read, sep="|")
        return go_on()


def line(seen: Distribution) -> str:
    return f"{seen.logprob!r} {seen.rank} {seen.entropy!r} {seen.top} {seen.scores}"


class Watched(Workers):
    """A request whose controller is ``Watches``."""

    def __init__(self, folder: Path, loaded: LoadedModel, storage: VariableStorage) -> None:
        loop = Loop(folder, loaded, overlap=False)
        super().__init__(loop, storage, Random(0), program=PythonProgram(Watches))


def check_numbers(messages: list[list[Token]], max_tokens: int) -> None:
    """Fails unless the controller has logged the distributions of the entries."""
    entries = [entry for message in messages for entry in message]
    seen = [entry.distribution for entry in entries if entry.token is not None]
    assert len(seen) == max_tokens
    lines = [line(one) for one in seen if one is not None]
    assert len(lines) == max_tokens
    logged = "".join(entry.logs for entry in entries).splitlines()
    assert logged == ["|".join(lines[:count]) for count in range(4, max_tokens + 1, 4)]


@pytest.mark.parametrize("cut", [1, 4, 7, 10])
def test_a_stream_that_moves_replays_the_numbers_that_its_controller_has_read(
    tmp_path: Path, embedded: LoadedModel, cut: int
) -> None:
    """The numbers of the replay have the same bits, even if the next worker computes other last
    bits for later tokens."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 5, "controller": "c"}
    storage = VariableStorage()
    whole = Watched(tmp_path, embedded, storage)
    give(whole.loop, b"GENERATE", body, 0)
    messages = whole.finish()
    check_numbers(messages, 12)
    second = Watched(tmp_path, embedded, storage)
    give(second.loop, b"GENERATE", body, Flag.MOVED, transcript_of(messages[:cut]))
    check_numbers([*messages[:cut], *second.finish()], 12)
    check_nothing_is_left(second.loop)
