"""The blocks of the KV cache: reference counts, sharing between forked sequences, and prefix reuse.

A block stores the keys and values of ``block_size`` consecutive tokens. The reference count of a
block is the number of block tables that contain it. Forked sequences share a block until one of
them writes to it (copy-on-write). A full block is registered under its content, so that later
sequences with the same prefix can share it. Only one block is registered for each content. If the
count of a registered block is 0, the block can still be shared until it is allocated for other
content or the weights change. Unregistered blocks are allocated first, then the least recently used
registered blocks. A controller can pin blocks for a time. Pinned blocks are allocated last. Paging
is vLLM's idea (Kwon et al. 2023). Each registered block has a content id, which stands for all
tokens of its sequence up to the end of the block. Registered blocks are found by a key, which is
not a hash. The key consists of the block's tokens and the content id of the block before, so
different contents have different keys. A sequence's first block has no block before it, so its key
has a number for the sequence's LoRA adapter instead.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from ....protocol.pages import PAGE_TOKENS
from .pages import PageLog

PADDING_BLOCK = 0
"""A block that is never allocated. Unused entries of padded block tables contain the number of this
block. The block contains zeros."""

PINNED_PART, OWNER_PART = 2, 8
"""At most 1 / ``PINNED_PART`` of the blocks may be pinned, and one owner (``Pin.owner``) may pin at
most 1 / ``OWNER_PART`` of the blocks."""


Content = tuple[int, tuple[int, ...]]
"""The key of a registered block: the id of the content before the block, and the block's tokens."""


