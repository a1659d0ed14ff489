"""Sets of a vocabulary's tokens. When a JSON text must be completed soon, masks allow only tokens
of such a set."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""A mask: bit i of the little-endian words is set if token i is allowed."""

FEW_STARTS, SOME_STARTS, MAX_STARTS = 1, 4, 15
"""A token may begin items of arrays or objects. A token in the set ``few`` begins at most
``FEW_STARTS`` items, and a token in the set ``some`` begins at most ``SOME_STARTS``. ``starts``
counts the items that a token begins, up to ``MAX_STARTS``."""
LONG = 12
"""Maximum bytes of a token that is tried as a prefix of a completion."""
_WHOLE = re.compile(rb'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?!d[89a-f])[0-9a-fA-F]{4}))+')
_SPACE = re.compile(rb"\s|\\[nrt]")
_PLAIN = bytes(byte for byte in range(32, 127) if byte not in b'"\\')
_SAMPLE = (
    '{"name": "", "age": 0, "places": [{"street": "", "number": null}, {"kind": "other"}], '
    '"enabled": false, "createdAt": "1970-01-01", "options": {}}'
)


class TokenSets:
    """Sets and counts of a vocabulary's tokens, by their meaning as parts of JSON."""

    def __init__(
        self, tokens: Sequence[bytes], words: int, tokenize: Callable[[bytes], Sequence[int]]
    ) -> None:
        """``words``: number of u32 words of a mask. Takes about 0.2 s for 131,072 tokens."""
        whole, ending, few, some = [], [], [], []
        starts = bytearray(len(tokens))
        by_text: dict[bytes, int] = {}
        for number, token in enumerate(tokens):
            if not token:
                # A mask allows a token without text only if this token ends the sequence.
                few.append(number)
                some.append(number)
                continue
            by_text.setdefault(token, number)
            opened = token.replace(b"[]", b"").replace(b"{}", b"")
            count = opened.count(b"{") + opened.count(b"[") + (b"," in token)
            starts[number] = min(count, MAX_STARTS)
            if count <= FEW_STARTS:
                few.append(number)
            if count <= SOME_STARTS:
                some.append(number)
            if _is_whole(token):
                whole.append(number)
                if _SPACE.search(token) is None:
                    ending.append(number)
        self.starts = bytes(starts)
        """For each token: how many items of arrays or objects it may begin."""
        self.few = words_of(few, words)
        """Tokens that begin at most ``FEW_STARTS`` items."""
        self.some = words_of(some, words)
        """Tokens that begin at most ``SOME_STARTS`` items."""
        self.whole = words_of(whole, words)
        """Tokens that are content of a JSON string and consist of whole characters and escapes. In
        a string without a pattern, the same text completes the JSON before and after such a
        token."""
        self.ending = words_of(ending, words)
        """Tokens of ``whole`` that continue a word: they do not contain white space."""
        self.single = words_of([by_text[one] for one in by_text if len(one) == 1], words)
        """Tokens of one byte."""
        self.bytes = {one: token for one, token in by_text.items() if len(one) == 1}
        self.digits = [by_text[b"%d" % one] for one in range(10) if b"%d" % one in by_text]
        """The tokens of the digits."""
        plain = words_of([by_text[bytes((b,))] for b in _PLAIN if bytes((b,)) in by_text], words)
        self._at = np.flatnonzero(plain)
        self._plain = plain[self._at]
        self._by_text = by_text
        self._texts = tokens
        written = len(tokenize(_SAMPLE.encode())) / len(_SAMPLE)
        self.per_byte = min(1.0, 1.25 * written)
        """Approximate maximum number of tokens for each byte of JSON without free text."""

    def text(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._texts[token]

    def is_free(self, words: Words) -> bool:
        """Whether a mask allows each printable ASCII character except the quote and the backslash,
        as inside a JSON string without a pattern."""
        return bool((words[self._at] & self._plain == self._plain).all())

    def is_whole(self, token: int) -> bool:
        """Whether a token is in ``whole``."""
        return bool(self.whole[token >> 5] >> (token & 31) & 1)

    def prefixes(self, text: bytes) -> list[int]:
        """The tokens that are prefixes of a text, the longest first, up to ``LONG`` bytes."""
        found = (self._by_text.get(text[:length]) for length in range(min(len(text), LONG), 0, -1))
        return [token for token in found if token is not None]


def allowed(words: Words) -> list[int]:
    """The tokens that a mask allows. The time is proportional to their number."""
    numbers: list[int] = []
    for at in np.flatnonzero(words).tolist():
        word = int(words[at])
        while word:
            numbers.append(32 * at + (word & -word).bit_length() - 1)
            word &= word - 1
    return numbers


def has(words: Words, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def put(words: Words, tokens: Sequence[int]) -> None:
    """Adds tokens to a mask."""
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))


def clear(words: Words, tokens: Sequence[int]) -> None:
    """Removes tokens from a mask."""
    for token in tokens:
        words[token >> 5] &= ~np.uint32(1 << (token & 31))


def words_of(tokens: Sequence[int], words: int) -> Words:
    """The mask of ``words`` u32 words that allows these tokens."""
    made = np.zeros(words, np.uint32)
    numbers = np.asarray(tokens, np.int64)
    np.bitwise_or.at(made, numbers >> 5, np.uint32(1) << (numbers & 31).astype(np.uint32))
    return made


def _is_whole(token: bytes) -> bool:
    if _WHOLE.fullmatch(token) is None:
        return False
    if token.isascii():
        return True
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True
