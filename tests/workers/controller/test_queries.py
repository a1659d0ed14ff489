"""Queries about distributions, and overrides of sampling parameters: how Python controllers send
them, which are refused, and what a replay reads."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.sampling import Distribution, Override, Query
from tokenbus.protocol.worker_messages import Replay, StepResult
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    PythonProgram,
    append,
    fork,
    go_on,
    sample,
    splice,
    stop,
)
from tokenbus.workers.controller.queries import checked_override
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.variables import VariableStorage

from .played import BYTES, vocabulary
from .test_sequence_group import SIZE, decides, opened

NAN, INF = float("nan"), float("inf")
SEEN = Distribution(logprob=-0.5, rank=2, entropy=1.25, top={7: -0.25, 8: -0.5}, scores={9: -3.0})


class Reads(Controller):
    """Sets a query for every token in init_prompt, and logs the answers."""

    def init_prompt(self, prompt: list[int]) -> None:
        self.query = Query(top=2, tokens=[9])

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        found = [(d.logprob, d.rank, d.entropy, d.top, d.scores) for d in self.distributions]
        self.log(tokens, found, end=";")
        return go_on()


def answered(group: SequenceGroup, token: int, *seen: Distribution) -> list[StepResult]:
    """The results of the round after a token, with the answers to its controller's query."""
    found = group.step(0, [token], False, None, distributions=seen)
    assert found is not None
    return found[1]()


def test_a_query_of_init_prompt_is_sent_with_each_decision_and_its_answer_is_read() -> None:
    group, [result] = opened(Reads)
    for token in (8, 7):
        assert result.query == Query(2, [9])
        group.record([result])
        [result] = answered(group, token, SEEN)
        assert result.logs == f"[{token}] [(-0.5, 2, 1.25, {{7: -0.25, 8: -0.5}}, {{9: -3.0}})];"


def test_a_query_of_one_decision_replaces_that_of_the_controller_once() -> None:
    class Once(Reads):
        rounds = 0

        def mid_process(self, fork_group: list[int]) -> Decision:
            self.rounds += 1
            return sample(query=Query(tokens=[5, 5, 6]) if self.rounds == 2 else None)

    group, [result] = opened(Once)
    asked = [result.query]
    for _ in range(2):
        group.record([result])
        [result] = answered(group, 8, SEEN)
        asked.append(result.query)
    assert asked == [Query(2, [9]), Query(0, [5, 6]), Query(2, [9])]


def test_a_controller_that_does_not_ask_sends_nothing_and_reads_nothing() -> None:
    group, [result] = opened(decides())
    assert (result.query, result.override) == (None, None)
    group.record([result])
    assert answered(group, 8)[0].query is None
    assert not group._sequences[0].host.distributions


def test_appended_tokens_have_no_distributions() -> None:
    class Appends(Reads):
        def pre_process(self) -> Decision:
            return append([5]) if self.distributions else go_on()

    group, [result] = opened(Appends)
    group.record([result])
    [result] = answered(group, 8, SEEN)
    assert result.logs.endswith("[5] [];")
    assert result.ff_tokens == [5]


def test_forks_read_the_distributions_of_their_parent() -> None:
    class Forks(Reads):
        def pre_process(self) -> Decision:
            return fork(2) if self.distributions and self.seq == 0 else go_on()

        def mid_process(self, fork_group: list[int]) -> Decision:
            self.log(len(fork_group), *[d.rank for d in self.distributions], end=".")
            return splice(1, [7 + fork_group.index(self.seq)]) if len(fork_group) > 1 else sample()

    group, [result] = opened(Forks)
    group.record([result])
    _, *results = answered(group, 8, SEEN)
    assert [r.logs.split(";")[-2] for r in results] == ["2 2.[7] []", "2 2.[8] []"]
    assert [(r.query, r.ff_tokens) for r in results] == [(Query(2, [9]), [7]), (Query(2, [9]), [8])]


def test_a_round_that_ends_the_sequence_asks_nothing() -> None:
    group, [result] = opened(Reads)
    group.record([result])
    [result] = answered(group, vocabulary(BYTES).eos, SEEN)
    assert (result.action, result.query) == ("stop", None)


def test_overrides_are_sent_with_their_decision_only() -> None:
    kind = decides([], [sample(override=Override(0.5, 0.25, 7)), sample(), stop()])
    group, [result] = opened(kind)
    assert result.override == Override(0.5, 0.25, 7)
    group.record([result])
    [result] = answered(group, 8)
    assert result.override is None


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (5, "the query is 5; expected Query(top, tokens)"),
        (Query(top=65), "top of the query is 65; expected a whole number, 0 to 64"),
        (Query(top=-1), "top of the query is -1"),
        (Query(top=1.5), "top of the query is 1.5"),  # type: ignore[arg-type]
        (Query(tokens=[SIZE]), f"a token of the query is {SIZE}; expected a whole number"),
        (Query(tokens=[-1]), "a token of the query is -1"),
        (Query(tokens=7), "the tokens of the query are 7"),  # type: ignore[arg-type]
        (Query(tokens=list(range(257))), "the query has 257 tokens; at most 256 are allowed"),
    ],
)
def test_a_wrong_query_ends_the_sequence_with_an_error_that_names_it(
    query: Any, error: str
) -> None:
    _, [result] = opened(decides([], [sample(query=query)]))
    assert result.action == "error"
    assert error in (result.error or "")


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ({"temperature": 1}, "expected Override(temperature, top_p, seed)"),
        (Override(temperature=-1.0), "the temperature of the override is -1.0"),
        (Override(temperature=NAN), "the temperature of the override is nan"),
        (Override(temperature=INF), "the temperature of the override is inf"),
        (Override(temperature="hot"), "'hot'; expected a number"),  # type: ignore[arg-type]
        (Override(top_p=0.0), "the top_p of the override is 0.0"),
        (Override(top_p=1.5), "the top_p of the override is 1.5"),
        (Override(seed=-1), "the seed of the override is -1"),
        (Override(seed=2**63), "the seed of the override is"),
    ],
)
def test_a_wrong_override_ends_the_sequence_with_an_error_that_names_it(
    override: Any, error: str
) -> None:
    _, [result] = opened(decides([], [sample(override=override)]))
    assert result.action == "error"
    assert error in (result.error or "")


def test_a_replay_reads_the_numbers_of_the_first_time() -> None:
    class Keeps(Reads):
        read: tuple[Distribution, ...] = ()

        def post_process(self, tokens: list[int], backtrack: int) -> Decision:
            self.read = (*self.read, *self.distributions)
            self.log([d.rank for d in self.read], end=";")
            return go_on()

    group = SequenceGroup(1, 9, Limits(), b"", 100, False, VariableStorage().apply)
    other = Distribution(logprob=-9.0, rank=5, entropy=0.5)
    told = [Replay(0, [8, 7, 6], distributions={0: SEEN, 2: other})]
    steps = group.begin_again(PythonProgram(Keeps), vocabulary(BYTES), [1, 2, 3], 1, told)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            [result] = ended.value
            break
    assert result.logs == "[2, 5];"
    assert result.query == Query(2, [9])


def test_a_temperature_beyond_floats_is_refused() -> None:
    with pytest.raises(ControllerError, match="expected a number"):
        checked_override(Override(temperature=10**400))
