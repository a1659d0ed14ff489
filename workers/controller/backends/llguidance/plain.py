"""Decides whether llguidance certainly compiles a JSON schema quickly. Such a schema is called
*plain*. The check looks for features of a schema that make llguidance slow.

Compiling a schema takes bounded time and stack if all of this holds:

- its text has a moderate length and depth
- each intersection (``allOf``, and keywords next to ``anyOf``, ``oneOf`` or ``$ref``) has few
  objects, and few alternatives result from it
- it has few objects (properties and alternatives), which llguidance compares in pairs
- its patterns are short, repeat little and are not intersected
- its arrays have few items

Other schemas are first compiled in a separate process.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .....protocol.json_schema.parts import Unsupported
from .....protocol.json_schema.parts import target as target_of

MAX_TEXT = 256 * 1024
"""Maximum characters of a schema."""
MAX_DEPTH = 40
"""Maximum nesting of arrays and objects."""
MAX_LEVELS = 400
"""Maximum nesting of arrays and objects, including targets of references. Each level takes up to 7
kB of llguidance's stack."""
MAX_NODES = 1_500
"""Maximum objects and booleans of a schema. The slowest schema with this number is one object whose
properties are the other objects or booleans. llguidance compares the properties in pairs, which
takes 0.2 s of CPU time."""
MAX_VALUES = 3_000
"""Maximum values of a schema: members of objects, and elements of arrays. The slowest schema with
this number has a long array in ``const``, or in ``required``, and takes 0.2 s of CPU time."""
MAX_COPIES = 500
"""Maximum number of alternatives that result from one intersection, and maximum number of objects
in one intersection."""
MAX_ENUM = 50
"""Maximum values of an ``enum`` in a schema that also has properties or items."""
MAX_ITEMS = 500
"""Maximum sum of ``minItems``, ``maxItems`` and the number of ``prefixItems`` of all arrays."""
MAX_PATTERN = 1_500
"""Maximum characters of one pattern."""
MAX_PATTERNS = 20_000
"""Maximum characters of all patterns together."""
MAX_UNROLLED = 2_000
"""Maximum characters of one pattern with its repetitions written out."""
MAX_NAMED = 3
"""Maximum patterns for the names of one object's properties."""
MAX_MULTIPLE = 10_000

