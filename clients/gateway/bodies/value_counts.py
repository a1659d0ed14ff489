"""Counts the values in JSON texts before they are decoded, because decoding many values blocks the
event loop for too long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SMALL_BODY_BYTES = 256 * 1024
"""If the JSON texts have at most this number of bytes together, they may have any number of
values."""
MAX_STRINGS = 65_536
"""Maximum number of strings in a body, including field names. Decoding creates a Python object for
each string, and blocks the event loop during this time."""
MAX_VALUES = 1_048_576
"""Maximum number of values in a body, such as token ids."""
MAX_CONTAINERS = 65_536
"""Maximum number of lists and objects in a body. Decoding one of them takes longer than decoding a
number."""
STRING_BYTES, CONTAINER_BYTES = 64, 80
"""The memory of a short string, and of an empty list or object, after decoding."""
_FOUR_BYTES = tuple(bytes((lead,)) for lead in range(0xF0, 0xF5))
"""The first bytes of characters that take four bytes in UTF-8, such as emojis."""
_CONTINUATIONS = bytes(range(0x80, 0xC0))
"""The bytes of UTF-8 that do not begin a character."""
_SURROGATES = tuple(b"\\u" + lead for lead in (b"d8", b"d9", b"da", b"db"))
"""The beginnings of escaped characters that take four bytes, in lower case."""
_STRUCTURE = b",[{"
"""One of these characters precedes each element of a list and each field of an object. So the
number of these characters outside strings is about the number of values. An empty list or object
counts twice.
"""


class ValueCounts(NamedTuple):
    """The numbers of strings, of values, and of lists and objects. If a text has more than
    ``MAX_STRINGS`` strings, only its strings are counted."""

    strings: int
    values: int
    containers: int
    widened: int = 0
    """Number of bytes by which decoded texts are larger than their JSON. Python stores every
    character of a text with as many bytes as the widest character needs, up to four."""

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> ValueCounts:
        """The counts of some JSON texts together."""
        counted = [_counts(text) for text in texts]
        return cls(*(sum(column) for column in zip(cls(0, 0, 0), *counted, strict=True)))

    @property
    def memory(self) -> int:
        """The memory of the decoded strings, lists and objects in addition to the text, in bytes.
        Decoded empty lists take 27 times the bytes of their text."""
        return STRING_BYTES * self.strings + CONTAINER_BYTES * self.containers + self.widened

    @property
    def excess(self) -> tuple[int, str, int] | None:
        """The first count that is above its bound, the name of the counted values, and the bound.
        None if no count is above its bound."""
        bounds = (
            (self.strings, "strings (with field names)", MAX_STRINGS),
            (self.values, "values", MAX_VALUES),
            (self.containers, "lists and objects", MAX_CONTAINERS),
        )
        return next((bound for bound in bounds if bound[0] > bound[2]), None)


def _counts(text: bytes) -> ValueCounts:
    # After the escaped quotes are removed, every string is the text between two quotes.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        return ValueCounts(num_strings, 0, 0)
    parts = plain.split(b'"')
    structure = b"".join(parts[::2])
    num_values = len(structure) - len(structure.translate(None, _STRUCTURE))
    num_containers = structure.count(b"[") + structure.count(b"{")
    is_narrow = text.isascii() and b"\\u" not in text
    widened = 0 if is_narrow else sum(map(_widened, parts[1::2]))
    return ValueCounts(num_strings, num_values, num_containers, widened)


def _widened(string: bytes) -> int:
    """The number of bytes by which a decoded string is larger than its JSON."""
    escapes = string.count(b"\\u")
    if not escapes and string.isascii():
        return 0
    escaped = string.lower() if escapes else b""
    is_wide = any(lead in string for lead in _FOUR_BYTES) or any(
        lead in escaped for lead in _SURROGATES
    )
    num_chars = len(string.translate(None, _CONTINUATIONS)) - 5 * escapes
    return max(0, (4 if is_wide else 2) * num_chars - len(string))
