"""The block manager compared with a naive model, in which every sequence has its own list of
tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tokenbus.workers.gpu.engine.block_manager import PADDING_BLOCK, BlockManager, BlockTable

from ...counts import examples

BLOCK = 4
BLOCKS = 12


class Held:
    """A sequence, its blocks, and the tokens that must be in them."""

    def __init__(self) -> None:
        self.block_table = BlockTable()
        self.tokens: list[int] = []


class Blocks(RuleBasedStateMachine):
    """Random sequences write into blocks. ``memory`` represents the content of a device's
    blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(BLOCKS, BLOCK)
        self.memory = [[-1] * BLOCK for _ in range(BLOCKS)]
        self.live: list[Held] = []

    sequences: Bundle[Held] = Bundle("sequences")

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK),
    )
    def begin(self, tokens: list[int]) -> Held:
        held = Held()
        hit = self.blocks.match(held.block_table, tokens, len(tokens) - 1)
        assert hit % BLOCK == 0
        held.tokens = tokens[:hit]
        self.live.append(held)
        self._write(held, tokens[hit:])
        return held

    @rule(held=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK + 1))
    def append(self, held: Held, tokens: list[int]) -> None:
        self._write(held, tokens)

    @rule(target=sequences, held=sequences, part=st.floats(0, 1))
    def fork(self, held: Held, part: float) -> Held:
        at = int(part * len(held.tokens))
        child = Held()
        child.block_table = self.blocks.fork(held.block_table, at)
        child.tokens = held.tokens[:at]
        self.live.append(child)
        return child

    @rule(held=sequences, part=st.floats(0, 1))
    def truncate(self, held: Held, part: float) -> None:
        at = int(part * len(held.tokens))
        self.blocks.truncate(held.block_table, at)
        del held.tokens[at:]

    @rule(held=consumes(sequences))
    def free(self, held: Held) -> None:
        self.blocks.free(held.block_table)
        self.live.remove(held)

    @rule(held=consumes(sequences))
    def discard(self, held: Held) -> None:
        for block in self.blocks.discard(held.block_table):
            self.memory[block] = [-1] * BLOCK
        self.live.remove(held)

    def _write(self, held: Held, tokens: list[int]) -> None:
        start, end = len(held.tokens), len(held.tokens) + len(tokens)
        before = (list(held.block_table.blocks), self.blocks.num_available)
        copies = self.blocks.reserve(held.block_table, start, end)
        if copies is None:
            assert (held.block_table.blocks, self.blocks.num_available) == before
            return
        for source, to in copies:
            self.memory[to] = list(self.memory[source])
        held.tokens += tokens
        for i in range(start, end):
            self.memory[held.block_table.blocks[i // BLOCK]][i % BLOCK] = held.tokens[i]
        self.blocks.commit(held.block_table, held.tokens, end)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for held in self.live:
            read = [self.memory[p][k] for p in held.block_table.blocks for k in range(BLOCK)]
            assert read[: len(held.tokens)] == held.tokens

    @invariant()
    def no_block_is_lost_or_given_twice(self) -> None:
        used = {block for held in self.live for block in held.block_table.blocks}
        assert PADDING_BLOCK not in used
        assert self.blocks.num_used == len(used)
        assert self.blocks.num_available == BLOCKS - 1 - len(used)


Blocks.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestBlocks = Blocks.TestCase


def _filled(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    table = BlockTable()
    assert blocks.reserve(table, 0, len(tokens)) == []
    blocks.commit(table, tokens, len(tokens))
    return table


def test_a_cached_prefix_is_found_again() -> None:
    blocks = BlockManager(BLOCKS, BLOCK)
    first = _filled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.free(first)
    again = BlockTable()
    assert blocks.match(again, [1, 2, 3, 4, 5, 6, 7, 8, 0], 8) == 8
    other = BlockTable()
    assert blocks.match(other, [1, 2, 3, 0, 5, 6, 7, 8], 7) == 0


def test_the_least_recently_used_blocks_are_evicted_first() -> None:
    blocks = BlockManager(4, BLOCK)
    old, new = _filled(blocks, [1] * BLOCK), _filled(blocks, [2] * BLOCK)
    blocks.free(old)
    blocks.free(new)
    taker = BlockTable()
    assert blocks.reserve(taker, 0, 2 * BLOCK) == []
    assert blocks.match(BlockTable(), [1] * BLOCK + [0], BLOCK) == 0
    assert blocks.match(BlockTable(), [2] * BLOCK + [0], BLOCK) == BLOCK


def test_forks_share_blocks_until_one_of_them_writes() -> None:
    blocks = BlockManager(BLOCKS, BLOCK)
    parent = _filled(blocks, [1, 2, 3, 4, 5])
    forks = [blocks.fork(parent, 5) for _ in range(3)]
    assert blocks.num_used == 2
    copies = blocks.reserve(forks[0], 5, 6)
    assert copies == [(parent.blocks[1], forks[0].blocks[1])]
    assert blocks.num_used == 3


def test_a_cache_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1; a KV cache needs at least 2"):
        BlockManager(1, BLOCK)
