"""In a *look*, a controller reads the distribution of the next token without sampling. Forks and
splices compute only tokens whose keys and values are missing."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tokenbus.protocol.sampling import Distribution, Query, Sampling
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.gpu.engine import one_by_one, step
from tokenbus.workers.gpu.engine.engine import TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.sampling.distributions import Answers, look

from ...worlds.engine_client import alone
from ...worlds.steered_engine import Bench, CountingEngine, counting
from .shapes import logits_after

PROMPT = list(range(5, 45))
SAMPLING = Sampling(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)


@pytest.fixture
def engine(embedded: LoadedModel, overlap: bool) -> CountingEngine:
    return counting(embedded, overlap)


def looked(engine: CountingEngine) -> Distribution:
    """Runs steps until a look is answered; returns the answer."""
    for _ in range(20):
        for output in engine.step():
            if output.distribution is not None:
                assert (output.token, output.logprob) == (None, None)
                return output.distribution
    raise AssertionError("the look was not answered")


def tokens_of(engine: CountingEngine) -> list[int]:
    """Runs all steps; returns the tokens of sequence 0."""
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return [o.token for o in outputs if o.token is not None and o.seq == 0]


def test_a_look_has_the_numbers_of_the_logits_and_changes_no_token(
    engine: CountingEngine, embedded: LoadedModel
) -> None:
    engine.add(1, PROMPT, SAMPLING)
    engine.look(1, 0, Query(5, [7, 8]))
    seen = looked(engine)
    every = torch.log_softmax(logits_after(embedded.model, PROMPT), -1)
    assert list(seen.top) == every.topk(5).indices.tolist()
    numbers = [*seen.top.values(), *seen.scores.values()]
    ids = [*seen.top, 7, 8]
    assert numbers == pytest.approx(every[ids].tolist(), abs=1e-4)
    assert (seen.logprob, seen.rank) == (0.0, 0)
    assert seen.entropy == pytest.approx(-(every.exp() * every).sum().item(), abs=1e-3)
    assert not engine.has_work
    # A second look, and sampling, use the same logits.
    forwarded = engine.forwarded
    engine.look(1, 0, Query(5, [7, 8]))
    assert looked(engine) == seen
    engine.reschedule(1, 0)
    token = next(o.token for o in engine.step() if o.token is not None)
    assert engine.forwarded - forwarded == engine.overlaps
    assert [token, *tokens_of(engine)] == alone(embedded, PROMPT, SAMPLING)
    assert engine.stats()["kv_blocks_used"] == 0


def test_other_sequences_are_sampled_in_the_step_of_a_look(
    engine: CountingEngine, embedded: LoadedModel
) -> None:
    engine.add(1, PROMPT, SAMPLING)
    engine.add(2, PROMPT[:9], SAMPLING)
    engine.look(1, 0, Query(1))
    outputs = engine.step()
    assert [(o.request, o.token is None) for o in outputs] == [(1, True), (2, False)]
    while engine.has_work:
        outputs += engine.step()
    engine.reschedule(1, 0)
    while engine.has_work:
        outputs += engine.step()
    for request, prompt in ((1, PROMPT), (2, PROMPT[:9])):
        tokens = [o.token for o in outputs if o.request == request and o.token is not None]
        assert tokens == alone(embedded, prompt, SAMPLING)


def test_a_splice_discards_a_look(engine: CountingEngine) -> None:
    engine.add(1, PROMPT, SAMPLING)
    engine.look(1, 0, Query(1))
    engine.splice(1, 0, 0, [9])
    assert all(o.distribution is None for o in engine.step())
    engine.abort(1)


@pytest.mark.parametrize("fails", ["once", "always"])
def test_a_look_in_a_step_that_fails_is_answered_again(
    engine: CountingEngine,
    embedded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    def failing(logits: torch.Tensor, looks: list[tuple[int, Query]]) -> Answers:
        raise RuntimeError("no")

    engine.add(1, PROMPT, SAMPLING)
    engine.add(2, PROMPT[:9], SAMPLING)
    engine.look(1, 0, Query(3))
    monkeypatch.setattr(step, "look", failing)
    if fails == "always":
        monkeypatch.setattr(one_by_one, "look", failing)
    outputs = engine.step()
    monkeypatch.setattr(step, "look", look)
    [first] = [o for o in outputs if o.request == 1]
    if fails == "always":
        assert "reading the distribution of its next token failed: no" in (first.error or "")
    else:
        assert first.distribution is not None
        engine.reschedule(1, 0)
    while engine.has_work:
        outputs += engine.step()
    got = [o.token for o in outputs if o.request == 2 and o.token is not None]
    assert got == alone(embedded, PROMPT[:9], SAMPLING)
    got = [o.token for o in outputs if o.request == 1 and o.token is not None]
    assert got == ([] if fails == "always" else alone(embedded, PROMPT, SAMPLING))


def test_logits_that_are_not_numbers_end_the_sequence_that_looks(
    engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_numbers(logits: torch.Tensor, looks: list[tuple[int, Query]]) -> Answers:
        return look(torch.full_like(logits, float("nan")), looks)

    monkeypatch.setattr(step, "look", without_numbers)
    engine.add(1, PROMPT, SAMPLING)
    engine.look(1, 0, Query(1))
    [end] = engine.step()
    assert end.finish_reason == "error"
    assert engine.stats()["kv_blocks_used"] == 0


# --- tokens that are computed once ----------------------------------------------------------------


def test_a_splice_that_appends_computes_only_the_appended_tokens(embedded: LoadedModel) -> None:
    engine = counting(embedded)
    engine.add(1, PROMPT, SAMPLING)
    engine.step()
    engine.suspend(1, 0)
    engine.forwarded = 0
    engine.splice(1, 0, 1, [9])
    engine.resume(1, 0)
    engine.step()
    assert engine.forwarded == 1


@pytest.mark.parametrize("drop", [0, 1])
def test_a_sequence_without_logits_computes_its_last_token_again(
    embedded: LoadedModel, drop: int
) -> None:
    engine = counting(embedded)
    engine.add(1, PROMPT, SAMPLING)
    outputs = engine.step()
    if drop:
        engine.splice(1, 0, 1, [])
    else:
        # The logits of the last token are discarded.
        engine.look(1, 0, Query(1))
        outputs += engine.step()
        engine.suspend(1, 0)
        engine.resume(1, 0)
    engine.forwarded = 0
    outputs += engine.step()
    assert engine.forwarded == 1
    tokens = [o.token for o in outputs if o.token is not None]
    assert len(tokens) == 2
    if not drop:
        assert tokens == alone(embedded, PROMPT, SAMPLING)[:2]


def test_forks_that_append_do_not_wait_for_logits(embedded: LoadedModel, overlap: bool) -> None:
    """A sequence is suspended after a look, and then forks. Each fork appends another token, and
    looks again: one forward with one token for each fork."""
    engine = counting(embedded, overlap)
    bench = Bench(engine)
    seen: dict[int, Distribution] = {}

    def answers(update: StepSequence) -> list[StepResult]:
        if update.distributions:
            seen[update.seq] = update.distributions[0]
        if not update.distributions:
            return [StepResult(1, 0, "look", query=Query(2))]
        if update.seq == 0 and not bench.now:
            bench.now = 1.0
            first, second = seen[0].top
            engine.forwarded = 0
            bench.send(StepResult(1, 0, "suspend"))
            return [
                StepResult(1, 0, "fork", children=[1]),
                StepResult(1, 0, "look", ff_tokens=[first], query=Query(2)),
                StepResult(1, 1, "look", ff_tokens=[second], query=Query(2)),
            ]
        return [StepResult(1, update.seq, "stop")]

    bench.add(1, PROMPT, SAMPLING)
    bench.run(answers)
    assert engine.forwarded == 2
    assert set(seen) == {0, 1}
    first = logits_after(embedded.model, [*PROMPT, *bench.tokens(1, 0)])
    second = logits_after(embedded.model, [*PROMPT, *bench.tokens(1, 1)])
    for seq, logits in enumerate((first, second)):
        assert list(seen[seq].top) == cast("list[int]", logits.topk(2).indices.tolist())
    bench.check_nothing_is_left()


def test_forks_of_which_one_samples_wait_for_logits(embedded: LoadedModel) -> None:
    engine = counting(embedded)
    bench = Bench(engine)
    rounds = 0

    def answers(update: StepSequence) -> list[StepResult]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            return [StepResult(1, 0, "sample")]
        if rounds == 2:
            bench.send(StepResult(1, 0, "suspend"))
            return [
                StepResult(1, 0, "fork", children=[1]),
                StepResult(1, 0, "sample", ff_tokens=[9]),
                StepResult(1, 1, "sample"),
            ]
        return [StepResult(1, update.seq, "stop")]

    bench.add(1, PROMPT, SAMPLING)
    bench.run(answers)
    assert bench.tokens(1, 1)[:1] == alone(embedded, PROMPT, SAMPLING)[:1]
    bench.check_nothing_is_left()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_fork_that_appends_computes_what_a_failed_forward_has_not_computed(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The forward of the fork's last shared token fails. The parent has ended, or the weights are
    replaced, so that the forward is not computed again for the parent."""
    engine = counting(embedded, overlap=ahead)
    engine.add(1, PROMPT, SAMPLING)
    first = engine.step() if not ahead else []
    real = engine._runner._run

    def failing(*_: object) -> torch.Tensor:
        monkeypatch.setattr(engine._runner, "_run", real)
        raise RuntimeError("no")

    if ahead:
        # The step that is finished here launches the forward that fails.
        pending = engine.begin()
        assert pending.forward is not None
        pending.forward.work.wait()
        monkeypatch.setattr(engine._runner, "_run", failing)
        first = engine.finish(pending).as_outputs()
    else:
        monkeypatch.setattr(engine._runner, "_run", failing)
        pending = engine.begin()
    tokens = [o.token for o in first if o.token is not None]
    [child] = engine.fork(1, 0, 1)
    engine.splice(1, child, 0, [9])
    engine.look(1, child, Query(5))
    if ahead:
        engine._stepper.cancel_ahead()
    else:
        engine.end(1, 0)
        assert all(o.distribution is None for o in engine.finish(pending))
    seen = looked(engine)
    assert len(tokens) == 1
    every = torch.log_softmax(logits_after(embedded.model, [*PROMPT, *tokens, 9]), -1)
    top = every.topk(5)
    assert list(seen.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
