"""The spans of a sequence name the weights and the arithmetic that computed each token."""

from __future__ import annotations

from typing import Any

from tokenbus.clients.results import Sequences
from tokenbus.protocol.messages import Span, Token

OLD, NEW = Span(weights="1", exact="AVX2"), Span(weights="2")


def entry(token: int | None, pos: int, **more: Any) -> Token:
    given: dict[str, Any] = {"logprob": -1.0, "finish_reason": None, "seq": 0, **more}
    return Token(token=token, stream_id=1, pos=pos, **given)


def spans_after(*entries: Token) -> dict[int, list[tuple[int, Span]]]:
    """The spans of each sequence after these entries."""
    sequences = Sequences()
    for one in entries:
        sequences.add(one)
    return {one.seq: one.spans for one in sequences.listed()}


def test_a_span_begins_with_the_token_that_has_it() -> None:
    begun = [entry(5, 0, span=OLD), entry(6, 1)]
    assert spans_after(*begun, entry(7, 2, span=NEW)) == {0: [(0, OLD), (2, NEW)]}
    assert spans_after(*begun, entry(7, 2, span=OLD)) == {0: [(0, OLD)]}


def test_a_span_without_tokens_is_dropped() -> None:
    begun = [entry(5, 0, span=OLD), entry(6, 1), entry(7, 2, span=NEW)]
    assert spans_after(*begun, entry(8, 2, backtrack=1)) == {0: [(0, OLD), (2, NEW)]}
    assert spans_after(*begun, entry(8, 1, backtrack=2)) == {0: [(0, OLD), (1, NEW)]}
    assert spans_after(*begun, entry(8, 0, backtrack=3)) == {0: [(0, NEW)]}


def test_a_fork_has_the_spans_of_its_tokens() -> None:
    begun = [entry(5, 0, span=OLD), entry(6, 1), entry(7, 2, span=NEW)]
    fork = entry(None, 2, seq=1, parent=0, logprob=None, span=NEW)
    found = spans_after(*begun, fork, entry(9, 2, seq=1))
    assert found == {0: [(0, OLD), (2, NEW)], 1: [(0, OLD), (2, NEW)]}


def test_only_the_last_entry_says_whether_a_sequence_is_exact() -> None:
    sequences = Sequences()
    sequences.add(entry(5, 0, span=OLD))
    assert sequences.listed()[0].exact is None
    sequences.add(entry(6, 1, finish_reason="length", exact=True))
    assert sequences.listed()[0].exact is True
