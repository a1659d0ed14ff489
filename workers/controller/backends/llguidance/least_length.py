"""Computes an upper bound of the length of the shortest value that matches a JSON schema. The bound
is computed from the schema alone, without a search.

If the bound is far below ``max_tokens``, the text can begin before a search has found the shortest
value. If a schema has alternatives, the bound includes the requirements of all alternatives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .plain import target, unrolled

MAX_PARTS = 200
"""Maximum number of schemas that apply to one value, including alternatives."""
MAX_VALUES = 500
"""Maximum number of schemas that are visited for one bound. A schema counts once for each value
that must match it."""
MAX_IN_ALL = 20_000
"""Maximum number of schemas that are visited for the bounds of all items of a schema. Visiting this
number takes about 20 ms."""
MAX_ENUM = 2_000
"""Maximum values of an ``enum``."""
MAX_DEPTH = 40
"""Maximum nesting of values."""
MAX_CHARACTERS = 4_000
"""Maximum bytes of the shortest string with a pattern. If the string may be longer, the bound is
unknown."""
NUMBER = 40
"""Maximum characters of the shortest number that a schema allows. The bound is unknown if the
limits in the schema are very large or very near to 0."""
FORMAT = 64
"""Maximum characters of the shortest string of any ``format``."""
ESCAPED = 2
"""Assumed number of bytes that each character of a pattern adds to the shortest match. Few
characters add more."""

UNKNOWN_BYTES = 256
"""Assumed bytes of an item whose bound is unknown."""
RECURSIVE_BYTES = 32
"""Assumed bytes of an item that contains itself (a recursive schema)."""

Schema = dict[str, Any]
_NO_SCHEMAS = frozenset(("enum", "const", "default", "examples"))
_STRINGS = frozenset(("pattern", "format", "patternProperties"))
_OPTIONS = ("allOf", "anyOf", "oneOf")
_ONLY_A_TYPE = frozenset(("type", "title", "description", "default", "examples"))
_NUMBERS = frozenset(("number", "integer"))
_ITEMS = ("items", "prefixItems", "additionalItems", "additionalProperties")
_NAMED = ("properties", "patternProperties")
_OF_ITEMS = frozenset((*_ITEMS, *_NAMED))
_PLAIN = re.compile(r"[ !#-\[\]-~]*")
"""Characters that are written unescaped, in one byte."""
_LEADING_ON = frozenset((*_OPTIONS, "$ref"))


class Growth(NamedTuple):
    """Bounds of the growth of a text's shortest completion, in bytes. They are computed from the
    schema alone."""

    item: int
    """The maximum growth when the text begins one item: an element of an array, or a property
    including its name."""
    string: int
    """The maximum growth within one string that has to match a pattern or a format; 0 if the schema
    has no such string."""


class _UnknownError(Exception):
    """The bound of the schema is unknown."""


def least_bytes(root: Any) -> int | None:
    """An upper bound of the bytes of the shortest value of a schema; None if the bound is unknown,
    or if the schema is not valid."""
    try:
        return _Lengths(root).of([root], 0)
    except (_UnknownError, ArithmeticError, AttributeError, TypeError, ValueError):
        return None


def growth(root: Any) -> Growth:
    """The bounds of the growth under a schema. An item with an unknown bound counts as
    ``UNKNOWN_BYTES``, an item that contains itself as ``RECURSIVE_BYTES``."""
    item = len("null")
    string = 0
    left = [root]
    try:
        lengths = _Lengths(root, RECURSIVE_BYTES)
    except (_UnknownError, AttributeError):
        return Growth(UNKNOWN_BYTES, UNKNOWN_BYTES)
    lengths.total = MAX_IN_ALL
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, dict):
            continue
        left += [inner for key, inner in one.items() if key not in _NO_SCHEMAS]
        if not _STRINGS.isdisjoint(one):
            string = max(string, _of_item(lengths, {"type": "string", **_strings_of(one)}))
        for name, inner in () if _OF_ITEMS.isdisjoint(one) else _items(one):
            item = max(item, _written(name) + 4 + _of_item(lengths, inner))
    return Growth(max(item, string), string)


def _items(node: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas of the items and the properties of one value, with their names."""
    for key in _NAMED:
        if isinstance(named := node.get(key), dict):
            yield from named.items()
    for key in _ITEMS:
        inner = node.get(key)
        for one in inner if isinstance(inner, list) else [inner]:
            if isinstance(one, dict):
                yield "", one


