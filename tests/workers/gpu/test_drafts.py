"""Drafts and their lengths equal the results of plain searches and sums."""

from __future__ import annotations

import math
import random
from itertools import islice, repeat

from hypothesis import given
from hypothesis import strategies as st
from tokenbus.workers.gpu.speculation import earlier
from tokenbus.workers.gpu.speculation.earlier import EarlierTexts, SessionTexts
from tokenbus.workers.gpu.speculation.lengths import (
    CPU,
    CUDA,
    FIRST_GUESSES,
    MAX_DRAFT_TOKENS,
    MAX_WRITTEN,
    WRITTEN,
    Acceptance,
    Costs,
    kind_of,
    lengths,
    written_length,
)
from tokenbus.workers.gpu.speculation.ngrams import PromptLookup
from tokenbus.workers.gpu.speculation.places import LONGEST, PLACES, SIZE, Match

texts = st.lists(st.integers(0, 2), max_size=60)


def agreement(text: list[int], end: int, tokens: list[int]) -> int:
    """The number of tokens before ``end`` in ``text`` that equal the last tokens of ``tokens``, at
    most ``LONGEST``."""
    length = 0
    while length < min(end, len(tokens), LONGEST) and text[end - 1 - length] == tokens[~length]:
        length += 1
    return length


def found_by_search(tokens: list[int]) -> tuple[int, int] | None:
    """The end and the length of the longest match. The candidates are the last ``PLACES`` places
    where the last ``SIZE`` tokens have occurred before."""
    run = tokens[-SIZE:]
    ends = [e for e in range(SIZE, len(tokens)) if tokens[e - SIZE : e] == run]
    matches = [(agreement(tokens, end, tokens), end) for end in ends[-PLACES:]]
    if not matches:
        return None
    length, end = max(matches)
    return end, length


@given(texts, texts)
def test_a_match_is_the_longest_of_the_last_places(prompt: list[int], more: list[int]) -> None:
    tokens = list(prompt)
    lookup = PromptLookup(tokens)
    for token in [None, *more]:
        if token is not None:
            tokens.append(token)
        found = lookup.match()
        expected = found_by_search(tokens)
        if found is not None and found.length < SIZE:
            assert expected is None
            assert tokens[-found.length :] == tokens[found.end - found.length : found.end]
        else:
            assert (found and (found.end, found.length)) == expected


@given(texts, st.lists(st.tuples(st.integers(0, 6), texts), max_size=6))
def test_a_match_is_real_after_tokens_were_dropped(
    prompt: list[int], splices: list[tuple[int, list[int]]]
) -> None:
    tokens = list(prompt)
    lookup = PromptLookup(tokens)
    for drop, more in splices:
        lookup.match()
        del tokens[max(0, len(tokens) - drop) :]
        tokens += more
        found = lookup.match()
        if found is not None:
            assert 0 < found.length <= agreement(found.text, found.end, tokens)
            assert 0 <= found.end < len(found.text)


@given(texts, texts, texts)
def test_a_fork_finds_what_the_others_have_written(
    prompt: list[int], first: list[int], second: list[int]
) -> None:
    parent = list(prompt)
    of_parent = PromptLookup(parent)
    of_parent.match()
    child = list(parent)
    of_child = of_parent.fork(child)
    parent += first
    child += second
    for lookup, tokens in ((of_parent, parent), (of_child, child)):
        found = lookup.match()
        if found is None:
            assert found_by_search(tokens) is None or len(prompt) <= SIZE
        else:
            assert 0 < found.length <= agreement(found.text, found.end, tokens)
    repeated = [*range(10, 20)]
    parent += repeated
    of_parent.match()
    parent.append(99)
    of_parent.match()
    child += repeated
    found = of_child.match()
    assert found is not None
    assert found.text is parent
    assert of_child.draft(found, 5) == [99]


def test_a_long_prompt_is_indexed_over_several_lookups() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(10**6) for _ in range(10_000)]
    tokens += tokens[9_000:9_010]
    lookup = PromptLookup(tokens)
    found = [lookup.match() for _ in range(3)]
    assert found == [None, None, Match(tokens, 9_010, 10)]


