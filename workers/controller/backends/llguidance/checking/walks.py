"""Follows a JSON text byte by byte. When a value with obligations (``obligations.py``) ends, checks
the value.

A ``Walk`` is an immutable state, so that many continuations of a text can be tried from one walk.
The grammar already ensures that the text is JSON.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .budget import BYTES_OF_STEP, Budget, Known
from .exact_json import exact, identity
from .obligations import Obligations, Parts

MERGED = 64
"""When an array has this number of new items, they are merged into the set of all its items."""

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_LENGTHS = {ord("t"): 4, ord("f"): 5, ord("n"): 4}
"""The lengths of ``true``, ``false`` and ``null`` by their first byte."""
_SPACE = b" \n\r\t"


class Frame(NamedTuple):
    """An array or object that has begun."""

    outer: Frame | None
    is_object: bool
    start: int
    parts: Parts
    number: int = 0
    """Number of items of an array that have ended."""
    names: frozenset[str] = frozenset()
    """The names of the properties so far, if the number of properties is bounded."""
    inner: Parts = ()
    """The parts of the property whose name was last written."""
    unique: bool = False
    """Whether the items have to be distinct."""
    items: frozenset[Any] = frozenset()
    recent: tuple[Any, ...] = ()
    """The items that are not yet in ``items``."""


class Walk(NamedTuple):
    """The state after a text. Offsets count bytes of the text."""

    length: int = 0
    frame: Frame | None = None
    kind: str = ""
    """The kind of the value or name that has begun: ``string``, ``name``, ``number`` or ``word``.
    Empty if no value or name has begun."""
    start: int = 0
    """The offset of this value or name."""
    escaped: bool = False
    """Whether the next byte is escaped by a backslash."""
    at_name: bool = False
    """Whether the next string is a name of a property."""
    ended: bool = False
    """Whether the whole value has ended."""


class Invalid(Exception):
    """A value of the text violates an obligation."""


class Checks:
    """Checks the texts of one schema."""

    def __init__(self, obligations: Obligations) -> None:
        self._obligations = obligations
        self._verdicts = Known[tuple[int, bytes], bool]()
        """Whether a value matches a part, by the id of the part and the text of the value."""

    def parts_of(self, walk: Walk) -> Parts:
        """The parts of the value that has begun, or of the next value if none has begun."""
        frame = walk.frame
        if frame is None:
            return self._obligations.root
        if frame.is_object:
            return frame.inner
        return self._obligations.item(frame.parts, frame.number) if frame.parts else ()

    def lists_items(self, walk: Walk) -> bool:
        """Whether the text is in an array whose items have to be distinct and are limited to a list
        of values."""
        frame = walk.frame
        if frame is None or not frame.unique:
            return False
        return self._obligations.few_items(frame.parts) is not None

    def after(self, walk: Walk, text: bytes, added: bytes, budget: Budget) -> Walk:
        """The walk after ``added``, which follows ``text``. ``walk`` is the walk after ``text``.
        Raises ``Invalid`` or ``Exhausted``."""
        base, end = walk.length, walk.length + len(added)
        at = base
        while at < end:
            byte = added[at - base]
            if walk.kind in ("string", "name"):
                if walk.escaped:
                    walk, at = walk._replace(escaped=False), at + 1
                    continue
                at = base + _next(added, at - base)
                if at >= end:
                    break
                if added[at - base] == _BACKSLASH:
                    walk = walk._replace(escaped=True)
                elif walk.kind == "string":
                    walk = self._value(walk, _cut(text, added, walk.start, at + 1), budget)
                else:
                    walk = self._name(walk, _cut(text, added, walk.start, at + 1), budget)
                at += 1
                continue
            if walk.kind == "number":
                if byte in b"0123456789+-.eE":
                    at += 1
                    continue
                walk = self._value(walk, _cut(text, added, walk.start, at), budget)
            elif walk.kind == "word":
                at += 1
                written = _cut(text, added, walk.start, at)
                if len(written) == _LENGTHS[written[0]]:
                    walk = self._value(walk, written, budget)
                continue
            if byte in b"}]":
                walk = self._closed(walk, _cut(text, added, _start(walk), at + 1), budget)
            else:
                walk = self._outside(walk, at, byte)
            at += 1
        walk = walk._replace(length=end)
        if walk.kind and walk.frame is not None and walk.frame.unique:
            self._check_beginning(walk.frame, _cut(text, added, walk.start, end))
        return walk

    def ends(self, walk: Walk, text: bytes, budget: Budget) -> bool:
        """Whether the obligations allow the text to end here. Raises ``Exhausted``."""
        if walk.kind == "number" and walk.frame is None:
            try:
                self._value(walk, text[walk.start :], budget)
            except Invalid:
                return False
        return True

    # --- inside ---------------------------------------------------------------------------------

    def _outside(self, walk: Walk, at: int, byte: int) -> Walk:
        if byte in b"{[":
            return self._opened(walk, at, byte == ord("{"))
        if byte == _QUOTE:
            return walk._replace(kind="name" if walk.at_name else "string", start=at)
        if byte == ord(","):
            assert walk.frame is not None
            self._check_room(walk.frame)
            return walk._replace(at_name=walk.frame.is_object)
        if byte in _SPACE or byte == ord(":"):
            return walk._replace(at_name=walk.at_name and byte != ord(":"))
        return walk._replace(kind="word" if byte in _LENGTHS else "number", start=at)

    def _check_room(self, frame: Frame) -> None:
        """Raises ``Invalid`` if the array or object cannot have another item or property."""
        for part in frame.parts:
            if part is False or not self._obligations.is_weakened(part):
                continue
            most = part.get("maxProperties") if frame.is_object else None
            if isinstance(most, int) and len(frame.names) >= most:
                raise Invalid
        if frame.unique:
            self._check_beginning(frame, b"")

    def _check_beginning(self, frame: Frame, begun: bytes) -> None:
        """Raises ``Invalid`` if the items of an array are limited to a list of values, and each
        listed value that begins with ``begun`` is already an item."""
        few = self._obligations.few_items(frame.parts)
        if few is not None and not any(
            text.startswith(begun) and item not in frame.items and item not in frame.recent
            for item, text in few.items()
        ):
            raise Invalid

    def _opened(self, walk: Walk, at: int, is_object: bool) -> Walk:
        parts = self.parts_of(walk)
        weakened = [one for one in parts if one is not False and self._obligations.is_weakened(one)]
        unique = not is_object and any(one.get("uniqueItems") is True for one in weakened)
        frame = Frame(walk.frame, is_object, at, parts, unique=unique)
        return walk._replace(frame=frame, at_name=is_object)

    def _closed(self, walk: Walk, text: bytes, budget: Budget) -> Walk:
        assert walk.frame is not None
        outer = walk._replace(frame=walk.frame.outer, at_name=False)
        return self._value(outer, text, budget, walk.frame)

    def _name(self, walk: Walk, text: bytes, budget: Budget) -> Walk:
        """The walk after the closing quote of a property's name."""
        frame, walk = walk.frame, walk._replace(kind="", at_name=False)
        assert frame is not None
        if not frame.parts:
            return walk
        name = json.loads(text)
        inner = self._obligations.property(frame.parts, name, budget)
        if False in inner:
            raise Invalid
        names = frame.names
        for part in frame.parts:
            if part is False or not self._obligations.is_weakened(part):
                continue
            if "propertyNames" in part and not self._holds(part["propertyNames"], text, budget):
                raise Invalid
            if isinstance(most := part.get("maxProperties"), int):
                names = frame.names | {name}
                if len(names) > most:
                    raise Invalid
        return walk._replace(frame=frame._replace(inner=inner, names=names))

    def _value(self, walk: Walk, text: bytes, budget: Budget, ended: Frame | None = None) -> Walk:
        """The walk after the end of a value. ``ended``: the frame of the value, if the value is an
        array or object."""
        parts = self.parts_of(walk) if ended is None else ended.parts
        for part in parts:
            if self._obligations.is_obligated(part) and not self._holds(part, text, budget):
                raise Invalid
        frame, walk = walk.frame, walk._replace(kind="")
        if frame is None:
            return walk._replace(ended=True)
        if frame.unique:
            frame = _with_item(frame, text, budget)
        if not frame.is_object:
            frame = frame._replace(number=frame.number + 1)
        return walk._replace(frame=frame)

    def _holds(self, part: Any, text: bytes, budget: Budget) -> bool:
        if part is False:
            return False
        key = id(part), text
        known = budget.verdicts.get(key)
        if known is None:
            known = self._verdicts.find(
                key, len(text), budget, lambda: self._matches(part, text, budget)
            )
            budget.verdicts[key] = known
        return known

    def _matches(self, part: Any, text: bytes, budget: Budget) -> bool:
        budget.take(1 + len(text) // BYTES_OF_STEP)
        try:
            value = exact(text)
        except (ValueError, RecursionError):
            return False
        return self._obligations.values.holds(part, value, budget)


def _with_item(frame: Frame, text: bytes, budget: Budget) -> Frame:
    """The array after another item. Raises ``Invalid`` if an earlier item is equal."""
    budget.take(1 + len(text) // BYTES_OF_STEP)
    item = identity(exact(text))
    if item in frame.items or item in frame.recent:
        raise Invalid
    recent = (*frame.recent, item)
    if len(recent) < MERGED:
        return frame._replace(recent=recent)
    return frame._replace(items=frame.items.union(recent), recent=())


def _start(walk: Walk) -> int:
    """The offset of the innermost array or object that has not ended."""
    assert walk.frame is not None
    return walk.frame.start


def _cut(text: bytes, added: bytes, start: int, end: int) -> bytes:
    """The bytes ``start`` to ``end - 1`` of ``text + added``. ``end`` is not less than the length
    of ``text``."""
    base = len(text)
    if start >= base:
        return added[start - base : end - base]
    return text[start:] + added[: end - base]


def _next(text: bytes, at: int) -> int:
    """The offset of the next quote or backslash; the length of the text if there is neither."""
    quote = text.find(b'"', at)
    end = quote if quote >= 0 else len(text)
    backslash = text.find(b"\\", at, end)
    return backslash if backslash >= 0 else end
