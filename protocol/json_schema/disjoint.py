"""Decides whether two schemas are disjoint. Two schemas are disjoint if no value matches both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .parts import Schema, Unsupported, canonical, knows, target, type_of, types_of, values_of

MAX_DEPTH = 6
"""Maximum depth to which properties, references and alternatives are compared."""
MAX_COMPARED = 2_000
"""Maximum number of pairs of schemas that are compared for one answer."""
VALUES_OF_STEP = 20
"""Comparing two schemas takes as long as comparing this number of values of ``const`` or
``enum``."""


class Disjoint:
    """Compares parts of one schema."""

    def __init__(self, root: Any, draft: int, step: Callable[[int], None]) -> None:
        """``step`` counts the compared schemas."""
        self._root = root
        self._draft = draft
        self._step = step
        self._left = 0
        self._known: dict[int, dict[str, Any]] = {}
        """The results of ``_values`` by the id of the schema."""

    def holds(self, one: Any, other: Any) -> bool:
        """Whether two schemas are certainly disjoint. False if a value matches both, or if the
        function cannot decide."""
        self._left = MAX_COMPARED
        return self._holds(one, other, MAX_DEPTH)

    def _holds(self, one: Any, other: Any, depth: int) -> bool:
        self._left -= 1
        self._step(1)
        if one is False or other is False:
            return True
        if depth < 0 or self._left < 0:
            return False
        for first in self._parts(one, depth):
            for second in self._parts(other, depth):
                if self._parts_hold(first, second, depth):
                    return True
        return False

    def _parts(self, schema: Any, depth: int) -> Iterator[Schema]:
        """Yields the schema, the target of its reference and the members of its ``allOf``. A value
        that matches the schema also matches each yielded schema."""
        if not isinstance(schema, dict) or depth < 0:
            return
        self._step(1)
        if self._draft > 7 or "$ref" not in schema:
            yield schema
            inner = schema.get("allOf", ())
            for one in inner if isinstance(inner, list) else ():
                yield from self._parts(one, depth - 1)
        if "$ref" in schema:
            try:
                found = target(self._root, schema["$ref"])
            except Unsupported:
                return
            yield from self._parts(found, depth - 1)

    def _parts_hold(self, one: Schema, other: Schema, depth: int) -> bool:
        for first, second in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                options = first.get(name)
                if isinstance(options, list) and all(
                    self._holds(option, second, depth - 1) for option in options
                ):
                    return True
        values, others = self._values(one), self._values(other)
        self._step((len(values or ()) + len(others or ())) // VALUES_OF_STEP)
        kinds = _kinds(one, values) & _kinds(other, others)
        if not kinds:
            return True
        if values is not None and others is not None:
            return values.keys().isdisjoint(others)
        return all(self._is_empty(kind, one, other, depth) for kind in kinds)

    def _values(self, schema: Schema) -> dict[str, Any] | None:
        """The values that ``const`` or ``enum`` allows, by their canonical texts; None without
        these keywords."""
        found = self._known.get(id(schema))
        if found is None:
            const = {"const"} if knows(self._draft, "const") else set[str]()
            named = {name: schema[name] for name in ("enum", *const) if name in schema}
            values = values_of(named)
            if values is None:
                return None
            self._step(len(values))
            found = {canonical(value): value for value in values}
            self._known[id(schema)] = found
        return found

    def _is_empty(self, kind: str, one: Schema, other: Schema, depth: int) -> bool:
        """Whether certainly no value of the type ``kind`` matches both schemas."""
        if kind == "object":
            required = [
                name
                for schema in (one, other)
                if isinstance(schema.get("required"), list)
                for name in schema["required"]
            ]
            return any(
                self._holds(_property(one, name), _property(other, name), depth - 1)
                for name in required
            )
        if kind not in _LENGTHS:
            return False
        lower, upper = _LENGTHS[kind]
        return any(
            _number(first.get(lower), 0) > _number(second.get(upper), float("inf"))
            for first, second in ((one, other), (other, one))
        )


_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
}


def _number(value: Any, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else default


def _kinds(schema: Schema, values: dict[str, Any] | None) -> set[str]:
    kinds = {"number" if kind == "integer" else kind for kind in types_of(schema)}
    return kinds if values is None else kinds & set(map(type_of, values.values()))


def _property(schema: Schema, name: Any) -> Any:
    """The schema of a property. If the property is not declared, and the schema has
    ``patternProperties``, the result is True (no known restriction), because a pattern may match
    the name."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)
