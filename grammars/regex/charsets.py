"""Computes sets of characters: categories, complements, and the other cases of letters.

A set is a sorted tuple of inclusive ranges that neither touch nor overlap. A set does not contain
surrogates, because UTF-8 cannot encode them. Categories and cases are the same as in ``re`` of the
running Python. So they follow the version of Unicode of this Python.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from re._casefix import _EXTRA_CASES  # type: ignore[import-not-found]
from typing import Final

CharSet = tuple[tuple[int, int], ...]

NOTHING: Final[CharSet] = ()
ANY: Final[CharSet] = ((0, 0xD7FF), (0xE000, 0x10FFFF))
NOT_NEWLINE: Final[CharSet] = ((0, 9), (11, 0xD7FF), (0xE000, 0x10FFFF))

_ASCII: Final = {
    "d": ((0x30, 0x39),),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
# All code points of a category are below the category's number in ``_ENDS``. All code points that
# have cases are below ``_CASED_END``. This is true for all versions of Unicode up to that of Python
# 3.13; a test checks all code points.
_ENDS: Final = {"d": 0x20000, "s": 0x10000, "w": 0x34000}
_CASED_END: Final = 0x20000


def union(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """The set of all characters in ``ranges``. The ranges may be in any order. Surrogates are left
    out."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    if not any(low <= 0xDFFF and high >= 0xD800 for low, high in merged):
        return tuple(merged)
    kept = []
    for low, high in merged:
        if low < 0xD800:
            kept.append((low, min(high, 0xD7FF)))
        if high > 0xDFFF:
            kept.append((max(low, 0xE000), high))
    return tuple(kept)


def complement(chars: CharSet) -> CharSet:
    """All characters that are not in a set."""
    gaps = []
    start = 0
    for low, high in chars:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= 0x10FFFF:
        gaps.append((start, 0x10FFFF))
    return union(gaps)


@lru_cache(maxsize=16)
def category(name: str, ascii_only: bool) -> CharSet:
    """The characters that ``\\d``, ``\\s`` or ``\\w`` matches. ``name``: the letter of the escape.
    A capital letter stands for the complement.

    Each Unicode category is read from ``re`` once, which takes about 10 ms.
    """
    if name.isupper():
        return complement(category(name.lower(), ascii_only))
    if ascii_only:
        return _ASCII[name]
    runs = re.finditer(rf"\{name}+", _characters(_ENDS[name]))
    return union((run.start(), run.end() - 1) for run in runs)


def prepare() -> None:
    """Loads all categories and cases, so that the first pattern does not load them. Takes about 40
    ms, once."""
    for name in _ASCII:
        category(name, False)
    _cases()


def _characters(end: int) -> str:
    """All characters below a code point, including surrogates, in order."""
    codes = array("I", range(end)).tobytes()
    return codes.decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")


def any_case(chars: CharSet, ascii_only: bool) -> CharSet:
    """The set of all characters that match a character of ``chars`` under ``(?i)``, as in ``re``.

    Two characters match if their lower cases are equal. They also match if their lower cases have
    the same upper case. For example, s and the long s match. With ``ascii_only``, only the letters
    A to Z have cases.
    """
    if ascii_only:
        more = list(chars)
        for low, high in chars:
            for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
                if low <= last and high >= first:
                    more.append((max(low, first) + shift, min(high, last) + shift))
        return union(more)
    cased, same = _cases()
    more = list(chars)
    for low, high in chars:
        for at in range(bisect_left(cased, low), bisect_right(cased, high)):
            more.extend((other, other) for other in same[cased[at]])
    return union(more)


@lru_cache(maxsize=1)
def _cases() -> tuple[list[int], dict[int, list[int]]]:
    """Returns the characters that have cases, in order. Also returns, for each of them, all
    characters that match it under ``(?i)``. The first call takes 15 ms."""
    text = _characters(_CASED_END)
    # The lower case of U+0130 has two characters, and re uses the first.
    lowered = text.replace("\u0130", "i").lower()
    raised: dict[int, list[int]] = {}
    for at, (before, after) in enumerate(zip(text, lowered, strict=True)):
        if before != after:
            raised.setdefault(ord(after), [ord(after)]).append(at)
    for low in _EXTRA_CASES:
        raised.setdefault(low, [low])
    same: dict[int, list[int]] = {}
    for low, members in raised.items():
        everyone = list(members)
        for other in _EXTRA_CASES.get(low, ()):
            everyone.extend(raised.get(other, [other]))
        for member in members:
            same[member] = everyone
    return sorted(same), same
