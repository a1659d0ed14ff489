"""Computes the token masks of the parts of a structure that have no schema: free text and literal
texts.

In free text, nearly all tokens are allowed. A *watched text* is a text that is forbidden, or that
begins or ends a part. A token may be forbidden only if it contains a watched text, or the rest of a
watched text that has begun. Binary search in the sorted tokens finds these tokens. The structure's
automaton checks each of them byte by byte. All other tokens are allowed.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from .....protocol.structure import SPECIAL, Automaton, State, special
from ...host import Vocabulary

T = TypeVar("T")

_ANY: Final = re.compile(b"(?s).")

KEPT_MASKS = 128
"""Maximum number of cached masks. A mask has 16 kB at 131,072 tokens. A small cache suffices,
because most tokens of a text do not change the automaton's state."""
KEPT_FORBIDDEN = 1024
"""Maximum number of automaton states inside JSON whose forbidden tokens are cached. Most states do
not forbid any tokens."""


class TokenTable:
    """The tokens of a vocabulary, sorted by their bytes. The *place* of a token is its index in
    this order. Building the table takes about 0.2 s for 131,072 tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        size = vocabulary.size
        found = sorted(
            (token, number) for number in range(size) if (token := vocabulary.token(number))
        )
        self.texts = [token for token, _ in found]
        self.numbers = [number for _, number in found]
        self._joined = SPECIAL.join(self.texts)
        self._starts: list[int] = []
        at = 0
        for text in self.texts:
            self._starts.append(at)
            at += len(text) + 1
        bits = bytearray(4 * -(-size // 32))
        for number in self.numbers:
            bits[number >> 3] |= 1 << (number & 7)
        self.all_text = bytes(bits)
        """The mask of all tokens that are text."""

    def beginning_with(self, text: bytes) -> range:
        """The places of the tokens that begin with a text."""
        first = bisect_left(self.texts, text)
        after = bisect_left(self.texts, text + b"\xff\xff", first)
        return range(first, after)

    def number_of(self, text: bytes) -> int | None:
        """The token with this text; None if it does not exist."""
        place = bisect_left(self.texts, text)
        found = place < len(self.texts) and self.texts[place] == text
        return self.numbers[place] if found else None

    def beginnings_of(self, text: bytes) -> Iterator[int]:
        """The places of the tokens that are a prefix of a text, including the whole text."""
        for length in range(1, len(text) + 1):
            place = bisect_left(self.texts, text[:length])
            while place < len(self.texts) and self.texts[place] == text[:length]:
                yield place
                place += 1

    def having(self, text: bytes) -> set[int]:
        """The places of the tokens in which a text occurs."""
        places = (match.start() for match in re.finditer(re.escape(text), self._joined))
        return {bisect_left(self._starts, at + 1) - 1 for at in places}

    def of_literal(self, text: bytes) -> list[int]:
        """The tokens that write a literal text, which may contain special tokens. Raises
        ControllerError if the vocabulary cannot write the text."""
        tokens: list[int] = []
        for number, part in enumerate(text.split(SPECIAL)):
            if number % 2:
                tokens.append(self.vocabulary.special[part.decode()])
            elif part:
                tokens += self.vocabulary.tokenize(part)
        return tokens


class FreeMasks:
    """The masks of one structure over one vocabulary, shared by its sequences. Thread-safe."""

    def __init__(self, automaton: Automaton, table: TokenTable) -> None:
        self.automaton = automaton
        self.table = table
        self._lock = threading.Lock()
        self._masks: OrderedDict[State, bytes] = OrderedDict()
        self._forbidden: OrderedDict[State, list[int]] = OrderedDict()
        self._having: dict[bytes, set[int]] = {}
        self._marking: dict[tuple[str, int, bool], re.Pattern[bytes]] = {}
        names = table.vocabulary.special
        self._special = {names[name]: special(name) for name in automaton.special if name in names}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token for the automaton; empty for a special token that the structure does
        not use."""
        return self._special.get(token) or self.table.vocabulary.token(token)

    def get(self, state: State) -> bytes:
        """The mask of a state, without end-of-sequence tokens. Not called for states inside the
        JSON of a tag, whose masks come from the schema."""
        return self._kept(self._masks, KEPT_MASKS, state, self._made)

    def forbidden(self, state: State) -> list[int]:
        """The tokens that a state inside JSON forbids, independently of the schema."""
        if not self.automaton.watched(state):
            return []
        return self._kept(self._forbidden, KEPT_FORBIDDEN, state, self._not_allowed)

    def forced(self, state: State) -> list[int]:
        """The tokens with which every possible next literal text begins; empty if these texts
        differ in the first token."""
        each = [self.table.of_literal(text) for text in self.rests(state)]
        if not each:
            return []
        low, high = min(each), max(each)
        same = (a == b for a, b in zip(low, high, strict=False))
        return low[: next((at for at, equal in enumerate(same) if not equal), len(low))]

    def marks(self, state: State) -> re.Pattern[bytes]:
        """A pattern that matches each byte that may change ``state``. The other bytes do not change
        ``state``."""
        json = self.automaton.holds_json(state)
        free = self._is_free(state) or state.mode == "value"
        if not free or state.near or (state.tags and state.mode != "content"):
            return _ANY
        if json and (state.quoted == 2 or not (state.depth or state.quoted)):
            return _ANY
        place = state.tags[0] if state.mode == "content" else state.phase
        key = state.mode, place, state.quoted == 1
        found = self._marking.get(key)
        if found is None:
            marks = {text[:1] for text in self.automaton.watched(state)} | {SPECIAL}
            if json:
                marks |= {b'"', b"\\"} if state.quoted else {b'"', b"{", b"}", b"[", b"]"}
            joined = b"|".join(map(re.escape, sorted(marks)))
            found = self._marking[key] = re.compile(joined)
        return found

    def follow(self, state: State, data: bytes) -> State:
        """The state after a token with the bytes ``data``. The state is dead (nothing may follow)
        if the token spans two parts and one of them is JSON."""
        marked = self.marks(state).search(data)
        if marked is None:
            return state
        inside = self.automaton.holds_json(state)
        for at in range(marked.start(), len(data)):
            state = self.automaton.step(state, data[at])
            if at + 1 < len(data) and self.automaton.holds_json(state) != inside:
                return State("dead")
        return state

    # --- inside ---------------------------------------------------------------------------------

    def _kept(
        self, cache: OrderedDict[State, T], most: int, state: State, make: Callable[[State], T]
    ) -> T:
        key = state if not state.part else state._replace(part=0, last=-1)
        with self._lock:
            found = cache.get(key)
            if found is not None:
                cache.move_to_end(key)
                return found
        made = make(key)
        with self._lock:
            cache[key] = made
            while len(cache) > most:
                cache.popitem(last=False)
        return made

    def _not_allowed(self, state: State) -> list[int]:
        return [token for token, data in self._suspects(state) if not self._allowed(state, data)]

    def _made(self, state: State) -> bytes:
        free = self._is_free(state)
        mask = bytearray(self.table.all_text if free else len(self.table.all_text))
        for token, data in self._suspects(state) if free else self._literal(state):
            if self._allowed(state, data):
                mask[token >> 3] |= 1 << (token & 7)
            else:
                mask[token >> 3] &= ~(1 << (token & 7))
        for token, data in self._special.items():
            if self._allowed(state, data):
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def _is_free(self, state: State) -> bool:
        """Whether all text is allowed, except watched texts."""
        if state.mode == "text":
            return self.automaton.structure.phases[state.phase].text
        return state.mode == "content"

    def _allowed(self, state: State, data: bytes) -> bool:
        return self.follow(state, data).mode != "dead"

    def _suspects(self, state: State) -> Iterator[tuple[int, bytes]]:
        """The tokens that contain a watched text, or that may continue a watched text that has
        begun. Each token comes with its bytes."""
        table = self.table
        places: set[int] = set()
        for text in self.automaton.watched(state):
            places |= self._places_having(text)
            for length in range(1, min(len(state.near), len(text) - 1) + 1):
                if state.near.endswith(text[:length]):
                    places.update(table.beginning_with(text[length:]))
        if state.mode == "text":
            for tag in state.tags:
                rest = self.automaton.triggers[tag][state.at :]
                places.update(table.beginning_with(rest))
        return self._of(places)

    def _literal(self, state: State) -> Iterator[tuple[int, bytes]]:
        """Tokens that are prefixes of the literal texts that may follow, with their bytes."""
        places: set[int] = set()
        for text in self.rests(state):
            places.update(self.table.beginnings_of(text.partition(SPECIAL)[0]))
        return self._of(places)

    def rests(self, state: State) -> list[bytes]:
        """The literal texts that may follow. Each is the rest of a text that begins or ends a tag:
        the bytes that have not been written yet."""
        texts = self.automaton.ends if state.mode == "end" else self.automaton.begins
        return list(dict.fromkeys(texts[tag][state.at :] for tag in state.tags))

    def _of(self, places: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        table = self.table
        return ((table.numbers[place], table.texts[place]) for place in sorted(places))

    def _places_having(self, text: bytes) -> set[int]:
        found = self._having.get(text)
        if found is None:
            found = self._having[text] = self.table.having(text)
        return found
