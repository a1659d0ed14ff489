"""Computes masks by brute force, and compares the grammar backend's masks with them."""

from __future__ import annotations

from collections.abc import Hashable, Set
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.backends.grammar.grammar_instance import (
    ANY,
    COMPLETE,
    FORCED,
    SINGLE,
    GrammarInstance,
    GrammarModule,
)
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.wasm.sandbox import make_engine

from .grammar_cases import Case


@cache
def module() -> GrammarModule:
    """The grammar backend's module, compiled once."""
    return GrammarModule(make_engine(Limits()))


def guest_of(
    vocabulary: TokenizerVocabulary, tables: bytes, memory: bytes | None = None
) -> GrammarInstance:
    """An instance of the grammar backend, with the memory of another instance if ``memory`` is
    given."""
    return GrammarInstance(
        module(), vocabulary, tables, None if memory is None else memoryview(memory)
    )


def look(guest: GrammarInstance, place: int) -> tuple[int, Set[int]]:
    """The flags of a sequence and the tokens of its mask, including bits beyond the vocabulary."""
    mask = bytearray(4 * -(-guest.vocabulary.size // 32))
    flags = guest.mask(place, memoryview(mask))
    return flags, members(mask)


def allows(guest: GrammarInstance, place: int, token: int) -> bool:
    """Whether a sequence's mask contains a token."""
    mask = bytearray(4 * -(-guest.vocabulary.size // 32))
    guest.mask(place, memoryview(mask))
    return bool(mask[token // 8] >> token % 8 & 1)


def members(mask: bytearray) -> frozenset[int]:
    """The indices of the bits that are set."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return frozenset(bits.nonzero()[0].tolist())


# --- brute force --------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The expected mask."""

    flags: int
    tokens: frozenset[int]


class Oracle:
    """Computes the masks of a case by trying each token's bytes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._known: dict[bytes, Expected] = {}

    def fits(self, text: bytes, number: int) -> bool:
        """Whether a token other than the end of the text can follow a text."""
        token = self.case.vocabulary.token(number)
        return bool(token) and self.case.reference.allows(text + token)

    def expected(self, text: bytes) -> Expected:
        """The expected mask after a text of at most ``depth`` bytes."""
        if text not in self._known:
            vocabulary, reference = self.case.vocabulary, self.case.reference
            tokens = {number for number in range(vocabulary.size) if self.fits(text, number)}
            flags = ANY if tokens else 0
            if reference.complete(text):
                flags |= COMPLETE
                tokens |= {vocabulary.eos} - {-1}
            elif len(self.next_bytes(text)) == 1 and not self._diverge(tokens):
                flags |= FORCED | SINGLE * (len(tokens) == 1)
            self._known[text] = Expected(flags, frozenset(tokens))
        return self._known[text]

    def _diverge(self, tokens: set[int]) -> bool:
        """Whether two tokens differ in a byte that both have."""
        texts = [self.case.vocabulary.token(number) for number in tokens]
        longest = max(texts, key=len, default=b"")
        return not all(longest.startswith(text) for text in texts)

    def next_bytes(self, text: bytes) -> list[bytes]:
        """The bytes that can follow a text."""
        return [byte for byte in _BYTES if self.case.reference.allows(text + byte)]

    def forced(self, text: bytes) -> bytes:
        """The bytes that must follow a text, as far as the reference can answer."""
        end = text
        while len(end) < self.case.reference.longest and not self.case.reference.complete(end):
            following = self.next_bytes(end)
            if len(following) != 1:
                break
            end += following[0]
        return end[len(text) :]


_BYTES = [bytes((byte,)) for byte in range(256)]


def walk(guest: GrammarInstance, oracle: Oracle, most: int = 150) -> int:
    """Appends every token to each reachable text of at most ``depth`` bytes, the shortest text
    first, and compares the masks and the results. Visits at most ``most`` texts; returns their
    number."""
    case = oracle.case
    waiting = [(guest.start(), b"")]
    seen = {b""}
    for place, text in waiting:
        assert look(guest, place) == oracle.expected(text), text
        assert guest.complete(place) == case.reference.complete(text), text
        check_forced(guest, oracle, place, text)
        check_closing(guest, oracle, place, text)
        for number in range(case.vocabulary.size):
            child = guest.fork(place)
            fits = oracle.fits(text, number)
            after = text + case.vocabulary.token(number) if fits else text
            assert guest.append(child, [number]) == fits, (text, number)
            if len(after) <= case.depth:
                assert look(guest, child) == oracle.expected(after), after
            if after in seen or len(after) > case.depth or len(seen) == most:
                guest.end(child)
            else:
                seen.add(after)
                waiting.append((child, after))
        guest.end(place)
    return len(seen)


def check_forced(guest: GrammarInstance, oracle: Oracle, place: int, text: bytes) -> None:
    """Fails unless the forced tokens write only text that must follow, and each token is allowed
    after the tokens before it. Also fails if a longer token that begins with the forced text can
    follow."""
    vocabulary, reference = oracle.case.vocabulary, oracle.case.reference
    must = oracle.forced(text)
    tokens = guest.forced(place)
    what = vocabulary.bytes_of(tokens)
    is_all = len(text + must) < reference.longest
    assert must.startswith(what) if is_all else (must.startswith(what) or what.startswith(must))
    child = guest.fork(place)
    at = 0
    for token in tokens:
        assert token in look(guest, child)[1]
        assert guest.append(child, [token]) == 1
        rest = must[at:]
        for number in range(vocabulary.size) if is_all else ():
            other = vocabulary.token(number)
            if len(other) > len(rest) and other.startswith(rest):
                longer = text + must[:at] + other
                assert len(longer) > reference.longest or not reference.allows(longer), longer
        at += len(vocabulary.token(token))
    guest.end(child)


def check_closing(guest: GrammarInstance, oracle: Oracle, place: int, text: bytes) -> None:
    """Fails unless the closing tokens can be appended and complete the text."""
    closing = guest.closing(place)
    if closing is None:
        return
    reference, whole = oracle.case.reference, text + closing
    assert len(whole) > reference.longest or reference.complete(whole), whole
    try:
        tokens = oracle.case.vocabulary.tokenize(closing)
    except ControllerError:
        return  # The vocabulary cannot write the closing text.
    child = guest.fork(place)
    assert guest.append(child, tokens) == len(tokens)
    assert guest.complete(child)
    guest.end(child)


# --- real vocabularies --------------------------------------------------------------------------


class Bytewise(Protocol):
    """A text under a grammar, to which bytes are added one by one, as in
    ``grammars.yacc.Recognizer``."""

    def byte(self, byte: int) -> bool:
        """Adds a byte if it can follow; returns whether it can."""

    def copy(self) -> Bytewise:
        """A copy of the text."""

    @property
    def place(self) -> Hashable:
        """The state that decides how the text can continue."""


class Node:
    """The texts that are in one state, and for each byte the node after it; None: the byte cannot
    follow."""

    def __init__(self, text: Bytewise) -> None:
        self.text = text
        self.after: dict[int, Node | None] = {}


def by_bytes(start: Bytewise, vocabulary: TokenizerVocabulary) -> frozenset[int]:
    """The tokens that can follow, found byte by byte. Common prefixes of tokens are tried once, and
    each byte is tried once in each state."""
    nodes = {start.place: Node(start)}

    def step(node: Node, byte: int) -> Node | None:
        longer = node.text.copy()
        after = None
        if longer.byte(byte):
            after = nodes.setdefault(longer.place, Node(longer))
        node.after[byte] = after
        return after

    allowed: list[int] = []
    path = [nodes[start.place]]
    for shared, rest, numbers in _in_order(vocabulary):
        if len(path) <= shared:
            continue
        del path[shared + 1 :]
        node = path[-1]
        for byte in rest:
            after = node.after[byte] if byte in node.after else step(node, byte)
            if after is None:
                break
            path.append(after)
            node = after
        else:
            allowed += numbers
    return frozenset(allowed)


@cache
def _in_order(vocabulary: TokenizerVocabulary) -> list[tuple[int, bytes, list[int]]]:
    """The tokens in the order of their bytes. For each: the number of bytes that it shares with the
    token before it, the remaining bytes, and its ids."""
    numbers: dict[bytes, list[int]] = {}
    for number in range(vocabulary.size):
        if token := vocabulary.token(number):
            numbers.setdefault(token, []).append(number)
    found = []
    previous = b""
    for token in sorted(numbers):
        pairs = enumerate(zip(previous, token, strict=False))
        # If one token is a prefix of another, the shorter one comes first.
        shared = next((at for at, (one, other) in pairs if one != other), len(previous))
        found.append((shared, token[shared:], numbers[token]))
        previous = token
    return found