class _Pin(NamedTuple):
    until: float
    owner: int


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order."""

    blocks: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """The content ids of the sequence's first full blocks, if ``match`` or ``commit`` has assigned
    them. An id stands for all content up to the end of its block."""
    pages: list[bytes] = field(default_factory=list)
    """The keys of the sequence's first pages (``pages.py``). Later keys have not been computed
    yet."""
    mixed: bool = False
    """Whether some of the blocks were computed with earlier weights. If so, ``commit`` does not
    register blocks of this table. ``outdate`` sets this flag. ``truncate`` clears it when the table
    becomes empty."""
    adapter: int = 0
    """The number of the LoRA adapter that computes the blocks; 0 without an adapter."""

    def before(self, index: int) -> int:
        """The id of the content before the block at ``index``. Before the first block, the result
        is minus the adapter's number. This never equals a content id, because content ids are
        positive."""
        return self.keys[index - 1] if index else -self.adapter


class BlockManager:
    """Allocates ``num_blocks - 1`` blocks of ``block_size`` tokens; block 0 is for padding."""

    def __init__(self, num_blocks: int, block_size: int, pages: PageLog | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; a KV cache needs at least 2 blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pages = pages
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Registered blocks with a reference count of 0, the least recently used first."""
        self._pinned: OrderedDict[int, None] = OrderedDict()
        """Pinned blocks with a reference count of 0, the least recently used first."""
        self._pins: dict[int, _Pin] = {}
        """The pin of each pinned block."""
        self._owned: Counter[int] = Counter()
        """Number of pinned blocks of each owner."""
        self._next_expiry = inf
        """A lower bound on the times at which pins end."""
        self._registered: dict[Content, tuple[int, int]] = {}
        """Maps the key of a block to (the block, id of the content up to the end of the block)."""
        self._key_of: dict[int, Content] = {}
        self._next_key = 0
        self.num_freed = 0
        """How often a block has become available since this object was made."""

    @property
    def num_available(self) -> int:
        """Number of blocks that could be allocated now."""
        return len(self._free) + len(self._cached) + len(self._pinned)

    @property
    def num_used(self) -> int:
        """Number of blocks that at least one sequence uses."""
        return self.num_blocks - 1 - self.num_available

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the whole cache. A sequence cannot be longer."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def num_unshared(self, table: BlockTable) -> int:
        """Number of a table's blocks that no other table contains."""
        return sum(self._ref_counts[block] == 1 for block in table.blocks)

    def num_reserved(self, table: BlockTable, num_tokens: int) -> int:
        """Number of blocks to keep free for a running sequence with ``num_tokens`` known tokens, so
        that it can grow by one token. The result is at least 1."""
        return max(1, self.blocks_for(num_tokens + 1) - len(table.blocks))

    def match(self, table: BlockTable, tokens: Tokens[int], limit: int) -> int:
        """Fills an empty ``table`` with the registered blocks of the longest prefix of ``tokens``
        that is in the cache.

        Returns the number of matched tokens: a multiple of the block size, at most ``limit``.
        """
        size = self.block_size
        before = table.before(0)
        for start in range(0, limit - size + 1, size):
            found = self._registered.get((before, tuple(tokens[start : start + size])))
            if found is None:
                break
            block, before = found
            self._use(block)
            table.blocks.append(block)
            table.keys.append(before)
        return len(table.blocks) * size

    def following(self, table: BlockTable, tokens: Tokens[int], limit: int) -> Content | None:
        """The key of the block with which ``match`` would continue a matched ``table``; None if
        ``match`` has reached ``limit``."""
        index, size = len(table.keys), self.block_size
        end = (index + 1) * size
        return (table.before(index), tuple(tokens[end - size : end])) if end <= limit else None

    def is_registered(self, content: Content | None) -> bool:
        """Whether a block with this key is registered."""
        return content in self._registered

    def reserve(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]] | None:
        """Allocates the blocks that are needed to write the tokens ``[start, end)`` of a sequence.

        Changes only the block of token ``start`` and later blocks. Each shared block is replaced by
        a new block. For the other blocks, the registration ends. Returns the copies to make before
        the write, as pairs of block numbers (from, to). If too few blocks are available, returns
        None and changes nothing.
        """
        size = self.block_size
        first = start // size
        blocks = table.blocks
        if end <= len(blocks) * size and first == len(blocks) - 1 >= len(table.keys):
            # The usual case of a decode: the last block has room, and is neither shared nor
            # registered.
            last = blocks[first]
            if self._ref_counts[last] == 1 and last not in self._key_of:
                return []
        shared = [
            i for i in range(first, len(table.blocks)) if self._ref_counts[table.blocks[i]] > 1
        ]
        wanted = self.blocks_for(end) - len(table.blocks)
        if max(wanted, 0) + len(shared) > self.num_available:
            return None
        copies = []
        for i in shared:
            old = table.blocks[i]
            table.blocks[i] = self._take()
            copies.append((old, table.blocks[i]))
            self._ref_counts[old] -= 1
        for block in table.blocks[first:]:
            self._forget(block)
        del table.keys[first:]
        del table.pages[start // PAGE_TOKENS :]
        table.blocks.extend(self._take() for _ in range(wanted))
        return copies

    def commit(self, table: BlockTable, tokens: Tokens[int], num_computed_tokens: int) -> None:
        """Registers the full blocks of a sequence's first ``num_computed_tokens`` tokens. Later
        sequences can then share these blocks. Does nothing if the table is ``mixed``."""
        if table.mixed:
            return
        size = self.block_size
        for i in range(len(table.keys), num_computed_tokens // size):
            content = (table.before(i), tuple(tokens[i * size : (i + 1) * size]))
            known = self._registered.get(content)
            if known is None:
                self._next_key += 1
                known = (table.blocks[i], self._next_key)
                self._registered[content] = known
                self._key_of[table.blocks[i]] = content
                if self._pages is not None:
                    block = table.blocks[i]
                    self._pages.registered(block, i, tokens, table.pages, table.adapter)
            # If another block is registered with the same content, this block is not registered.
            table.keys.append(known[1])

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second table that shares the blocks of the first ``num_tokens`` tokens."""
        blocks = table.blocks[: self.blocks_for(num_tokens)]
        for block in blocks:
            self._ref_counts[block] += 1
        pages = table.pages[: num_tokens // PAGE_TOKENS]
        keys = table.keys[: num_tokens // self.block_size]
        return BlockTable(blocks, keys, pages, table.mixed, table.adapter)

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Removes the blocks after the first ``num_tokens`` tokens from a table. A removed block is
        free if no other table contains it."""
        keep = self.blocks_for(num_tokens)
        for block in reversed(table.blocks[keep:]):
            self._release(block)
        del table.blocks[keep:]
        del table.keys[num_tokens // self.block_size :]
        del table.pages[num_tokens // PAGE_TOKENS :]
        table.mixed = table.mixed and bool(table.blocks)

    def pin(self, table: BlockTable, until: float, owner: int) -> None:
        """Pins the registered blocks of a table until the time ``until``. Begins with the first
        block, and stops when a quota of pins is used up. When no sequence uses a pinned block, the
        block is allocated for other content only after all blocks that are not pinned."""
        until = ceil(until)  # Rounded up, so that pins expire at most once per second.
        self._next_expiry = min(self._next_expiry, until)
        for block in table.blocks[: len(table.keys)]:
            if block not in self._key_of:
                continue  # Another block was registered for the same content.
            pin = self._pins.get(block)
            if pin is not None and pin.until >= until:
                continue
            all_full = pin is None and len(self._pins) >= self.num_blocks // PINNED_PART
            mine = pin is not None and pin.owner == owner
            if all_full or (not mine and self._owned[owner] >= self.num_blocks // OWNER_PART):
                return
            # If another owner had pinned the block, the block now counts towards the quota of
            # ``owner``.
            self._unpin(block)
            self._pins[block] = _Pin(until, owner)
            self._owned[owner] += 1

    def expire_pins(self, now: float) -> None:
        """Ends the pins whose time is over."""
        if now < self._next_expiry:
            return
        for block in [block for block, pin in self._pins.items() if pin.until <= now]:
            self._unpin(block)
            if block in self._pinned:
                del self._pinned[block]
                self._cached[block] = None
        self._next_expiry = min((pin.until for pin in self._pins.values()), default=inf)

    def outdate(self, tables: Iterable[BlockTable]) -> None:
        """Ends the registration of all blocks, because the weights change. ``tables``: the tables
        that keep their blocks. They become ``mixed``."""
        for block in list(self._key_of):
            self._forget(block)
        self._free += [*self._cached, *self._pinned]
        self._cached.clear()
        self._pinned.clear()
        for table in tables:
            table.keys.clear()
            table.pages.clear()
            table.mixed = bool(table.blocks)

    def free(self, table: BlockTable) -> None:
        """Removes all blocks from a table. Registered blocks can be matched until they are
        allocated for other content."""
        self.truncate(table, 0)

    def discard(self, table: BlockTable) -> list[int]:
        """Removes all blocks from a table, because their content is unusable. Returns the blocks
        that no other table contains. The caller must set these blocks to zeros."""
        own = [block for block in table.blocks if self._ref_counts[block] == 1]
        for block in own:
            self._forget(block)
        self.free(table)
        return own

    def _use(self, block: int) -> None:
        self._cached.pop(block, None)
        self._pinned.pop(block, None)
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self.num_freed += 1
            if block in self._pins:
                self._pinned[block] = None
            elif block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = (self._cached or self._pinned).popitem(last=False)
            self._forget(block)
        self._ref_counts[block] = 1
        return block

    def _unpin(self, block: int) -> None:
        pin = self._pins.pop(block, None)
        if pin is not None:
            self._owned[pin.owner] -= 1
            if not self._owned[pin.owner]:
                del self._owned[pin.owner]

    def _forget(self, block: int) -> None:
        """Ends the registration of a block, if the block is registered. The content of the block is
        about to change, or was computed with earlier weights.

        Other registered blocks may continue the content of this block. They cannot be matched any
        more, but stay registered until this method is called for them.
        """
        self._unpin(block)
        content = self._key_of.pop(block, None)
        if content is not None:
            del self._registered[content]
            if self._pages is not None:
                self._pages.forgotten(block)