def test_a_text_that_departs_from_what_it_repeats_is_found_again_by_one_token() -> None:
    tokens = [*range(100, 120), *range(100, 108)]
    lookup = PromptLookup(tokens)
    found = lookup.match()
    assert found is not None
    assert lookup.draft(found, 2) == [108, 109]
    tokens += [7, 8]
    assert lookup.match() is None
    tokens.append(110)
    assert lookup.match() == Match(tokens, 11, 1)
    tokens.append(111)
    assert lookup.match() == Match(tokens, 12, 2)
    tokens.append(112)
    assert lookup.match() == Match(tokens, 13, SIZE)


def test_a_token_that_differs_from_place_to_place_is_not_expected_again() -> None:
    tokens = [token for n in range(4) for token in (1, 2, 3, 100 + n, 4, 5, 6, 7)]
    tokens += [1, 2, 3]
    lookup = PromptLookup(tokens)
    tokens.pop()
    tokens.pop()
    found = lookup.match()
    assert found is not None
    assert lookup.draft(found, 4) == [2, 3, 103, 4]
    same, other, value, behind = islice(lookup.chances(found, 0.5), 4)
    assert same > 0.7
    assert other > 0.7
    assert value < 0.3
    assert behind == 0.5
    # The draft ends before the token that is unlikely.
    assert lengths([lookup.chances(found, 0.5)], 1, CPU)[0] <= 3
    assert lengths([repeat(same)], 1, CPU)[0] > 3


def test_what_followed_in_earlier_requests_counts_too() -> None:
    kept = EarlierTexts()
    for value in (100, 101, 102):
        kept.add([9, 9, 1, 2, 3, value])
    tokens = [8, 1, 2, 3]
    lookup = PromptLookup(tokens, kept)
    matches = [lookup.match() for _ in range(4)]
    assert matches[-1] is not None
    assert next(lookup.chances(matches[-1], 0.9)) < 0.5


def test_a_periodic_text_is_continued_beyond_its_end() -> None:
    tokens = [7, *[1, 2, 3, 4] * 3]
    lookup = PromptLookup(tokens)
    found = lookup.match()
    assert found is not None
    assert lookup.draft(found, 10) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_longer_matches_are_of_a_kind_that_is_trusted_more() -> None:
    kinds = [kind_of(length) for length in range(1, LONGEST + 1)]
    assert kinds == sorted(kinds)
    assert set(kinds) == set(range(WRITTEN))


@given(st.lists(st.tuples(st.integers(1, 32), st.floats(0, 1)), max_size=30))
def test_what_is_expected_is_a_probability(observed: list[tuple[int, float]]) -> None:
    acceptance = Acceptance()
    for drafted, part in observed:
        before = acceptance.expected(1)
        accepted = int(part * drafted)
        acceptance.observe(1, drafted, accepted)
        assert 0 <= acceptance.expected(1) <= 1
        if accepted in (0, drafted):
            assert (acceptance.expected(1) >= before) == (accepted == drafted)
        assert acceptance.expected(0) == FIRST_GUESSES[0]


probabilities = st.lists(st.lists(st.floats(0, 1), max_size=40), max_size=40)


def over_cost(counts: list[int], chances: list[list[float]], rows: int, costs: Costs) -> float:
    """The expected number of tokens of a step, divided by the step's cost."""
    tokens = rows + sum(
        math.prod(each[:k])
        for each, n in zip(chances, counts, strict=True)
        for k in range(1, n + 1)
    )
    drafted = sum(counts)
    return tokens / (costs.of(rows + drafted) + (drafted > 0) * costs.draft_cost * rows)


@given(probabilities, st.integers(0, 60), st.sampled_from([CPU, CUDA]), st.randoms())
def test_no_other_lengths_give_more(
    chances: list[list[float]], others: int, costs: Costs, rng: random.Random
) -> None:
    rows = len(chances) + others or 1
    counts = lengths(chances, rows, costs)
    assert all(
        0 <= n <= min(MAX_DRAFT_TOKENS, len(c)) for n, c in zip(counts, chances, strict=True)
    )
    best = over_cost(counts, chances, rows, costs)
    assert best >= over_cost([0] * len(chances), chances, rows, costs)
    for _ in range(5):
        others_counts = [max(0, n - rng.randrange(3)) for n in counts]
        assert best >= over_cost(others_counts, chances, rows, costs) - 1e-9


def test_rows_cost_little_until_arithmetic_decides() -> None:
    costs = Costs(4, 0.1, 0.5, 0.0, 1)
    assert [round(costs.of(rows), 6) for rows in (1, 2, 4, 5, 7)] == [1, 1.1, 1.3, 1.8, 2.8]


