"""``TokenSet`` makes masks, and behaves like a set of Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.workers.controller.host import allowed
from tokenbus.workers.controller.python import TokenSet

from .runs import vocabulary

sets = st.sets(st.integers(0, 99))


@given(sets, sets)
def test_token_sets_are_sets(left: set[int], right: set[int]) -> None:
    a, b = TokenSet(100, left), TokenSet(100, right)
    assert set(a | b) == left | right
    assert set(a & b) == left & right
    assert set(a ^ b) == left ^ right
    assert set(a - b) == left - right
    assert set(~a) == set(range(100)) - left
    assert (len(a), bool(a), list(a)) == (len(left), bool(left), sorted(left))
    assert all((token in a) == (token in left) for token in range(-1, 101))
    assert (a == b) == (left == right)
    assert list(allowed(a.mask, 100)) == sorted(left)
    assert len(a.mask) == 16


def test_a_token_set_has_all_none_or_those_whose_bytes_pass_a_test() -> None:
    assert len(TokenSet.all(100)) == 100
    assert not TokenSet.none(100)
    digits = TokenSet.where(vocabulary(), bytes.isdigit)
    assert {vocabulary().token(token) for token in digits} >= {b"%d" % i for i in range(10)}
    assert all(vocabulary().token(token).isdigit() for token in digits)


def test_a_token_set_refuses_what_is_no_token_of_its_vocabulary() -> None:
    with pytest.raises(ValueError, match="token 100 is not in the vocabulary, which is 0 to 99"):
        TokenSet(100, [100])
    with pytest.raises(ValueError, match="vocabularies of 100 and 64 tokens"):
        TokenSet(100) | TokenSet(64)
