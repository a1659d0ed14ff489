"""Random controllers, whose decisions arrive in time or late: each sequence has exactly the
expected tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.controller import biases
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import wrap_model

from ...counts import examples
from ...worlds.engine_client import ClientView, only
from ...worlds.steered_engine import Bench, one_thread
from .shapes import TIE, tiny_model

VOCAB = 64
MAX_FORKS = 8
Key = tuple[int, int]


class Under(NamedTuple):
    """The tokens that a mask allows, and the values of a bias; None: no mask or no bias."""

    allowed: set[int] | None = None
    bias: list[float] | None = None


@dataclass
class Expected:
    """The expected state of a sequence."""

    prompt: list[int]
    longest: int
    tokens: list[int] = field(default_factory=list)
    asked: tuple[list[int], Under] | None = None
    """The requested sampling: the tokens before it, and its mask and bias."""
    owes: bool = True
    """Whether the controller must decide next."""
    suspended: bool = False
    over: bool = False
    """Whether the controller has sent its last decision, or no decision is expected."""

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.longest

    def splice(self, drop: int, tokens: list[int]) -> None:
        del self.tokens[len(self.tokens) - drop :]
        self.tokens = (self.tokens + tokens)[: self.longest] if tokens else self.tokens


class Play:
    """Requests with random decisions."""

    def __init__(self, rng: random.Random) -> None:
        block = 16 * 2 * 8 * 4
        config = EngineConfig(
            kv_cache_bytes=rng.choice([30, 400]) * block,
            max_num_seqs=rng.choice([3, 64]),
            max_num_batched_tokens=48,
            max_forks=MAX_FORKS,
            overlap=rng.choice([False, True]),
        )
        self.rng = rng
        self.bench = Bench(
            Engine(wrap_model("tiny", tiny_model()), config), rng.choice([None, "far"])
        )
        self.sequences: dict[Key, Expected] = {}
        self.parents: dict[Key, int] = {}
        self.drawn: list[tuple[list[int], Under, int]] = []
        """For each sampled token: the tokens before it, its mask and bias, and the token."""
        self.masks: list[np.ndarray] = []
        """The masks and biases of the next message."""
        self.next: dict[int, int] = {}
        """The number of the next fork, by request."""

    # --- requests -------------------------------------------------------------------------------

    def add(self, request: int) -> None:
        rng = self.rng
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        longest = rng.randrange(1, 30)
        sampling = Sampling(max_tokens=longest, ignore_eos=True)
        self.bench.add(request, prompt, sampling)
        self.sequences[request, 0] = Expected(prompt, longest)
        self.next[request] = 1
        free = request + 100
        self.bench.add(free, prompt, sampling, controller=False)

    def drop(self, request: int) -> None:
        """The client cancels the request."""
        self.bench.engine.abort(request)
        self.bench.steering.forget(request)
        self.bench.live[request] = 0
        for key in [key for key in self.sequences if key[0] == request]:
            del self.sequences[key]

    # --- the controllers ------------------------------------------------------------------------

    def on_update(self, update: StepSequence) -> None:
        one = self.sequences.get((update.request, update.seq))
        if one is None or one.over:
            return
        for token in update.tokens:
            assert one.asked is not None, "sampled without a decision"
            self.drawn.append(([*one.prompt, *one.asked[0]], one.asked[1], token))
            assert one.tokens == one.asked[0]
            one.tokens.append(token)
            one.asked = None
        assert not update.tokens or (update.ended is not None) == one.full
        one.owes = True

    def decide(self, key: Key, quietly: bool) -> list[StepResult]:
        """The controller's next decisions. ``quietly``: it only splices, samples and stops."""
        one, rng = self.sequences[key], self.rng
        one.owes = False
        if one.full:
            one.over = True
            return [StepResult(*key, "stop")]
        action = rng.choice(["sample"] * 12 + ["fork", "suspend", "stop", "error"])
        if quietly:
            action = "sample"
        result = StepResult(*key, action)  # type: ignore[arg-type]
        if rng.random() < 0.25 and action != "error":
            drop = rng.randrange(min(4, len(one.tokens)) + 1)
            append = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
            if drop or append:
                one.splice(drop, append)
                result.backtrack, result.ff_tokens = drop, append
        if action == "fork":
            return self._forked(key, result)
        one.suspended = action == "suspend" and not one.full
        one.over = action in ("stop", "error")
        if action == "sample" and not one.full:
            allowed = self._mask(result)
            one.asked = list(one.tokens), Under(allowed, self._bias(result, allowed))
        return [result]

    def _forked(self, key: Key, result: StepResult) -> list[StepResult]:
        one, request = self.sequences[key], key[0]
        first, count = self.next[request], self.rng.randrange(1, 4)
        if first + count > MAX_FORKS:
            result.action = "sample"
            one.asked = None if one.full else (list(one.tokens), Under())
            return [result]
        result.children = list(range(first, first + count))
        self.next[request] += count
        results = [result]
        if one.full:
            # The sequence ends with the appended tokens, so its forks are not made.
            children = [StepResult(request, child, "sample") for child in result.children]
            return [result, StepResult(*key, "sample"), *children]
        for child in result.children:
            self.sequences[request, child] = Expected(one.prompt, one.longest, list(one.tokens))
            self.parents[request, child] = key[1]
        for seq in (key[1], *result.children):
            results += self.decide((request, seq), False)
        return results

    def _mask(self, result: StepResult) -> set[int] | None:
        if self.rng.random() < 0.5:
            return None
        tokens = set(self.rng.sample(range(VOCAB), self.rng.randrange(1, 9)))
        self.masks.append(only(VOCAB, *tokens))
        result.attachment = len(self.masks) - 1
        return tokens

    def _bias(self, result: StepResult, allowed: set[int] | None) -> list[float] | None:
        """A random bias that changes which tokens are likeliest. At least one allowed token remains
        possible."""
        rng = self.rng
        if rng.random() < 0.5:
            return None
        bias = [0.0] * VOCAB
        for token in rng.sample(range(VOCAB), rng.choice([3, VOCAB])):
            bias[token] = rng.choice([8.0, -8.0, 0.5, -math.inf])
        bias[min(allowed or {0})] = 1.0
        values = np.array(bias, dtype=np.float32)
        changed = np.flatnonzero(values)
        made = biases.dense(values, VOCAB)
        if rng.random() < 0.5:
            sparse = biases.sparse(changed, values[changed], VOCAB)
            assert sparse is not None
            made = sparse
        result.bias_attachment = len(self.masks)
        self.masks.append(np.frombuffer(made.encoded(), dtype=np.uint32))
        return bias

    # --- the run --------------------------------------------------------------------------------

    def step(self, quietly: bool = False) -> None:
        rng, bench = self.rng, self.bench
        turn = [key for key, one in self.sequences.items() if one.owes or one.suspended]
        rng.shuffle(turn)
        for key in turn:
            one = self.sequences[key]
            if quietly or rng.random() < (0.2 if one.suspended else 0.7):
                one.suspended = False
                self.masks = []
                results = self.decide(key, quietly)
                bench.send(*results, masks=self.masks, while_waiting=rng.random() < 0.3)
        bench.starts.clear()
        bench.step()
        updates, bench.updates = bench.updates, []
        for update in updates:
            self.on_update(update)

    def check(self, reference: Reference) -> None:
        """Fails unless the clients have received exactly what the controllers and the model
        decided."""
        clients: dict[int, ClientView] = {
            request: self.bench.client(request) for request in self.bench.live
        }
        for key, one in self.sequences.items():
            assert clients[key[0]].tokens[key[1]] == one.tokens, key
        parents = {
            (o.request, o.seq): o.parent
            for outputs in self.bench.received.values()
            for o in outputs
            if o.parent is not None and (o.request, 0) in self.sequences
        }
        assert parents == {
            key: p for key, p in self.parents.items() if (key[0], 0) in self.sequences
        }
        wholes = [[*one.prompt, *one.tokens] for one in self.sequences.values()]
        reference.check(self.drawn, wholes)


