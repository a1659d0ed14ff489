"""Biases of controllers of each kind in an engine. Each token equals the token by brute force over
the logits, with and without drafts, and after a move of the stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.protocol.messages import Token
from tokenbus.workers.gpu.engine.seeds import derived_seed
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import sample

from ...counts import examples
from ...worlds.steered_engine import one_thread
from . import shapes
from .bias_rules import PROGRAMS, RULES, VOCAB, Rule, bent, words
from .moved import asked_of
from .test_constrained_drafts import Run
from .test_speculation import accepted
from .ties import Asked, tokens_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_waiting")]

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 4},
    {"frequency_penalty": 0.25, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 6, "top_k": 9, "repetition_penalty": 1.25},
    {"temperature": 0.5, "seed": 7, "top_p": 0.8, "n": 2},
    {"logit_bias": {11: 1.0, 13: -2.0}},
]


@pytest.fixture(scope="module")
def tiny() -> Iterator[LoadedModel]:
    with one_thread():
        yield wrap_model("tiny", shapes.tiny_model())


@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_each_token_is_that_of_brute_force(tmp_path: Path, tiny: LoadedModel, kind: str) -> None:
    program, taken = PROGRAMS[kind](), 0

    @settings(
        max_examples=examples(10),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(rng=st.randoms(use_true_random=False))
    def check(rng: Random) -> None:
        nonlocal taken
        rule = RULES[kind].drawn(rng)
        body = {
            "prompt": [10, 11, 12, 13, 14] * 2 + [rng.randrange(VOCAB), 10],
            "max_tokens": rng.randrange(8, 33),
            "ignore_eos": True,
            "controller": kind,
            "controller_arg": rule.arg,
        } | rng.choice(SAMPLINGS)
        shared = rng.choice([False, True])
        way = (rng.random() < 0.8, rng.choice([False, True]))
        first = Run(tmp_path, tiny, program, way, body, shared=shared)
        sent = first.finish()
        asked = asked_of(tiny, body)
        taken += accepted(first.engine)
        check_entries(sent, rule, asked)
        if rng.random() < 0.5:
            before = sent[: rng.randrange(1, len(sent))]
            second = Run(tmp_path, tiny, program, way, body, *before, shared=shared)
            check_entries([*before, *second.finish()], rule, asked)

    check()
    assert (taken > 0) == (kind != "aici")


def check_entries(messages: Sequence[list[Token]], rule: Rule, asked: Asked) -> None:
    """Fails unless each sampled token follows from the logits, the bias, the mask and the request's
    sampling."""
    entries = [entry for message in messages for entry in message]
    texts: dict[int, list[Token]] = {}
    for entry in entries:
        assert not entry.error, entry.error
        if entry.parent is not None and entry.seq not in texts:
            texts[entry.seq] = [e for e in texts.get(entry.parent, ()) if e.pos < entry.pos]
        text = texts.setdefault(entry.seq, [])
        if entry.token is not None and entry.logprob is not None:
            before = tokens_of(text)
            drops = sum(e.seq == entry.seq and e.backtrack > 0 for e in text)
            check_token(entry, before, drops, rule, asked)
        text.append(entry)
    assert {len(tokens_of(text)) for text in texts.values()} == {asked.sampling.max_tokens}


def check_token(entry: Token, before: list[int], drops: int, rule: Rule, asked: Asked) -> None:
    """Fails if the entry is wrong after the tokens ``before``. ``drops``: how often the sequence
    has dropped tokens."""
    seed = asked.sampling.seed or 0
    tokens, sampling = [*asked.prompt, *before], asked.sampling
    state = (len(before), tokens[-1], entry.seq)
    logits = shapes.logits_after(asked.model, tokens)
    row = Row(
        sampling,
        derived_seed(seed ^ derived_seed(drops)) if drops else seed,
        entry.seq,
        len(before),
        asked.prompt,
        before,
        words(rule.mask(*state)),
    )
    for raised in (0.0, shapes.TIE):
        # A token is also correct if a rounding error could make it the likeliest.
        raises = logits.clone()
        raises[entry.token] += raised
        every = torch.from_numpy(bent(raises.numpy(), rule.bias(*state)))
        got = sample(every.unsqueeze(0), [0], [row])
        if got.tokens == [entry.token]:
            break
    assert got.tokens == [entry.token]
    own = torch.log_softmax(logits, -1)[entry.token].item()
    assert entry.logprob == pytest.approx(own, abs=1e-3)
