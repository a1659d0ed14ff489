"""Finds and replaces names that occur twice in one object of JSON.

llguidance counts each occurrence of a name towards ``minProperties``. But a JSON parser counts a
repeated name only once. So under a schema with a ``minProperties`` of at least 2, the completion of
a text (``completion.py``) must not repeat a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from string import ascii_letters, digits
from typing import NamedTuple

MAX_NAMES = 64
"""Maximum number of names that are replaced in one completion."""

_PARTS = re.compile(rb'[{}\[\]]|"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)
_COUNTED = re.compile(r'"minProperties"\s*:\s*(?:[2-9]|1\d)')
_CHARACTERS = [character.encode() for character in digits + ascii_letters]


class Name(NamedTuple):
    """A repeated name of an object, at the bytes ``begin`` to ``end - 1`` of a text. Names are
    compared as they are written, including escapes."""

    begin: int
    end: int
    before: frozenset[bytes]
    """All names that precede this one in the object."""


def counts_names(grammar: str) -> bool:
    """Whether a schema of the grammar has a ``minProperties`` of at least 2."""
    return _COUNTED.search(grammar) is not None


def repeated(text: bytes, begin: int) -> Name | None:
    """The first repeated name that ends at byte ``begin`` of the text or later."""
    return next(_repeated(text, begin), None)


def with_distinct_names(text: bytes, found: bytes, fits: Callable[[bytes], bool]) -> bytes:
    """The completion ``found`` of a text, with its repeated names replaced by other names that the
    grammar allows. ``fits`` returns whether bytes complete the text."""
    for _ in range(MAX_NAMES):
        name = repeated(text + found, len(text))
        if name is None:
            break
        # If the text ends within a name, the part of the name in the text cannot be replaced.
        begin, end = max(name.begin - len(text), 0), name.end - len(text)
        begun = text[name.begin :] if begin == 0 else b""
        for other in _others(found[begin:end]):
            changed = found[:begin] + other + found[end:]
            if begun + other not in name.before and fits(changed):
                found = changed
                break
        else:
            break
    return found


def _repeated(text: bytes, begin: int) -> Iterator[Name]:
    objects: list[set[bytes]] = []
    for part in _PARTS.finditer(text):
        first = part[0][:1]
        if first in b"{[":
            objects.append(set())
        elif first in b"]}":
            if objects:
                objects.pop()
        elif part[2] is not None and objects:
            names = objects[-1]
            if part[1] in names and part.end(1) >= begin:
                yield Name(*part.span(1), frozenset(names))
            names.add(part[1])


def _others(name: bytes) -> Iterator[bytes]:
    """Candidates for another name, in this order: single characters; the name with another last
    character; the name with one more character; the name with two characters in place of the last
    one."""
    yield from _CHARACTERS
    for one in _CHARACTERS:
        yield name[:-1] + one
    for one in _CHARACTERS:
        yield name + one
    for one in _CHARACTERS:
        for two in _CHARACTERS:
            yield name[:-1] + one + two
