"""The pages (units of ``PAGE_TOKENS`` tokens) that a KV cache contains, and the changes since the
last report to the broker."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from ....protocol.pages import PAGE_TOKENS, first_key, next_key


class PageLog:
    """The pages in one model's KV cache. A page is in the cache while a block with the page's last
    tokens is registered for prefix reuse (``block_manager.py``).

    ``adapters``: the names of the model's LoRA adapters. The keys of pages are computed from the
    name of the model. If an adapter has computed the pages, they are computed from the name of the
    adapter instead.
    """

    def __init__(self, model: str, block_size: int, adapters: Iterable[str] = ()) -> None:
        self._first = [first_key(name) for name in (model, *adapters)]
        self._per_page = PAGE_TOKENS // block_size if PAGE_TOKENS % block_size == 0 else 0
        """Number of blocks in a page; 0 if a page is not a whole number of blocks. In that case,
        pages are not reported."""
        self._by_block: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        """For each page: number of registered blocks that contain the page's last tokens. There can
        be several such blocks. If an earlier block of the page is evicted, the page is computed
        again. The old last block then stays registered until it is allocated for other content."""
        self._changed: dict[bytes, bool] = {}
        """Pages that were added (True) or removed (False) since the last ``take`` or ``every``."""

    def registered(
        self, block: int, index: int, tokens: Tokens[int], keys: list[bytes], adapter: int = 0
    ) -> None:
        """Records that ``block`` has been registered. ``index``: the place of the block in its
        sequence. Does nothing if the block is not the last block of a page.

        ``keys``: the known keys of the sequence's first pages. This method appends the keys of
        further pages up to this block.
        """
        if not self._per_page or (index + 1) % self._per_page:
            return
        while len(keys) * self._per_page <= index:
            start = len(keys) * PAGE_TOKENS
            content = array("I", tokens[start : start + PAGE_TOKENS]).tobytes()
            keys.append(next_key(keys[-1] if keys else self._first[adapter], content))
        key = keys[(index + 1) // self._per_page - 1]
        self._by_block[block] = key
        self._blocks[key] = self._blocks.get(key, 0) + 1
        if self._blocks[key] == 1:
            self._change(key, True)

    def forgotten(self, block: int) -> None:
        """Removes a block whose registration has ended."""
        key = self._by_block.pop(block, None)
        if key is None:
            return
        self._blocks[key] -= 1
        if not self._blocks[key]:
            del self._blocks[key]
            self._change(key, False)

    def _change(self, key: bytes, added: bool) -> None:
        if self._changed.pop(key, added) == added:
            self._changed[key] = added

    @property
    def changed(self) -> bool:
        """Whether pages have been added or removed since the last ``take`` or ``every``."""
        return bool(self._changed)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """The keys of the pages that were added since the last ``take`` or ``every``, and the keys
        of the pages that were removed."""
        changed, self._changed = self._changed, {}
        added = [key for key, there in changed.items() if there]
        return added, [key for key, there in changed.items() if not there]

    def every(self) -> list[bytes]:
        """The keys of all pages in the cache. Clears the recorded changes."""
        self._changed.clear()
        return list(self._blocks)
