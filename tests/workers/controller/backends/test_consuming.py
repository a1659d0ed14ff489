"""Many tokens are appended to a matcher in several calls, because a call keeps Python's lock."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenbus.workers.controller.backends.llguidance import consuming
from tokenbus.workers.controller.backends.llguidance.consuming import AT_ONCE, SHORT_S, consume


class Matcher:
    """Stands for an LLMatcher. ``costs``: the CPU time of each token."""

    def __init__(self, costs: list[float], allowed: int = 10_000) -> None:
        self.costs = costs
        self.allowed = allowed
        self.now = 0.0
        self.calls: list[int] = []
        """Number of tokens of each call."""
        self.lock = threading.Lock()

    def consume_tokens(self, tokens: list[int]) -> bool:
        assert self.lock.locked()
        self.calls.append(len(tokens))
        self.now += sum(self.costs[token] for token in tokens)
        return max(tokens) < self.allowed


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(matcher: Matcher, **options: Any) -> float | None:
        monkeypatch.setattr(consuming.time, "thread_time", lambda: matcher.now)
        tokens = range(len(matcher.costs))
        found = consume(matcher, tokens, lock=matcher.lock, **options)  # type: ignore[arg-type]
        assert not matcher.lock.locked()
        return found

    return run


def test_the_tokens_of_a_slow_grammar_are_appended_one_by_one(consumed: Any) -> None:
    matcher = Matcher([2 * SHORT_S] * 100)
    assert consumed(matcher) == pytest.approx(200 * SHORT_S)
    assert matcher.calls == [1] * 100


def test_quick_tokens_are_appended_together(consumed: Any) -> None:
    matcher = Matcher([0.0] * 100)
    assert consumed(matcher) == 0.0
    assert matcher.calls == [1, 2, 4, 8, 16, AT_ONCE, AT_ONCE, 5]


def test_after_a_slow_call_the_next_call_has_one_token(consumed: Any) -> None:
    matcher = Matcher([0.0, 0.0, 0.0, 1.0, *[0.0] * 6])
    consumed(matcher)
    assert matcher.calls == [1, 2, 4, 1, 2]


def test_no_token_is_appended_after_the_time_is_used_up(consumed: Any) -> None:
    matcher = Matcher([1.0] * 100)
    assert consumed(matcher, most_s=2.5) == 3.0
    assert matcher.calls == [1, 1, 1]


def test_a_token_that_is_not_allowed_ends_the_text(consumed: Any) -> None:
    matcher = Matcher([1.0] * 100, allowed=2)
    assert consumed(matcher) is None
    assert matcher.calls == [1, 1, 1]