_OPTIONS = ("anyOf", "oneOf", "allOf")
_WATCHED = frozenset(
    {
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "$ref",
        "pattern",
        "patternProperties",
        "multipleOf",
        "minItems",
        "maxItems",
        "prefixItems",
        "x-guidance",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_ANNOTATIONS = frozenset(
    {
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "id",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "readOnly",
        "writeOnly",
        "deprecated",
        "$anchor",
        "x-guidance",
    }
)
_LEXEME = re.compile(
    r"\{(?P<least>\d*)(?:,(?P<most>\d*))?\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL
)
"""Lexemes of a pattern: a repetition, an escape, a class, or any character."""
_VALUES = frozenset(("enum", "const", "default", "examples"))
_LARGE = frozenset(("properties", "patternProperties", "items", "prefixItems"))

Schema = dict[str, Any]


def is_plain(text: str, root: Any) -> bool:
    """Whether a schema certainly compiles quickly. ``text``: the JSON text of the schema."""
    if len(text) > MAX_TEXT:
        return False
    nodes, depth, num_values, num_booleans = _nodes(root)
    if depth > MAX_DEPTH or len(nodes) + num_booleans > MAX_NODES or num_values > MAX_VALUES:
        return False
    found = [node for node in nodes if not _WATCHED.isdisjoint(node)]
    try:
        return not found or _Plain(root, found).holds(depth)
    except RecursionError:
        return False


def _nodes(root: Any) -> tuple[list[Schema], int, int, int]:
    """The objects in a value; its depth, up to ``MAX_DEPTH`` + 1; and the numbers of values and of
    booleans in it."""
    nodes: list[Schema] = []
    level, depth, num_values, num_booleans = [root], 0, 0, 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        below: list[Any] = []
        for one in level:
            if type(one) is dict:
                nodes.append(one)
                below += one.values()
            else:
                below += one
        level = [one for one in below if type(one) is dict or type(one) is list]
        num_values += len(below)
        num_booleans += sum(type(one) is bool for one in below)
    return nodes, depth, num_values, num_booleans


class _Counts(NamedTuple):
    """The numbers of alternatives, patterns and objects in a value, and the depth of its nesting.
    The target of a reference counts once for each reference."""

    options: int
    patterns: int
    objects: int
    levels: int


_NOTHING = _Counts(0, 0, 0, 0)
_ENDLESS = _Counts(1 << 30, 0, 1 << 30, 1 << 30)


class _Plain:
    def __init__(self, root: Any, nodes: list[Schema]) -> None:
        self._root = root
        self._nodes = nodes
        self._counts: dict[int, _Counts] = {}
        """The counts by the id of a value's Python object. While a value is being counted, its
        entry is ``_ENDLESS``, so that a value that contains itself exceeds the bounds."""

    def holds(self, depth: int) -> bool:
        items = patterns = 0
        referenced: set[str] = set()
        for node in self._nodes:
            if "$dynamicRef" in node or "$recursiveRef" in node:
                return False
            if isinstance(reference := node.get("$ref"), str):
                if reference != "#" and not reference.startswith("#/"):
                    return False
                referenced.add(reference)
            multiple = node.get("multipleOf", 1)
            if isinstance(multiple, int | float) and not 1e-4 <= multiple <= MAX_MULTIPLE:
                return False
            items += _bound(node, "minItems") + _bound(node, "maxItems")
            if isinstance(prefix := node.get("prefixItems"), list):
                items += len(prefix)
            for pattern in _patterns(node):
                patterns += len(pattern)
                if not _is_short(pattern):
                    return False
            if len(node.get("patternProperties", ())) > MAX_NAMED:
                return False
        if items > MAX_ITEMS or patterns > MAX_PATTERNS:
            return False
        if len(referenced) * depth > MAX_LEVELS < self._count(self._root).levels:
            return False
        return all(map(self._copies_little, self._nodes))

    def _copies_little(self, node: Schema) -> bool:
        """Whether the intersections of a schema have few alternatives, and at most one pattern."""
        options = [(key, node[key]) for key in _OPTIONS if isinstance(node.get(key), list)]
        reference = node.get("$ref")
        beside = {key: value for key, value in node.items() if key not in _ANNOTATIONS}
        for key, _ in options:
            del beside[key]
        beside.pop("$ref", None)
        values = beside.get("enum", ())
        if len(values) > MAX_ENUM and not _LARGE.isdisjoint(beside):
            return False
        parts: list[Any] = [beside] if beside else []
        parts += [target(self._root, reference)] if isinstance(reference, str) else []
        for key, inner in options:
            parts += inner if key == "allOf" else [inner]
        if len(parts) < 2:
            return True
        product, patterns, size = 1, 0, 0
        for part in parts:
            found = self._count(part)
            product *= 1 + found.options
            patterns += found.patterns > 0
            size += found.objects
            if max(product, size) > MAX_COPIES:
                return False
        return patterns <= 1

    def _count(self, value: Any) -> _Counts:
        """The counts of a value and of the targets of its references."""
        if type(value) is not dict and type(value) is not list:
            return _NOTHING
        known = self._counts.get(id(value))
        if known is not None:
            return known
        self._counts[id(value)] = _ENDLESS
        options = patterns = objects = levels = 0
        inside: list[Any] = value if type(value) is list else []
        if type(value) is dict:
            objects = 1
            for key in ("anyOf", "oneOf", "enum", "type"):
                if type(value.get(key)) is list:
                    options += len(value[key])
            patterns += any(isinstance(value.get(key), str) for key in ("pattern", "format"))
            inside = [inner for key, inner in value.items() if key not in _VALUES]
            if isinstance(reference := value.get("$ref"), str):
                inside.append(target(self._root, reference))
        for inner in inside:
            found = self._count(inner)
            options += found.options
            patterns += found.patterns
            objects += found.objects
            levels = max(levels, found.levels)
        made = self._counts[id(value)] = _Counts(options, patterns, objects, levels + 1)
        return made


def target(root: Any, reference: str) -> Any:
    """The target of a reference into the same schema; an empty list if the schema does not have
    this target."""
    try:
        return target_of(root, reference)
    except Unsupported:
        return []


def _bound(node: Schema, key: str) -> int:
    value = node.get(key, 0)
    return int(value) if isinstance(value, int | float) else 0


def _patterns(node: Schema) -> list[str]:
    """The patterns of one schema, including those for names and for white space."""
    found = [node[key] for key in ("pattern",) if isinstance(node.get(key), str)]
    if isinstance(named := node.get("patternProperties"), dict):
        found += named
    if isinstance(options := node.get("x-guidance"), dict):
        found += [value for value in options.values() if isinstance(value, str)]
    return found


def _is_short(pattern: str) -> bool:
    return len(pattern) <= MAX_PATTERN and unrolled(pattern)[1] <= MAX_UNROLLED


def unrolled(pattern: str) -> tuple[int, int]:
    """The number of characters of a pattern if each ``{least,most}`` is written out: first with the
    least number of repetitions, then with the most. The numbers are approximate, because the
    pattern may not be valid."""
    if "{" not in pattern:
        return len(pattern), len(pattern)
    groups: list[tuple[int, int]] = []
    """For each open group: the counts of the pattern before the group."""
    least = most = 0
    last = (0, 0)
    """The counts of the last atom."""
    for lexeme in _LEXEME.finditer(pattern):
        text = lexeme[0]
        if text == "(":
            groups.append((least, most))
            least = most = 0
            last = (0, 0)
        elif text == ")" and groups:
            last = least, most
            before = groups.pop()
            least, most = before[0] + last[0], before[1] + last[1]
        elif lexeme["least"] is not None:
            low = int(lexeme["least"][:9] or 0)
            high = low if lexeme["most"] is None else int(lexeme["most"][:9] or low)
            low, high = max(1, low) - 1, max(1, low, high) - 1
            least, most = least + low * last[0], most + high * last[1]
            last = last[0] * (low + 1), last[1] * (high + 1)
        else:
            last = (1, 1)
            least, most = least + 1, most + 1
    return least, most