class Reference:
    """The model by plain forwards."""

    def __init__(self) -> None:
        self._model = tiny_model()

    @torch.inference_mode()
    def check(self, drawn: Iterable[tuple[list[int], Under, int]], wholes: list[list[int]]) -> None:
        """Fails unless each sampled token is the likeliest allowed token by the logits plus the
        bias."""
        known: dict[tuple[int, ...], torch.Tensor] = {}
        for whole in wholes:
            rows = self._model(torch.tensor([whole])).logits[0]
            known.update((tuple(whole[: i + 1]), row) for i, row in enumerate(rows))
        for prefix, (allowed, bias), token in drawn:
            row = known.get(tuple(prefix))
            if row is None:
                row = self._model(torch.tensor([prefix])).logits[0, -1]
            if bias is not None:
                row = row + torch.tensor(bias)
            may = sorted(allowed) if allowed is not None else list(range(VOCAB))
            assert token in may
            assert row[token] >= row[may].max() - TIE


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    with one_thread():
        yield Reference()


@settings(
    max_examples=examples(20),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(rng=st.randoms(use_true_random=False))
def test_random_decisions_give_their_tokens_and_leave_nothing(
    reference: Reference, rng: random.Random
) -> None:
    play = Play(rng)
    for request in range(1, 4):
        play.add(request)
    for number in range(60):
        play.step()
        if number == 20 and rng.random() < 0.3:
            play.drop(rng.randrange(1, 4))
    for _ in range(1000):
        if not any(play.bench.live.values()):
            break
        play.step(quietly=True)
    bench = play.bench
    assert not any(bench.live.values()), "a sequence has not ended"
    play.check(reference)
    bench.check_nothing_is_left()
