"""The texts of a session's earlier requests, which prompt lookup searches for repetitions.

A session often repeats text that its earlier requests generated, for example if it edits several
files or extracts records from several pages. Texts are stored separately for each client of the
engine (a session or a user, ``arrivals.client_of``). In this file, such a client is called a
*session*. Drafts never come from the texts of another client. The index (``places.py``) maps each
*run* of ``SIZE`` tokens to its places in these texts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Tokens

from .places import LONGEST, Index, Places, add_runs

HALF = 2**14
"""A session has a newer and an older index. When the newer index has this number of tokens, it
becomes the older index, and the previous older index is dropped."""
MAX_TOKENS = 2**18
"""Bound on the tokens of all sessions' texts. Above this bound, the least recently used sessions
are dropped. At the bound, texts and indexes take about 100 MB."""
ADVANCE = 4096
"""Maximum number of tokens that one lookup adds to the index."""


class EarlierTexts:
    """The latest texts of one session. New texts wait first. Each lookup adds a part of the waiting
    texts to the index. Indexed and waiting texts together have at most about four times ``HALF``
    tokens."""

    __slots__ = ("_indexed", "_newer", "_older", "_size", "_waiting", "_whole", "num_tokens")

    def __init__(self) -> None:
        self._waiting: deque[list[int]] = deque()
        """Texts that are not completely in the index."""
        self._indexed = 0
        """Number of tokens of the first waiting text that have been added to the index."""
        self._newer: Index = {}
        self._older: Index = {}
        self._size = 0
        """Number of tokens in ``_newer``."""
        self._whole: Tokens[int] = ()
        """The complete last text. In a conversation, the next text begins with this text."""
        self.num_tokens = 0
        """Approximate number of tokens in the stored texts."""

    def add(self, text: list[int]) -> None:
        """Adds the text of an ended sequence, including its prompt. The list must not change
        later."""
        known = len(self._whole)
        extends = len(text) >= known and text[:known] == self._whole
        self._whole = text
        new = text[max(0, (known if extends else 0) - LONGEST, len(text) - HALF) :]
        self._waiting.append(new)
        while sum(map(len, self._waiting)) > 2 * HALF:
            self._waiting.popleft()
            self._indexed = 0
        self.num_tokens = min(self.num_tokens + len(new), 3 * HALF)

    def places(self, run: tuple[int, ...]) -> Places:
        """The places of a run in the indexed texts, the latest last. Adds waiting texts to the
        index."""
        if self._waiting:
            self._advance()
        return self.known_places(run)

    def known_places(self, run: tuple[int, ...]) -> Places:
        """The places of a run in the indexed texts. Does not add to the index."""
        return [*self._older.get(run, ()), *self._newer.get(run, ())]

    def _advance(self) -> None:
        text = self._waiting[0]
        until = min(len(text), self._indexed + ADVANCE)
        # The run at the end of the text is not added, because no token follows it.
        add_runs(self._newer, text, self._indexed, until)
        self._size += until - self._indexed
        self._indexed = until
        if until == len(text):
            self._waiting.popleft()
            self._indexed = 0
        if self._size >= HALF:
            self._older, self._newer, self._size = self._newer, {}, 0


class SessionTexts:
    """The earlier texts of all sessions of an engine. The least recently used sessions are
    dropped."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, EarlierTexts] = OrderedDict()
        self._num_tokens = 0
        """Number of tokens of all sessions, plus the number of sessions."""

    def of(self, session: int) -> EarlierTexts:
        """The texts of a session. This session becomes the most recently used session."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = EarlierTexts()
            self._num_tokens += 1
        else:
            self._sessions.move_to_end(session)
        return found

    def add(self, session: int, text: list[int]) -> None:
        """Adds the text of an ended sequence."""
        texts = self.of(session)
        before = texts.num_tokens
        texts.add(text)
        self._num_tokens += texts.num_tokens - before
        while self._num_tokens > MAX_TOKENS and len(self._sessions) > 1:
            _, dropped = self._sessions.popitem(last=False)
            self._num_tokens -= 1 + dropped.num_tokens

    def __len__(self) -> int:
        return len(self._sessions)
