"""A copy of a controller makes a decision for each token of a draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    PythonProgram,
    go_on,
    sample,
    stop,
)
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.variables import VariableStorage

from .played import BYTES, UNHURRIED, vocabulary

DRAFT = [11, 12, 13, 14]


class Counting(Controller):
    """Samples with a bias for the token whose id is one above the last token's id. Counts the calls
    of mid_process."""

    takes_drafts = True

    def __init__(self) -> None:
        self.rounds = self.last = 0

    def mid_process(self, fork_group: list[int]) -> Decision:
        self.rounds += 1
        return sample(bias={self.last + 1: float(self.rounds)})

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        assert len(tokens) == 1
        self.last = tokens[-1]
        return go_on()


def changed(change: Callable[[Counting], Decision | None]) -> type[Counting]:
    """A controller that calls ``change`` after token 12, and returns its decision if it has one."""

    class Changed(Counting):
        def mid_process(self, fork_group: list[int]) -> Decision:
            other = change(self) if self.last == 12 else None
            return other or super().mid_process(fork_group)

    return Changed


class Group:
    """A request with one sequence."""

    def __init__(self, kind: type[Controller]) -> None:
        self._group = SequenceGroup(1, 1, UNHURRIED, b"", 50, False, VariableStorage().apply)
        results = self._group.begin(PythonProgram(kind), vocabulary(BYTES), [1, 2])
        self.takes_drafts = results[0].takes_drafts
        self._group.record(results)

    def step(self, tokens: list[int], draft: list[int] | None = None) -> StepResult:
        stepped = self._group.step(0, tokens, False, None, draft=draft or [])
        assert stepped is not None
        results = stepped[1]()
        self._group.record(results)
        (result,) = results
        return result

    @property
    def biases(self) -> list[bytes | None]:
        return [bias for _, bias in self._group.along(0, 99)]


def test_a_controller_takes_no_drafts_unless_it_says_so() -> None:
    class Plain(Controller):
        pass

    assert not Group(Plain).takes_drafts
    assert Group(Counting).takes_drafts


def test_the_decisions_along_a_draft_are_those_of_the_rounds_that_follow() -> None:
    group, plain = Group(Counting), Group(Counting)
    ahead = group.step([10], DRAFT)
    assert ahead.along == [0] * 4
    assert ahead.biases_along == [0] * 4
    along = group.biases
    plain.step([10])
    for token, bias in zip(DRAFT, along, strict=True):
        plain.step([token])
        assert plain._group.bias(0) == bias
    group.step(DRAFT)
    assert group._group.bias(0) == plain._group.bias(0)


def test_the_biases_along_a_draft_are_not_kept_after_they_were_sent() -> None:
    group = Group(Counting)
    group.step([10], DRAFT)
    assert all(group.biases)
    places = group._group._sequences[0].along
    assert len(places) >= len(DRAFT)
    assert not any(place.bias for place in places)


@pytest.mark.parametrize(
    "change",
    [
        lambda controller: controller.log("a log"),
        lambda controller: controller.vars.set("x", "1"),
        lambda controller: controller.vars.get("x") and None,
        lambda controller: 1 / 0,
    ],
    ids=["log", "write", "read", "exception"],
)
def test_a_draft_ends_before_a_round_with_effects(
    change: Callable[[Counting], Decision | None],
) -> None:
    group = Group(changed(change))
    result = group.step([10], DRAFT)
    assert result.action == "sample"
    assert len(result.along) == 1
    assert not result.logs
    assert not result.storage


def test_a_controller_that_decides_otherwise_than_its_copy_fails() -> None:
    class Fickle(Counting):
        original = True

        def pre_process(self) -> Decision:
            return stop() if self.original and self.last == 11 else go_on()

        def clone(self) -> Fickle:
            copied = super().clone()
            copied.original = False
            return copied

    group = Group(Fickle)
    assert len(group.step([10], DRAFT).along) == 4
    result = group.step(DRAFT)
    assert result.action == "error"
    assert "after token 11 of a draft, the controller did not sample" in (result.error or "")