def _strings_of(node: Schema) -> Schema:
    names = node.get("patternProperties")
    found: Schema = {}
    for key in ("pattern", "format"):
        if key in node:
            found[key] = node[key]
    if isinstance(names, dict) and names:
        found["pattern"] = max((str(name) for name in names), key=len)
    return found


def _of_item(lengths: _Lengths, schema: Any) -> int:
    try:
        return min(lengths.anew(schema), MAX_CHARACTERS)
    except (_UnknownError, ArithmeticError, AttributeError, TypeError, ValueError):
        return UNKNOWN_BYTES


class _Lengths:
    def __init__(self, root: Any, inside: int | None = None) -> None:
        """``inside``: the assumed bytes of a value that contains itself. If ``inside`` is None,
        such a value raises an error."""
        self._root = root
        self._inside = inside
        self._active: set[int] = set()
        self._known: dict[int, tuple[Schema, int]] = {}
        """Maps the id of a schema's Python object to the schema and its length. The schema is
        stored so that the id stays unique. Only lengths that do not depend on the enclosing schemas
        are stored."""
        self._cycles = 0
        """Number of visits to values that contain themselves."""
        self._left = MAX_VALUES
        self.total = MAX_VALUES
        """Number of schemas that further calls of ``anew`` may visit."""
        options = root.get("x-guidance", {}) if isinstance(root, dict) else {}
        for name in ("item_separator", "key_separator"):
            if options.get(name, ",") not in (",", ", ", ":", ": "):
                raise _UnknownError

    def anew(self, schema: Any) -> int:
        """The bound of one schema. Each call may visit ``MAX_VALUES`` schemas."""
        self._active.clear()
        self._left = most = min(MAX_VALUES, self.total)
        try:
            return self.of([schema], 0)
        finally:
            self.total -= 1 + most - max(0, self._left)

    def of(self, schemas: list[Any], depth: int) -> int:
        """The bound of a value that has to match all of the schemas."""
        if len(schemas) != 1:
            return self._of(schemas, depth)
        [schema] = schemas
        known = self._known.get(id(schema))
        if known is not None:
            return known[1]
        cycles = self._cycles
        length = self._of(schemas, depth)
        if cycles == self._cycles:
            self._known[id(schema)] = schema, length
        return length

    def _of(self, schemas: list[Any], depth: int) -> int:
        parts = self._parts(schemas)
        self._left -= len(parts)
        if self._left < 0 or depth > MAX_DEPTH:
            raise _UnknownError
        length = max(map(_listed, parts), default=0)
        if length and len(parts) == 1:
            return length
        kinds = {kind for part in parts for kind in _kinds(part)}
        if not kinds and len(parts) < 2:
            return len("null")
        if len(parts) == 1 and _ONLY_A_TYPE.issuperset(parts[0]):
            return NUMBER if kinds & _NUMBERS else len("false")
        entered = {id(part) for part in parts}
        if entered & self._active:
            self._cycles += 1
            if self._inside is None:
                raise _UnknownError
            return self._inside
        self._active |= entered
        length = max(length, len("false"))
        if not kinds or kinds & _NUMBERS:
            length = max(length, _number(parts))
        if not kinds or "string" in kinds:
            length = max(length, _string(parts))
        if not kinds or "array" in kinds:
            length = max(length, self._array(parts, depth))
        if not kinds or "object" in kinds:
            length = max(length, self._object(parts, depth))
        self._active -= entered
        return length

    def _parts(self, schemas: list[Any]) -> list[Schema]:
        """The schemas, the targets of their references, and all their alternatives."""
        if len(schemas) == 1 and type(schemas[0]) is dict and _LEADING_ON.isdisjoint(schemas[0]):
            return schemas
        parts: list[Schema] = []
        seen: set[int] = set()
        left = list(schemas)
        while left:
            one = left.pop()
            if isinstance(one, bool) or id(one) in seen:
                continue  # ``false`` may be one of several alternatives.
            if not isinstance(one, dict) or len(seen) > MAX_PARTS:
                raise _UnknownError
            seen.add(id(one))
            parts.append(one)
            for key in _OPTIONS:
                if isinstance(options := one.get(key), list):
                    left += options
            if isinstance(reference := one.get("$ref"), str):
                left.append(target(self._root, reference))
        return parts

    def _array(self, parts: list[Schema], depth: int) -> int:
        count = max(int(part.get("minItems", 0)) for part in parts)
        if not count:
            return 2
        if count > MAX_VALUES:
            raise _UnknownError
        first = max((len(_prefix(part)) for part in parts), default=0)
        length = 2 + 2 * count
        for number in range(min(count, first)):
            length += self.of([_item(part, number) for part in parts], depth + 1)
        if count > first:
            length += (count - first) * self.of([_item(part, first) for part in parts], depth + 1)
        return length

    def _object(self, parts: list[Schema], depth: int) -> int:
        names: dict[str, None] = {}
        for part in parts:
            if isinstance(part.get("required"), list):
                names |= dict.fromkeys(part["required"])
        least = max(int(part.get("minProperties", 0)) for part in parts) - len(names)
        length = 2 + sum(self._property(parts, name, depth) for name in names)
        if least > 0:
            others = {name: None for part in parts for name in part.get("properties", ())}
            others["additional"] = None
            length += least * max(self._property(parts, name, depth) for name in others)
        return length

    def _property(self, parts: list[Schema], name: str, depth: int) -> int:
        inner: list[Any] = []
        for part in parts:
            if name in part.get("properties", ()):
                inner.append(part["properties"][name])
            elif "additionalProperties" in part:
                inner.append(part["additionalProperties"])
            inner += part.get("patternProperties", {}).values()
        return _written(name) + 4 + self.of(inner, depth + 1)


