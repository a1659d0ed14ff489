"""Pages against a naive model: every sequence keeps its own list of tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tokenbus.workers.gpu.block_manager import PADDING_PAGE, BlockManager, BlockTable

from ...counts import examples

PAGE = 4
PAGES = 12


class Held:
    """A sequence, its pages, and what it believes to be in them."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.tokens: list[int] = []


class Pages(RuleBasedStateMachine):
    """Random sequences write into pages; ``memory`` is what a device would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(PAGES, PAGE)
        self.memory = [[-1] * PAGE for _ in range(PAGES)]
        self.live: list[Held] = []

    sequences: Bundle[Held] = Bundle("sequences")

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * PAGE),
    )
    def begin(self, tokens: list[int]) -> Held:
        held = Held()
        hit = self.blocks.match(held.table, tokens, len(tokens) - 1)
        assert hit % PAGE == 0
        held.tokens = tokens[:hit]
        self.live.append(held)
        self._write(held, tokens[hit:])
        return held

    @rule(held=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=PAGE + 1))
    def append(self, held: Held, tokens: list[int]) -> None:
        self._write(held, tokens)

    @rule(target=sequences, held=sequences, part=st.floats(0, 1))
    def fork(self, held: Held, part: float) -> Held:
        at = int(part * len(held.tokens))
        child = Held()
        child.table = self.blocks.fork(held.table, at)
        child.tokens = held.tokens[:at]
        self.live.append(child)
        return child

    @rule(held=sequences, part=st.floats(0, 1))
    def truncate(self, held: Held, part: float) -> None:
        at = int(part * len(held.tokens))
        self.blocks.truncate(held.table, at)
        del held.tokens[at:]

    @rule(held=consumes(sequences))
    def free(self, held: Held) -> None:
        self.blocks.free(held.table)
        self.live.remove(held)

    @rule(held=consumes(sequences))
    def discard(self, held: Held) -> None:
        for page in self.blocks.discard(held.table):
            self.memory[page] = [-1] * PAGE
        self.live.remove(held)

    def _write(self, held: Held, tokens: list[int]) -> None:
        start, end = len(held.tokens), len(held.tokens) + len(tokens)
        before = (list(held.table.pages), self.blocks.num_available)
        copies = self.blocks.reserve(held.table, start, end)
        if copies is None:
            assert (held.table.pages, self.blocks.num_available) == before
            return
        for source, to in copies:
            self.memory[to] = list(self.memory[source])
        held.tokens += tokens
        for i in range(start, end):
            self.memory[held.table.pages[i // PAGE]][i % PAGE] = held.tokens[i]
        self.blocks.commit(held.table, held.tokens, end)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for held in self.live:
            read = [self.memory[p][k] for p in held.table.pages for k in range(PAGE)]
            assert read[: len(held.tokens)] == held.tokens

    @invariant()
    def no_page_is_lost_or_given_twice(self) -> None:
        used = {page for held in self.live for page in held.table.pages}
        assert PADDING_PAGE not in used
        assert self.blocks.num_held == len(used)
        assert self.blocks.num_available == PAGES - 1 - len(used)


Pages.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestPages = Pages.TestCase


def _filled(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    table = BlockTable()
    assert blocks.reserve(table, 0, len(tokens)) == []
    blocks.commit(table, tokens, len(tokens))
    return table


def test_a_beginning_that_was_seen_is_found_again() -> None:
    blocks = BlockManager(PAGES, PAGE)
    first = _filled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.free(first)
    again = BlockTable()
    assert blocks.match(again, [1, 2, 3, 4, 5, 6, 7, 8, 0], 8) == 8
    other = BlockTable()
    assert blocks.match(other, [1, 2, 3, 0, 5, 6, 7, 8], 7) == 0


def test_the_least_recently_used_pages_go_first() -> None:
    blocks = BlockManager(4, PAGE)
    old, new = _filled(blocks, [1] * PAGE), _filled(blocks, [2] * PAGE)
    blocks.free(old)
    blocks.free(new)
    taker = BlockTable()
    assert blocks.reserve(taker, 0, 2 * PAGE) == []
    assert blocks.match(BlockTable(), [1] * PAGE + [0], PAGE) == 0
    assert blocks.match(BlockTable(), [2] * PAGE + [0], PAGE) == PAGE


def test_forks_share_pages_until_one_of_them_writes() -> None:
    blocks = BlockManager(PAGES, PAGE)
    parent = _filled(blocks, [1, 2, 3, 4, 5])
    forks = [blocks.fork(parent, 5) for _ in range(3)]
    assert blocks.num_held == 2
    copies = blocks.reserve(forks[0], 5, 6)
    assert copies == [(parent.pages[1], forks[0].pages[1])]
    assert blocks.num_held == 3


def test_a_cache_without_a_page_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages, not 1"):
        BlockManager(1, PAGE)
