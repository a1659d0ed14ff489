"""Finds a request's stop strings in text that arrives in pieces, with an Aho-Corasick automaton
(1975).

The time for a character does not depend on the number and the length of the stop strings. The
automaton is built while text is read. Only the states that the text reaches are built. The total
time to build it is at most proportional to the number of characters of all stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple


class State:
    """A state of the automaton: the longest suffix of the text that is a prefix of a stop
    string."""

    __slots__ = ("depth", "fail", "following", "match", "strings")

    def __init__(self, strings: list[str], depth: int, fail: State | None) -> None:
        self.strings = strings
        """The stop strings that begin with this state's characters, in alphabetical order."""
        self.depth = depth
        """Number of characters."""
        self.fail = fail
        """The failure link: the state of the next shorter suffix of the text. None for the root."""
        inherited = fail.match if fail is not None else ""
        self.match: str = strings[0] if len(strings[0]) == depth else inherited
        """The longest stop string at the end of the text; empty if no stop string ends here."""
        self.following: dict[str, State] | None = None
        """The states that have this state's characters and one character more, by this last
        character. None until the text continues after this state."""

    @property
    def prefix(self) -> str:
        """The characters of this state."""
        return self.strings[0][: self.depth]

    @property
    def is_whole(self) -> bool:
        """Whether no stop string continues after these characters."""
        return len(self.strings[-1]) == self.depth


class Found(NamedTuple):
    """A stop string in the text."""

    at: int
    """Index of its first character in the new text; negative if it begins in earlier text."""
    stop: str


class StopStrings:
    """The stop strings of a request, which all its sequences share."""

    def __init__(self, strings: Iterable[str]) -> None:
        """``strings``: at least one string. No string is empty."""
        self.root = State(sorted(set(strings)), 0, None)
        """The state before the text."""
        self._expand(self.root)

    def advance(self, state: State, text: str) -> tuple[State, Found | None]:
        """Returns the state after the new text, and the first stop string that ends in the new
        text. The characters of the state may be the beginning of a stop string, which later text
        can complete. If several stop strings begin at the same character, the shortest is
        returned."""
        found = None
        for end, char in enumerate(text, 1):
            state = self._next(state, char)
            if state.match:
                at = end - len(state.match)
                if found is None or at < found.at:
                    found = Found(at, state.match)
        while state.fail is not None and state.is_whole:
            state = state.fail
        return state, found

    def _next(self, state: State, char: str) -> State:
        while True:
            following = state.following
            if following is None:
                following = self._expand(state)
            found = following.get(char)
            if found is not None:
                return found
            if state.fail is None:
                return state
            state = state.fail

    def _expand(self, state: State) -> dict[str, State]:
        # ``_next`` follows the failure links, and needs ``following`` of each state on this chain.
        # The loop expands the shortest state first. A recursion in place of the loop could be as
        # deep as the number of stop strings.
        chain = []
        one: State | None = state
        while one is not None and one.following is None:
            chain.append(one)
            one = one.fail
        for one in reversed(chain):
            longer = [s for s in one.strings if len(s) > one.depth]
            one.following = {
                char: State(
                    list(strings),
                    one.depth + 1,
                    self.root if one.fail is None else self._next(one.fail, char),
                )
                for char, strings in groupby(longer, itemgetter(one.depth))
            }
        assert state.following is not None
        return state.following
