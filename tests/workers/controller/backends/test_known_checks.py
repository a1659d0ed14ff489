"""Known results of checks take the same steps again, so that they do not change any outcome."""

from __future__ import annotations

import pytest
from tokenbus.workers.controller.backends.llguidance.checking.budget import (
    MAX_KNOWN,
    MAX_KNOWN_LENGTH,
    Budget,
    Exhausted,
    Known,
)


class Check:
    """A check that takes seven steps and counts its calls."""

    def __init__(self, budget: Budget) -> None:
        self.calls = 0
        self._budget = budget

    def __call__(self) -> bool:
        self.calls += 1
        self._budget.take(7)
        return True


def test_a_known_result_takes_its_steps_from_each_budget() -> None:
    known = Known[str, bool]()
    for calls in (1, 0, 0):
        budget = Budget(10)
        check = Check(budget)
        assert known.find("a", 1, budget, check)
        assert (check.calls, budget.left) == (calls, 3)
    with pytest.raises(Exhausted):
        known.find("a", 1, Budget(6), Check(Budget(0)))


def test_an_exhausted_check_is_not_known() -> None:
    known = Known[str, bool]()
    with pytest.raises(Exhausted):
        known.find("a", 1, budget := Budget(6), Check(budget))
    budget = Budget(10)
    check = Check(budget)
    assert known.find("a", 1, budget, check)
    assert check.calls == 1


def test_the_number_and_the_length_of_known_texts_are_bounded() -> None:
    known = Known[str, bool]()
    budget = Budget(1_000_000)
    check = Check(budget)
    for number in range(2 * MAX_KNOWN):
        known.find(str(number), 4, budget, check)
    assert len(known) <= MAX_KNOWN
    calls = check.calls
    for _ in range(2):
        known.find("long", MAX_KNOWN_LENGTH + 1, budget, check)
    assert check.calls == calls + 2
