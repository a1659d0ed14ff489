"""The texts of a session's earlier requests, in which prompt lookup finds what they repeat.

A session that edits one file after another, or extracts records from one page after another,
has texts in its next request that were generated in the last ones. They are kept for each session
by itself: no session's drafts come from what another has sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Tokens

from .places import LONGEST, Index, Places, add_runs

HALF = 2**14
"""Tokens of a session's texts, after which those of as many tokens before them are dropped."""
MAX_TOKENS = 2**18
"""Tokens of all sessions' texts, beyond which those of the session that is longest ago go. With
their indexes they take some 100 MB."""
ADVANCE = 4096
"""Tokens that one lookup adds to the index at most."""


class EarlierTexts:
    """The latest texts of one session: at least the last ``HALF`` tokens, at most three times as
    many. Their runs are added to the index when somebody looks for one."""

    __slots__ = ("_indexed", "_newer", "_older", "_size", "_waiting", "_whole", "num_tokens")

    def __init__(self) -> None:
        self._waiting: deque[list[int]] = deque()
        """Texts that are not in the index, or of which only a part is."""
        self._indexed = 0
        """Tokens of the first of them that are."""
        self._newer: Index = {}
        self._older: Index = {}
        self._size = 0
        """Tokens in ``_newer``."""
        self._whole: Tokens[int] = ()
        """The last text, whole: the next one may begin with it, as in a conversation."""
        self.num_tokens = 0
        """Tokens that are kept in all, about."""

    def add(self, text: list[int]) -> None:
        """Takes in the text of a sequence that has ended, prompt included; not changed later."""
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
        """Where a run occurs, as far as the texts are in the index, the latest last."""
        if self._waiting:
            self._advance()
        return self.known_places(run)

    def known_places(self, run: tuple[int, ...]) -> Places:
        """The same, without adding to the index."""
        return [*self._older.get(run, ()), *self._newer.get(run, ())]

    def _advance(self) -> None:
        text = self._waiting[0]
        until = min(len(text), self._indexed + ADVANCE)
        # The token after the last run is not known yet.
        add_runs(self._newer, text, self._indexed, until)
        self._size += until - self._indexed
        self._indexed = until
        if until == len(text):
            self._waiting.popleft()
            self._indexed = 0
        if self._size >= HALF:
            self._older, self._newer, self._size = self._newer, {}, 0


class SessionTexts:
    """The earlier texts of all sessions that an engine has served, the least recent dropped."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, EarlierTexts] = OrderedDict()
        self._num_tokens = 0
        """For all of them, and one for each session."""

    def of(self, session: int) -> EarlierTexts:
        """Those of a session, from now on the most recent."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = EarlierTexts()
            self._num_tokens += 1
        else:
            self._sessions.move_to_end(session)
        return found

    def add(self, session: int, text: list[int]) -> None:
        """Takes in the text of a sequence that has ended."""
        texts = self.of(session)
        before = texts.num_tokens
        texts.add(text)
        self._num_tokens += texts.num_tokens - before
        while self._num_tokens > MAX_TOKENS and len(self._sessions) > 1:
            _, dropped = self._sessions.popitem(last=False)
            self._num_tokens -= 1 + dropped.num_tokens

    def __len__(self) -> int:
        return len(self._sessions)