def _listed(part: Schema) -> int:
    """The bytes of the longest value that a schema lists; 0 if it does not list values."""
    values = part.get("enum", [])
    if len(values) > MAX_ENUM:
        raise _UnknownError
    return max(map(_written, [*values, *([part["const"]] if "const" in part else [])]), default=0)


def _kinds(part: Schema) -> list[str]:
    kind = part.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def _prefix(part: Schema) -> list[Any]:
    prefix = part.get("prefixItems", part.get("items"))
    return prefix if isinstance(prefix, list) else []


def _item(part: Schema, number: int) -> Any:
    prefix = _prefix(part)
    if number < len(prefix):
        return prefix[number]
    after = part.get("items", True)
    return part.get("additionalItems", True) if isinstance(after, list) else after


def _string(parts: list[Schema]) -> int:
    least = max(int(part.get("minLength", 0)) for part in parts)
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    formats = sum(isinstance(part.get("format"), str) for part in parts)
    found = sum(ESCAPED * unrolled(pattern)[0] for pattern in patterns)
    if len(patterns) + formats > 1 or found > MAX_CHARACTERS:
        raise _UnknownError
    found += FORMAT * formats
    return 2 + found + least


def _number(parts: list[Schema]) -> int:
    for part in parts:
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            value = part.get(key, 0)
            if value and isinstance(value, int | float) and not 1e-12 < abs(value) < 1e18:
                raise _UnknownError
    return NUMBER


def _written(value: Any) -> int:
    if type(value) is str and _PLAIN.fullmatch(value):
        return len(value) + 2
    return len(json.dumps(value, ensure_ascii=False).encode())
