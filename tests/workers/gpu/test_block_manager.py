"""The block manager compared with a naive model, in which every sequence has its own list of
tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tokenbus.workers.gpu.engine.block_manager import (
    OWNER_PART,
    PADDING_BLOCK,
    PINNED_PART,
    BlockManager,
    BlockTable,
)

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

    @rule(held=sequences, until=st.integers(0, 3), owner=st.integers(0, 1))
    def pin(self, held: Held, until: int, owner: int) -> None:
        self.blocks.pin(held.block_table, until, owner)

    @rule(now=st.integers(0, 3))
    def expire_pins(self, now: int) -> None:
        self.blocks.expire_pins(now)
        assert all(pin.until > now for pin in self.blocks._pins.values())

    @invariant()
    def pins_are_counted_by_owner(self) -> None:
        owners = [pin.owner for pin in self.blocks._pins.values()]
        assert Counter(owners) == self.blocks._owned
        assert self.blocks._pinned.keys() <= self.blocks._pins.keys() <= self.blocks._key_of.keys()

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


def filled(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    """A table with these tokens, all computed."""
    table = BlockTable()
    assert blocks.reserve(table, 0, len(tokens)) is not None
    blocks.commit(table, tokens, len(tokens))
    return table


def num_cached(blocks: BlockManager, tokens: list[int]) -> int:
    """The number of the tokens that the prefix cache has."""
    table = BlockTable()
    found = blocks.match(table, tokens, len(tokens))
    blocks.free(table)
    return found


def text(number: int, num_blocks: int) -> list[int]:
    return [1000 * number + i for i in range(num_blocks * BLOCK)]


def test_pinned_blocks_are_allocated_after_all_others_and_not_refused() -> None:
    blocks = BlockManager(33, BLOCK)
    pinned = filled(blocks, text(1, 4))
    blocks.pin(pinned, 10.0, 1)
    blocks.free(pinned)
    assert blocks.num_available == 32
    blocks.free(filled(blocks, text(2, 28)))
    blocks.free(filled(blocks, text(3, 28)))
    assert num_cached(blocks, text(1, 4)) == 4 * BLOCK
    blocks.free(filled(blocks, text(4, 32)))
    assert num_cached(blocks, text(1, 4)) == 0
    assert not blocks._pins


def test_a_pin_ends_at_its_time_and_a_later_pin_extends_it() -> None:
    blocks = BlockManager(33, BLOCK)
    table = filled(blocks, text(1, 3))
    blocks.pin(table, 10.0, 1)
    blocks.pin(table, 20.0, 2)
    blocks.free(table)
    blocks.expire_pins(15.0)
    blocks.free(filled(blocks, text(2, 29)))
    blocks.free(filled(blocks, text(3, 29)))
    assert num_cached(blocks, text(1, 3)) == 3 * BLOCK
    blocks.expire_pins(20.0)
    blocks.free(filled(blocks, text(4, 32)))
    assert num_cached(blocks, text(1, 3)) == 0


def test_an_owner_pins_a_part_of_the_blocks_and_all_owners_another_part() -> None:
    blocks = BlockManager(64, BLOCK)
    for owner in range(6):
        table = filled(blocks, text(owner, 10))
        blocks.pin(table, 10.0, owner)
        blocks.free(table)
    assert blocks._owned == dict.fromkeys(range(4), 64 // OWNER_PART)
    assert len(blocks._pins) == 64 // PINNED_PART


def test_changed_weights_end_all_pins() -> None:
    blocks = BlockManager(33, BLOCK)
    table = filled(blocks, text(1, 3))
    blocks.pin(table, 10.0, 1)
    blocks.free(table)
    blocks.outdate(())
    assert blocks.num_available == 32
    assert not blocks._pins
    assert num_cached(blocks, text(1, 3)) == 0
