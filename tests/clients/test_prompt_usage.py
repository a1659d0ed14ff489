"""The first entry of a stream has the numbers of prompt tokens and of cached prompt tokens."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from tokenbus.clients import Client, RequestError, Token

from ..processes import Bus

pytestmark = pytest.mark.process


def unseen(length: int) -> list[int]:
    """A random prompt, of which no part is cached, because no other test sends it."""
    return [random.randrange(5, 500) for _ in range(length)]


def usage(entries: list[Token]) -> tuple[int, int]:
    """The numbers of prompt tokens and of cached tokens of a stream. Fails if any entry except the
    first one has them."""
    first, *rest = entries
    assert not any(entry.prompt_tokens or entry.cached_tokens for entry in rest)
    return first.prompt_tokens, first.cached_tokens


def test_the_first_entry_says_what_of_the_prompt_was_cached(client: Client) -> None:
    prompt = unseen(200)
    assert usage(list(client.generate(prompt, max_tokens=4, ignore_eos=True))) == (200, 0)
    stream = client.generate(prompt, max_tokens=4, ignore_eos=True)
    tokens, cached = usage(list(stream))
    assert tokens == 200
    assert 100 < cached < 200
    [sequence] = stream.sequences
    assert (sequence.prompt_tokens, sequence.cached_tokens) == (200, cached)


def test_each_sequence_of_a_stream_shares_the_prompt(client: Client) -> None:
    stream = client.generate(unseen(90), max_tokens=3, n=3, temperature=1.0)
    assert usage(list(stream)) == (90, 0)
    assert [(s.prompt_tokens, s.cached_tokens) for s in stream.sequences] == [(90, 0)] * 3


def test_a_score_and_a_buffered_prompt_count_too(client: Client) -> None:
    prompt = unseen(150)
    first = client.score(prompt, [5, 6, 7])
    assert (first.prompt_tokens, first.cached_tokens) == (150, 0)
    client.generate(prompt, max_tokens=2, ignore_eos=True).wait()
    client.buffer("beginning", prompt)
    second = client.score([9], [5, 6, 7], buffers=["beginning"])
    assert second.prompt_tokens == 151
    assert 75 < second.cached_tokens <= 150


def test_a_stream_of_one_entry_has_usage(client: Client) -> None:
    assert usage(list(client.generate(unseen(30), max_tokens=1))) == (30, 0)


@pytest.mark.parametrize(
    ("arg", "first"),
    [("[ab]+", "fork"), ({"a": 1}, "failure")],
)
def test_a_stream_that_begins_with_a_fork_or_a_failure_has_usage(
    steered: Bus, arg: object, first: str
) -> None:
    with steered.client() as client:
        stream = client.generate(
            unseen(40),
            max_tokens=3,
            n=2,
            controller="regex" if first == "fork" else "yacc",
            controller_arg=arg if isinstance(arg, str) else json.dumps(arg),
        )
        entries: list[Token] = []
        with contextlib.suppress(RequestError):
            entries.extend(stream)
        assert (entries[0].parent is not None) == (first == "fork")
        assert (entries[0].error is not None) == (first == "failure")
        assert usage(entries) == (40, 0)


def test_a_second_score_after_the_same_prompt_finds_it_in_the_cache(client: Client) -> None:
    prompt = unseen(150)
    assert client.score(prompt, [5, 6, 7]).cached_tokens == 0
    again = client.score(prompt, [8, 9])
    assert 75 < again.cached_tokens <= 150
    assert again.logprobs == pytest.approx(client.score(prompt, [8, 9]).logprobs, abs=1e-5)
