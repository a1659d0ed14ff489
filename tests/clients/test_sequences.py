"""Trees of sequences, as the client builds them from a stream's entries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.clients.results import Sequences
from tokenbus.protocol.messages import Token

pytestmark = pytest.mark.anyio


def entry(token: int | None, pos: int, seq: int = 0, **fields: Any) -> Token:
    """An entry. The text of a token is the token's id in brackets."""
    text = {"text": f"[{token}]"} if token is not None else {}
    given = {"logprob": -1.0 if token is not None else None, "finish_reason": None} | text | fields
    return Token(token=token, stream_id=1, pos=pos, seq=seq, **given)


def collect(*entries: Token) -> Sequences:
    sequences = Sequences()
    for each in entries:
        sequences.add(each)
    return sequences


def test_a_fork_begins_with_what_its_parent_had_then() -> None:
    forked = collect(
        entry(1, 0),
        entry(2, 1),
        entry(None, 2, 1, parent=0),
        entry(3, 2),
        entry(4, 2, 1),
        entry(None, 3, 2, parent=1),
        entry(5, 3, 2),
    )
    assert [(s.seq, s.parent, s.tokens, s.text) for s in forked.listed()] == [
        (0, None, [1, 2, 3], "[1][2][3]"),
        (1, 0, [1, 2, 4], "[1][2][4]"),
        (2, 1, [1, 2, 4, 5], "[1][2][4][5]"),
    ]


def test_a_fork_may_take_back_what_it_had_from_its_parent() -> None:
    forked = collect(
        entry(1, 0),
        entry(2, 1),
        entry(3, 2),
        entry(None, 3, 1, parent=0),
        entry(9, 1, 1, backtrack=2),
        entry(4, 3),
    )
    assert [s.tokens for s in forked.listed()] == [[1, 2, 3, 4], [1, 9]]
    assert [s.texts for s in forked.listed()] == [["[1]", "[2]", "[3]", "[4]"], ["[1]", "[9]"]]


def test_a_fork_may_drop_tokens_in_its_first_entry() -> None:
    forked = collect(entry(1, 0), entry(2, 1), entry(9, 1, 1, parent=0, backtrack=1))
    assert [s.tokens for s in forked.listed()] == [[1, 2], [1, 9]]


def test_a_fork_before_the_first_token_knows_its_parent() -> None:
    forked = collect(entry(None, 0, 1, parent=0), entry(7, 0, 1), entry(8, 0))
    assert [(s.seq, s.parent, s.tokens) for s in forked.listed()] == [(0, None, [8]), (1, 0, [7])]


def test_logs_and_storage_are_each_sequence_s_own_and_are_not_taken_back() -> None:
    forked = collect(
        entry(1, 0, logs="a", storage=[{"WriteVar": 1}]),
        entry(None, 1, 1, parent=0),
        entry(None, 1, 1, logs="b"),
        entry(2, 0, backtrack=1, logs="c"),
    )
    assert [(s.logs, s.storage, s.tokens) for s in forked.listed()] == [
        ("ac", [{"WriteVar": 1}], [2]),
        ("b", [], [1]),
    ]


def test_text_that_was_held_back_belongs_to_the_last_token() -> None:
    [sequence] = collect(
        entry(1, 0, text=""), entry(None, 1, text="ä", finish_reason="stop")
    ).listed()
    assert sequence.texts == ["ä"]


@given(st.data())
def test_texts_and_tokens_stay_aligned_whatever_is_forked_and_taken_back(
    data: st.DataObject,
) -> None:
    wanted: dict[int, list[int]] = {0: []}
    sequences = Sequences()
    for number in range(data.draw(st.integers(0, 40))):
        seq = data.draw(st.sampled_from(sorted(wanted)))
        tokens = wanted[seq]
        if data.draw(st.integers(0, 3)) == 0:
            child = len(wanted)
            wanted[child] = list(tokens)
            sequences.add(entry(None, len(tokens), child, parent=seq))
            continue
        drop = data.draw(st.integers(0, len(tokens)))
        del tokens[len(tokens) - drop :]
        sequences.add(entry(number, len(tokens), seq, backtrack=drop))
        tokens.append(number)
    for sequence in sequences.listed():
        assert sequence.tokens == wanted[sequence.seq]
        assert sequence.texts == [f"[{t}]" for t in sequence.tokens]
        assert len(sequence.logprobs) == len(sequence.top_logprobs) == len(sequence.tokens)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("controller_failed", "ControllerError"),
        ("controller_timeout", "ControllerError"),
        ("deadlock", "ControllerError"),
        ("worker_lost", "UnavailableError"),
        (None, "ServiceError"),
    ],
)
def test_the_error_of_a_single_sequence_has_the_type_of_its_code(
    code: str | None, kind: str
) -> None:
    ended = entry(None, 0, finish_reason="error", error="it broke", code=code)
    failure = collect(entry(1, 0), ended).failure()
    assert type(failure).__name__ == kind
    assert failure is not None
    assert (failure.message, failure.code) == ("it broke", code or "internal")
    assert collect(entry(1, 0), entry(1, 0, 1), ended).failure() is None
