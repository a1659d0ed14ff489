"""Finds short matches of a schema's patterns, and the names that the schema requires. The search
for a short completion (``completion.py``) tries these texts.

Masks rarely lead the search to these texts. For example, a pattern that may match anywhere in a
string allows nearly every byte until its match is complete. The results of this module are only
candidates, which the matcher accepts or rejects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .....grammars.regex import Dfa, RegexError, compile_regex

MAX_PATTERNS = 32
"""Maximum patterns of a schema that are compiled."""
MAX_NAMES = 200
"""Maximum required names that are tried."""
MAX_CHARACTERS = 1_000
"""Maximum characters of a pattern that is compiled."""
MAX_STATES = 5_000
"""Maximum states of the automaton of one pattern."""

_WRITTEN = [byte for byte in range(0x20, 0x7F) if byte not in b'"\\']
"""Bytes that are written unescaped in a string of JSON."""


class Pattern:
    """A pattern, and for each state of its automaton the next byte of a shortest match."""

    def __init__(self, automaton: Dfa) -> None:
        self._automaton = automaton
        self._nearest: dict[int, int] = {
            state: -1 for state in range(1, automaton.num_states) if automaton.accepting[state]
        }
        """The next byte of a shortest match, by state; -1 if a match may end in this state."""
        before: dict[int, list[tuple[int, int]]] = {}
        seen = {automaton.classes[byte]: byte for byte in reversed(_WRITTEN)}
        for state in range(1, automaton.num_states):
            for byte in seen.values():
                if after := automaton.step(state, byte):
                    before.setdefault(after, []).append((state, byte))
        states = list(self._nearest)
        for state in states:  # A breadth-first search: the list grows during this loop.
            for origin, byte in before.get(state, ()):
                if origin not in self._nearest:
                    self._nearest[origin] = byte
                    states.append(origin)

    def ends(self, beginning: bytes) -> Iterator[bytes]:
        """Texts that may follow ``beginning`` in a string: the rest of a match that starts at the
        first byte of ``beginning``, and a whole match that starts after ``beginning``."""
        for text in (beginning, b"") if beginning else (b"",):
            state = self._automaton.walk(text)
            if state not in self._nearest:
                continue
            end = bytearray()
            while (byte := self._nearest[state]) >= 0:
                end.append(byte)
                state = self._automaton.step(state, byte)
            yield bytes(end)


def patterns_of(grammar: str) -> list[Pattern]:
    """The patterns of a schema in an ``LLMatcher.grammar_from_json_schema`` text, if
    ``grammars.regex`` supports their syntax; empty for other grammars."""
    found: dict[str, None] = {}
    for value in _objects(grammar):
        if isinstance(pattern := value.get("pattern"), str):
            found[pattern] = None
        if isinstance(named := value.get("patternProperties"), dict):
            found |= dict.fromkeys(named)
    short = [pattern for pattern in found if len(pattern) <= MAX_CHARACTERS][:MAX_PATTERNS]
    return [made for pattern in short if (made := _pattern(pattern)) is not None]


def required_names(grammar: str) -> list[bytes]:
    """The names that a schema requires anywhere, as written in a string of JSON; empty for other
    grammars."""
    found: dict[str, None] = {}
    for value in _objects(grammar):
        if isinstance(names := value.get("required"), list):
            found |= dict.fromkeys(name for name in names if isinstance(name, str))
    return [json.dumps(name, ensure_ascii=False)[1:-1].encode() for name in found][:MAX_NAMES]


def _objects(grammar: str) -> Iterator[dict[str, Any]]:
    """All objects in an ``LLMatcher.grammar_from_json_schema`` text."""
    left = [json.loads(grammar)] if grammar.startswith("{") else []
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _pattern(text: str) -> Pattern | None:
    try:
        automaton = compile_regex(f"(?a){text}")
    except RegexError:
        return None
    return Pattern(automaton) if automaton.num_states <= MAX_STATES else None
