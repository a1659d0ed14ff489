"""Makes texts that are similar to a completion of a JSON text. If a value of the completion
violates a keyword that the grammar does not enforce, a similar text may be valid (``completion``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from string import ascii_lowercase

_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"(?!\s*:)|-?\d[\d.eE+-]*|true|false|null|\[\]|\{\}')
"""Matches a value of JSON that is not a name and has no items."""
_OTHERS = (b'""', b"0", b"1", b"true", b"false", b"null", b"[]", b"{}")


def similar(found: bytes, in_string: bool) -> Iterator[bytes]:
    """Yields similar completions. ``in_string``: whether the text ends in a string of JSON."""
    if in_string:
        for letter in ascii_lowercase:
            yield letter.encode() + found
    for digit in range(10):
        yield b"%d" % digit + found
    yield from _with_distinct_strings(found, in_string)
    begin = found.find(b'"') + 1 if in_string else 0
    for value in _VALUE.finditer(found, begin):
        for other in _OTHERS:
            yield found[: value.start()] + other + found[value.end() :]
        if value[0].startswith(b'"'):
            for letter in ascii_lowercase:
                yield found[: value.end() - 1] + letter.encode() + found[value.end() - 1 :]
    yield from _with_properties(found, begin)


def _with_distinct_strings(found: bytes, in_string: bool) -> Iterator[bytes]:
    """The completion with another ending of each string, and with another number for each
    number."""
    begin = found.find(b'"') + 1 if in_string else 0
    numbers = count()

    def other(value: re.Match[bytes]) -> bytes:
        number = next(numbers)
        if value[0].startswith(b'"'):
            return value[0][:-1] + _name(number) + b'"'
        return b"%d" % number if value[0][:1].isdigit() else value[0]

    yield found[:begin] + _VALUE.sub(other, found[begin:])


def _with_properties(found: bytes, begin: int) -> Iterator[bytes]:
    """The completion with one more property at the end of an object."""
    for at in range(begin, len(found)):
        if found[at : at + 1] == b"}":
            before = found[:at].rstrip()
            comma = b"" if before.endswith(b"{") else b", "
            for name in (b"a", b"b"):
                for value in _OTHERS:
                    yield found[:at] + comma + b'"' + name + b'": ' + value + found[at:]


def _name(number: int) -> bytes:
    letters = ""
    while True:
        number, letter = divmod(number, len(ascii_lowercase))
        letters += ascii_lowercase[letter]
        if not number:
            return letters.encode()
