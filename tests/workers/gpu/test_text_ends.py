"""How the text of a constrained sequence ended, if the GPU worker ends it without a decision of the
controller."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.gpu.engine.sequence import TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model

from ...worlds.engine_client import GREEDY, PROMPT
from ...worlds.steered_engine import Bench, counting, one_thread, sample


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    with one_thread():
        yield load_model("embedded")


@pytest.fixture
def bench(embedded: LoadedModel) -> Bench:
    return Bench(counting(embedded))


def mask(bench: Bench, *tokens: int) -> np.ndarray:
    """A mask that allows these tokens."""
    words = np.zeros(bench.engine.mask_words, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words


def cancelled(bench: Bench) -> TokenOutput:
    """Cancels request 1 as ``GpuWorker`` does; returns its last output."""
    bench.steering.note_text_ends(1)
    [end] = bench.steering.with_notes(1, bench.engine.abort(1))
    assert end.finish_reason == "cancelled"
    return end


@pytest.mark.parametrize("whole", [True, False])
def test_a_cancelled_text_is_complete_where_its_mask_allows_the_end(
    bench: Bench, embedded: LoadedModel, whole: bool
) -> None:
    bench.add(1, PROMPT, GREEDY)
    update = StepSequence(1, 0, [])
    allowed = mask(bench, 5, *(embedded.eos_token_ids if whole else ()))
    bench.send(sample(update, attachment=0, constraint="cut"), masks=[allowed])
    bench._deliver(while_waiting=False)
    assert cancelled(bench).constraint == ("complete" if whole else "cut")


def test_how_a_cancelled_text_ends_is_unknown_while_its_decision_is_awaited(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    update = StepSequence(1, 0, [])
    bench.send(sample(update, attachment=0, constraint="cut"), masks=[mask(bench, 5)])
    while not bench.updates:
        bench.step()
    assert cancelled(bench).constraint is None


def test_a_controller_that_is_no_constraint_says_nothing_of_texts(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.send(sample(StepSequence(1, 0, []), attachment=0), masks=[mask(bench, 5)])
    bench._deliver(while_waiting=False)
    assert cancelled(bench).constraint is None


def test_a_text_that_ends_among_appended_tokens_is_cut_whatever_its_controller_says(
    bench: Bench,
) -> None:
    stop = GREEDY.__class__(max_tokens=20, stop=[7])
    bench.add(1, PROMPT, stop)
    bench.send(StepResult(1, 0, "stop", 0, [6, 7, 8], constraint="complete"))
    for _ in range(3):
        bench.step()
    assert [(o.token, o.constraint) for o in bench.received[1]] == [(6, None), (7, "cut")]