def test_a_lone_sequence_gets_long_drafts_and_a_full_batch_none() -> None:
    assert lengths([repeat(0.95)], 1, CPU)[0] >= 8
    assert lengths([repeat(1.0)], 1, CPU)[0] == MAX_DRAFT_TOKENS
    assert lengths([repeat(0.05)], 1, CPU) == [0]
    assert lengths([repeat(0.6) for _ in range(8)], 8, CPU) == [0] * 8
    alone = lengths([repeat(0.8)], 1, CPU)[0]
    among = lengths([repeat(0.8), repeat(0.8)], 2, CPU)[0]
    assert among < alone


def lookup_of(tokens: list[int], texts: EarlierTexts) -> Match | None:
    """The match of a new request, when all texts are in the index."""
    lookup = PromptLookup(tokens, texts)
    for _ in range(2 + texts.num_tokens // earlier.ADVANCE + len(texts._waiting)):
        found = lookup.match()
    return found


@given(st.lists(texts, max_size=6), texts)
def test_what_earlier_requests_of_the_session_wrote_is_found(
    before: list[list[int]], tokens: list[int]
) -> None:
    kept = EarlierTexts()
    for text in before:
        kept.add(list(text))
    found = lookup_of(tokens, kept)
    if found is None:
        run = tokens[-SIZE:]
        known = [text for text in [*before, tokens] if len(text) > SIZE]
        places = [text[e - SIZE : e] for text in known for e in range(SIZE, len(text))]
        assert len(run) < SIZE or len(tokens) <= SIZE or run not in places
    else:
        assert SIZE <= found.length <= agreement(found.text, found.end, tokens)


def test_a_conversation_is_kept_once() -> None:
    kept = EarlierTexts()
    for turn in range(1, 9):
        kept.add(list(range(500 * turn)))
    assert kept.num_tokens < 4000 + 8 * LONGEST
    found = lookup_of([7, *range(3990, 3999)], kept)
    assert found is not None
    assert found.text[found.end] == 3999


def test_the_texts_of_a_session_are_bounded_and_the_latest_are_found() -> None:
    kept = EarlierTexts()
    for number in range(200):
        kept.add([1000 * number + i for i in range(1000)])
        lookup_of([1000 * number + i for i in range(4, 8)], kept)
    assert kept.num_tokens <= 3 * earlier.HALF
    assert len(kept._older) + len(kept._newer) <= 2 * earlier.HALF + earlier.ADVANCE
    assert lookup_of([199_003, 199_004, 199_005, 199_006], kept) is not None
    assert lookup_of([3, 4, 5, 6], kept) is None


def test_sessions_that_are_longest_ago_are_dropped() -> None:
    sessions = SessionTexts()
    for session in range(100):
        sessions.add(session, list(range(10_000)))
        sessions.of(0)
    assert len(sessions) == earlier.MAX_TOKENS // 10_001
    assert sessions.of(0).num_tokens == sessions.of(99).num_tokens == 10_000
    assert sessions.of(50).num_tokens == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.05, 1))
def test_a_draft_model_writes_what_saves_the_most(found: list[float], forward_cost: float) -> None:
    rows = len(found)

    def tokens_over_cost(count: int) -> float:
        tokens = rows + sum(p**i for p in found for i in range(1, count + 1))
        cost = CPU.of(rows + rows * count) + (CPU.draft_cost * rows if count else 0)
        return tokens / (cost + count * forward_cost * CPU.of(rows))

    count = written_length(found, rows, CPU, forward_cost)
    best = max(map(tokens_over_cost, range(MAX_WRITTEN + 1)))
    assert abs(tokens_over_cost(count) - best) < 1e-9


def test_a_draft_model_writes_more_the_surer_it_is_and_nothing_where_that_costs() -> None:
    lone = [written_length([p], 1, CPU, 0.1) for p in (0.1, 0.5, 0.7, 0.99)]
    assert lone[0] == 0
    assert lone == sorted(lone)
    assert lone[-1] == MAX_WRITTEN
    assert written_length([0.6], 1, CPU, 1.0) == 0
    assert written_length([0.6] * 64, 64, CPU, 0.1) == 0
    assert written_length([], 1, CPU, 0.1) == 0
