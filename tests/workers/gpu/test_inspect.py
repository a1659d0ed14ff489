"""``inspect`` reports for each token how many tokens the mask allowed, which likely tokens it
excluded, and the time of the round."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from msgspec import UNSET
from tokenbus.clients import Client, Token

from ...processes import Bus

pytestmark = pytest.mark.process

DIGITS = frozenset("0123456789")


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


@pytest.fixture
def digits(client: Client) -> set[int]:
    """The tokens that contain only digits."""
    vocabulary = json.loads(client.tokenizer().json)["model"]["vocab"]
    return {number for text, number in vocabulary.items() if DIGITS.issuperset(text)}


def entries(client: Client, **options: object) -> list[Token]:
    """The entries of a request for at least three digits."""
    return list(
        client.generate(
            "def ",
            controller="regex",
            controller_arg="[0-9]{3,}",
            max_tokens=5,
            **options,  # type: ignore[arg-type]
        )
    )


def test_each_token_says_how_many_tokens_its_mask_allowed(client: Client, digits: set[int]) -> None:
    first, *rest = [e for e in entries(client, inspect=True) if e.token is not None]
    assert first.allowed == len(digits)
    assert all(e.allowed in (len(digits), len(digits) + 1) for e in rest)
    assert all(e.round_us > 0 for e in (first, *rest))


@pytest.mark.parametrize("top_logprobs", [0, 5, 9])
def test_the_likely_tokens_that_the_mask_forbade_are_named_the_likeliest_first(
    client: Client, digits: set[int], top_logprobs: int
) -> None:
    looked_at = top_logprobs or 5
    seen = entries(client, inspect=True, top_logprobs=top_logprobs)
    known = entries(client, top_logprobs=looked_at)
    assert [e.token for e in seen] == [e.token for e in known]
    for entry, same in zip(seen, known, strict=True):
        if entry.token is None:
            continue
        assert isinstance(same.top_logprobs, dict)
        likely = list(same.top_logprobs)[:looked_at]
        eos = entry.allowed == len(digits) + 1
        allowed = digits | (set(client.model_info().eos_token_ids) if eos else set())
        assert entry.cut == [token for token in likely if token not in allowed]
    assert len(seen[0].cut) >= 3


def test_an_appended_token_has_no_mask_and_one_without_a_controller_neither(
    client: Client,
) -> None:
    stream = client.generate(
        "x", controller="choice", controller_arg=["alpha beta gamma"], inspect=True
    )
    appended = [e for e in stream if e.token is not None and e.logprob is None]
    assert appended
    free = list(client.generate("x", max_tokens=3, inspect=True, top_logprobs=2))
    assert all(e.allowed is UNSET and not e.cut and not e.round_us for e in (*appended, *free))


def test_forks_are_inspected_too(client: Client, digits: set[int]) -> None:
    by_seq: dict[int, list[Token]] = {}
    for entry in entries(client, inspect=True, n=3, temperature=1.0):
        if entry.token is not None:
            by_seq.setdefault(entry.seq, []).append(entry)
    assert len(by_seq) == 3
    for of_sequence in by_seq.values():
        assert of_sequence[0].allowed == len(digits)
        assert of_sequence[0].round_us > 0


def test_without_inspect_nothing_is_said(client: Client) -> None:
    for entry in entries(client, top_logprobs=5):
        assert (entry.allowed, entry.cut, entry.round_us) == (UNSET, [], 0)
