"""The pages of the KV cache: who holds which, which are shared, and which can be found again.

A page holds the keys and values of ``page_size`` consecutive tokens. Pages are counted by their
holders; forks share them until one of the holders writes (copy-on-write). A full page is kept under
its content, so that a later request with the same beginning finds it; pages that nobody holds stay
findable until they are needed, the least recently used first. The idea of paging is vLLM's
(Kwon et al. 2023); keys here are exact (the page's tokens, and which page precedes), so that two
contents can never be taken for one another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

PADDING_PAGE = 0
"""Never given out: what padded block tables point to, so that they read zeros."""

_ROOT = 0


@dataclass(slots=True)
class BlockTable:
    """The pages of one sequence, in order."""

    pages: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """For each leading page whose content is registered: the id of the content up to its end."""


class BlockManager:
    """Gives out ``num_pages - 1`` pages of ``page_size`` tokens; page 0 is for padding."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a KV cache has at least 2 pages, not {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages that nobody holds and that can be found again, the oldest first."""
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """(id of what precedes, the page's tokens) to (page, id of the content up to its end)."""
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._next_key = _ROOT

    @property
    def num_available(self) -> int:
        """Pages that could be given out now."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - 1 - self.num_available

    @property
    def capacity(self) -> int:
        """Tokens that a single sequence could have, with nothing else in the cache."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def match(self, table: BlockTable, tokens: Tokens[int], limit: int) -> int:
        """Takes into an empty ``table`` the known pages with which ``tokens`` begin.

        Returns how many tokens they hold: at most ``limit``, a multiple of the page size.
        """
        size = self.page_size
        before = _ROOT
        for start in range(0, limit - size + 1, size):
            found = self._found.get((before, tuple(tokens[start : start + size])))
            if found is None:
                break
            page, before = found
            self._hold(page)
            table.pages.append(page)
            table.keys.append(before)
        return len(table.pages) * size

    def reserve(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]] | None:
        """Makes room to write the tokens ``[start, end)`` of a sequence.

        Returns the pages to copy first, as (from, to): those that others hold too. None, with
        nothing changed, where too few pages are available.
        """
        size = self.page_size
        first = start // size
        pages = table.pages
        if end <= len(pages) * size and first == len(pages) - 1 >= len(table.keys):
            # What a decode asks for almost always: room in a last page that is its own.
            last = pages[first]
            if self._holders[last] == 1 and last not in self._key_of:
                return []
        shared = [i for i in range(first, len(table.pages)) if self._holders[table.pages[i]] > 1]
        wanted = self.pages_for(end) - len(table.pages)
        if max(wanted, 0) + len(shared) > self.num_available:
            return None
        copies = []
        for i in shared:
            old = table.pages[i]
            table.pages[i] = self._take()
            copies.append((old, table.pages[i]))
            self._holders[old] -= 1
        for page in table.pages[first:]:
            self._forget(page)
        del table.keys[first:]
        table.pages.extend(self._take() for _ in range(wanted))
        return copies

    def commit(self, table: BlockTable, tokens: Tokens[int], computed: int) -> None:
        """Registers the full pages among the first ``computed`` tokens, to be found again."""
        size = self.page_size
        for i in range(len(table.keys), computed // size):
            before = table.keys[i - 1] if i else _ROOT
            content = (before, tuple(tokens[i * size : (i + 1) * size]))
            known = self._found.get(content)
            if known is None:
                self._next_key += 1
                known = (table.pages[i], self._next_key)
                self._found[content] = known
                self._key_of[table.pages[i]] = content
            # Where another page has the same content already, this one stays unregistered.
            table.keys.append(known[1])

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second table over the pages of the first ``num_tokens`` tokens, shared."""
        pages = table.pages[: self.pages_for(num_tokens)]
        for page in pages:
            self._holders[page] += 1
        return BlockTable(pages, table.keys[: num_tokens // self.page_size])

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Gives back the pages past the first ``num_tokens`` tokens."""
        keep = self.pages_for(num_tokens)
        for page in reversed(table.pages[keep:]):
            self._let_go(page)
        del table.pages[keep:]
        del table.keys[num_tokens // self.page_size :]

    def free(self, table: BlockTable) -> None:
        """Gives all pages back; registered ones stay findable while there is room."""
        self.truncate(table, 0)

    def discard(self, table: BlockTable) -> list[int]:
        """Gives all pages back as unusable content; returns those to clear: no one else's."""
        own = [page for page in table.pages if self._holders[page] == 1]
        for page in own:
            self._forget(page)
        self.free(table)
        return own

    def _hold(self, page: int) -> None:
        self._kept.pop(page, None)
        self._holders[page] += 1

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def _forget(self, page: int) -> None:
        """Ends the registration of a page whose content is about to change.

        What was registered behind it can no longer be reached, and ages out.
        """
        content = self._key_of.pop(page, None)
        if content is not None:
            del self._found[content]
