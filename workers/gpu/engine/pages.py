"""Which pages the blocks of a KV cache hold, and what has changed since it was last reported."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens

from ....protocol.pages import PAGE_TOKENS, first_key, next_key


class PageLog:
    """The pages of one model's blocks. A page is there while its last block is registered."""

    def __init__(self, model: str, block_size: int) -> None:
        self._first = first_key(model)
        self._per_page = PAGE_TOKENS // block_size if PAGE_TOKENS % block_size == 0 else 0
        """Blocks in a page; 0: they do not fit, and none is reported."""
        self._by_block: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        """By page: how many blocks are its last one. A prefix that was evicted in part and computed
        again has another block there, while the one that is out of reach ages."""
        self._changed: dict[bytes, bool] = {}
        """Pages that came (True) or went since ``take``."""

    def registered(self, block: int, index: int, tokens: Tokens[int], keys: list[bytes]) -> None:
        """The block at ``index`` of a sequence is registered.

        ``keys``: those of the sequence's first pages, as far as they are known; the others up to
        this block are added.
        """
        if not self._per_page or (index + 1) % self._per_page:
            return
        while len(keys) * self._per_page <= index:
            start = len(keys) * PAGE_TOKENS
            content = array("I", tokens[start : start + PAGE_TOKENS]).tobytes()
            keys.append(next_key(keys[-1] if keys else self._first, content))
        key = keys[(index + 1) // self._per_page - 1]
        self._by_block[block] = key
        self._blocks[key] = self._blocks.get(key, 0) + 1
        if self._blocks[key] == 1:
            self._change(key, True)

    def forgotten(self, block: int) -> None:
        """A block is not registered any more."""
        key = self._by_block.pop(block, None)
        if key is None:
            return
        self._blocks[key] -= 1
        if not self._blocks[key]:
            del self._blocks[key]
            self._change(key, False)

    def _change(self, key: bytes, came: bool) -> None:
        if self._changed.pop(key, came) == came:
            self._changed[key] = came

    @property
    def changed(self) -> bool:
        """Whether ``take`` would return anything."""
        return bool(self._changed)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """The keys of pages that came and of those that went since the last call."""
        changed, self._changed = self._changed, {}
        came = [key for key, there in changed.items() if there]
        return came, [key for key, there in changed.items() if not there]

    def every(self) -> list[bytes]:
        """The keys of all pages that are there; nothing of them counts as changed any more."""
        self._changed.clear()
        return list(self._blocks)
