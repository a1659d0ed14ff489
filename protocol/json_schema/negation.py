"""Negates schemas. The negation of a schema is a list of alternatives. Each alternative is a
schema, and has only keywords that llguidance implements.

A value that matches an alternative does not match the original schema. But the alternatives do not
allow all values that do not match the original schema. If the type ``integer`` is negated, the
alternatives allow no number. If an item of an array has to violate a schema, the alternatives only
allow a violation in the first ``MAX_PLACES`` items. If an additional property has to violate a
schema, they only allow names that the other schemas declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise
from typing import Any

from .complement import without
from .formats import KNOWN, PATTERNS
from .parts import (
    TYPES,
    Schema,
    Unsupported,
    all_of,
    any_of,
    excluding,
    knows,
    target,
    type_of,
    types_of,
)

MAX_PLACES = 8
"""If an item of an array has to match a schema, only the first items are considered, up to this
number."""
MAX_VALUES = 64
"""Maximum number of values of an ``enum`` that is negated."""
MAX_CHARACTERS = 1_000
"""Maximum number of characters of all strings of an ``enum`` that is negated."""
MAX_NUMBER = 2**53
"""Maximum absolute value of a number that is negated. llguidance rounds larger integers."""
MAX_ONE_OF = 16
"""Maximum number of alternatives of a ``oneOf``."""

_NOTHING = frozenset(("then", "else", "minContains", "maxContains", "prefixItems"))
"""Keywords without a negation of their own. Each is negated together with another keyword of the
same schema."""
_UNSUPPORTED = frozenset(
    {"patternProperties", "additionalItems", "multipleOf", "propertyNames"}
    | {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
    | {"extends", "disallow", "divisibleBy"}
)


class Negation:
    """Negates parts of one schema."""

    def __init__(
        self,
        root: Any,
        draft: int,
        exact: Callable[[Any], Any],
        step: Callable[[int], None],
    ) -> None:
        """``exact`` rewrites a schema; it raises Unsupported if a keyword cannot be enforced.
        ``step`` counts the visited schemas."""
        self._root = root
        self._draft = draft
        self._exact = exact
        self._step = step
        self._active: set[str] = set()
        """References whose targets are being negated."""
        self.names: list[str] = []
        """Names that additional properties of the value may have. The negation of
        ``additionalProperties`` requires a property with one of these names."""
        self._patterns: dict[str, str] = {}
        """The complements that were computed, by pattern."""

    def of(self, schema: Any) -> list[Any]:
        """The alternatives that negate a schema. Raises Unsupported if a keyword cannot be
        negated."""
        self._step(1)
        if schema is True:
            return []
        if schema is False:
            return [True]
        if not isinstance(schema, dict):
            raise Unsupported
        if self._draft <= 7 and "$ref" in schema:
            return self._reference(schema["$ref"])
        return [option for option in self._options(schema) if option is not False]

    def _options(self, schema: Schema) -> Iterator[Any]:
        for name, value in schema.items():
            if not knows(self._draft, name) or name in _NOTHING:
                continue
            if name in _UNSUPPORTED:
                raise Unsupported
            if name == "format":
                if value in KNOWN or value in PATTERNS:
                    raise Unsupported
            elif name == "uniqueItems":
                if value is True:
                    raise Unsupported
            elif (negate := getattr(self, f"_{_METHODS.get(name, '')}", None)) is not None:
                yield from negate(value, schema)
        if "prefixItems" in schema and knows(self._draft, "prefixItems"):
            yield from self._places(schema["prefixItems"])
            if "items" in schema:
                raise Unsupported

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """A context for negating the schemas of another value, such as an item. In this context,
        ``names`` is empty."""
        names, self.names = self.names, []
        try:
            yield
        finally:
            self.names = names

    def _reference(self, reference: Any, _: Schema | None = None) -> list[Any]:
        inner = target(self._root, reference)
        if reference in self._active:
            raise Unsupported
        self._active.add(reference)
        try:
            return self.of(inner)
        finally:
            self._active.discard(reference)

    # --- all types ------------------------------------------------------------------------------

    def _type(self, _: Any, schema: Schema) -> Iterator[Any]:
        kinds = types_of(schema)
        if not set(kinds) <= {*TYPES, "integer"}:
            raise Unsupported
        # A schema cannot express "a number that is not an integer". So all numbers are forbidden.
        forbidden = {*kinds, *(["number"] if "integer" in kinds else [])}
        yield _typed([kind for kind in TYPES if kind not in forbidden])

    def _enum(self, values: Any, _: Schema) -> Iterator[Any]:
        yield any_of(self.of_values(_listed(values)))

    def _const(self, value: Any, _: Schema) -> Iterator[Any]:
        yield any_of(self.of_values([value]))

    def of_values(self, values: list[Any]) -> Iterator[Any]:
        """The alternatives that allow all values except ``values``."""
        if len(values) > MAX_VALUES:
            raise Unsupported
        self._step(len(values))
        by_type: dict[str, list[Any]] = {}
        for value in values:
            by_type.setdefault(type_of(value), []).append(value)
        yield _typed([kind for kind in TYPES if kind not in by_type])
        booleans = by_type.get("boolean", ())
        if len({*booleans}) == 1:
            yield {"enum": [True not in booleans]}  # Draft 4 does not have ``const``.
        if strings := by_type.get("string"):
            if sum(map(len, strings)) > MAX_CHARACTERS:
                raise Unsupported
            yield {"type": "string", "pattern": excluding(strings)}
        if numbers := by_type.get("number"):
            yield from _between(sorted({*map(_number, numbers)}))
        for kind, unlike in (("array", self._unlike_array), ("object", self._unlike_object)):
            if kind in by_type:
                yield all_of([any_of(unlike(value)) for value in by_type[kind]])

    def _unlike_array(self, value: list[Any]) -> Iterator[Any]:
        if value:
            yield {"type": "array", "maxItems": len(value) - 1}
        yield {"type": "array", "minItems": len(value) + 1}
        yield from self._places([{"enum": [one]} for one in value])

    def _unlike_object(self, value: dict[str, Any]) -> Iterator[Any]:
        if not value:
            yield {"type": "object", "minProperties": 1}
        for name, one in value.items():
            yield _lacking(name)
            yield _having(name, any_of(self.of_values([one])))

    def _all_of(self, schemas: Any, _: Schema) -> Iterator[Any]:
        for one in _listed(schemas):
            yield any_of(self.of(one))

    def _any_of(self, schemas: Any, _: Schema) -> Iterator[Any]:
        yield all_of([any_of(self.of(one)) for one in _listed(schemas)])

    def _one_of(self, schemas: Any, _: Schema) -> Iterator[Any]:
        options = _listed(schemas)
        if len(options) > MAX_ONE_OF:
            raise Unsupported
        yield all_of([any_of(self.of(one)) for one in options])
        for one, other in combinations(options, 2):
            yield all_of([self._exact(one), self._exact(other)])

    def _not(self, inner: Any, _: Schema) -> Iterator[Any]:
        yield self._exact(inner)

    def _if(self, condition: Any, schema: Schema) -> Iterator[Any]:
        then, other = schema.get("then", True), schema.get("else", True)
        yield all_of([self._exact(condition), any_of(self.of(then))])
        yield all_of([any_of(self.of(condition)), any_of(self.of(other))])

    # --- objects --------------------------------------------------------------------------------

    def _properties(self, properties: Any, _: Schema) -> Iterator[Any]:
        for name, inner in _named(properties).items():
            with self._elsewhere():
                other = any_of(self.of(inner))
            yield _having(name, other)

    def _additional(self, value: Any, schema: Schema) -> Iterator[Any]:
        with self._elsewhere():
            other = any_of(self.of(value))
        if other is False:
            return
        if schema.get("patternProperties"):
            raise Unsupported
        declared = _named(schema.get("properties", {}))
        if not self.names:
            raise Unsupported
        for name in self.names:
            if name not in declared:
                yield _having(name, other)

    def _required(self, names: Any, _: Schema) -> Iterator[Any]:
        for name in _listed(names):
            yield _lacking(name)

    def _min_properties(self, least: Any, _: Schema) -> Iterator[Any]:
        if _count(least):
            yield {"type": "object", "maxProperties": _count(least) - 1}

    def _max_properties(self, most: Any, _: Schema) -> Iterator[Any]:
        yield {"type": "object", "minProperties": _count(most) + 1}

    def _dependencies(self, needs: Any, schema: Schema) -> Iterator[Any]:
        if self._draft > 7:  # Validators differ in whether these drafts have the keyword.
            raise Unsupported
        yield from self._dependent(needs, schema)

    def _dependent(self, needs: Any, _: Schema) -> Iterator[Any]:
        for name, need in _named(needs).items():
            inner = {"required": need} if isinstance(need, list) else need
            yield all_of([_having(name, True), any_of(self.of(inner))])

    # --- arrays ---------------------------------------------------------------------------------

    def _items(self, items: Any, _: Schema) -> Iterator[Any]:
        if isinstance(items, list):
            yield from self._places(items)
            return
        with self._elsewhere():
            item = any_of(self.of(items))
        if item is not False:
            yield from places([item] * MAX_PLACES, self._draft)

    def _places(self, items: Any) -> Iterator[Any]:
        with self._elsewhere():
            others = [any_of(self.of(item)) for item in _listed(items)]
        yield from places(others, self._draft)

    def _min_items(self, least: Any, _: Schema) -> Iterator[Any]:
        if _count(least):
            yield {"type": "array", "maxItems": _count(least) - 1}

    def _max_items(self, most: Any, _: Schema) -> Iterator[Any]:
        yield {"type": "array", "minItems": _count(most) + 1}

    def _contains(self, item: Any, schema: Schema) -> Iterator[Any]:
        if knows(self._draft, "minContains") and {"minContains", "maxContains"} & schema.keys():
            raise Unsupported
        other = any_of(self.of(item))
        yield (
            {"type": "array", "maxItems": 0}
            if other is False
            else {
                "type": "array",
                "items": other,
            }
        )

    # --- strings and numbers --------------------------------------------------------------------

    def _min_length(self, least: Any, _: Schema) -> Iterator[Any]:
        if _count(least):
            yield {"type": "string", "maxLength": _count(least) - 1}

    def _max_length(self, most: Any, _: Schema) -> Iterator[Any]:
        yield {"type": "string", "minLength": _count(most) + 1}

    def _pattern(self, pattern: Any, _: Schema) -> Iterator[Any]:
        if not isinstance(pattern, str):
            raise Unsupported
        yield {"type": "string", "pattern": self.without(pattern)}

    def without(self, pattern: str) -> str:
        """The complement of a pattern (``complement``)."""
        if pattern not in self._patterns:
            self._patterns[pattern] = without(pattern, self._step)
        return self._patterns[pattern]

    def _minimum(self, least: Any, schema: Schema) -> Iterator[Any]:
        below = "maximum" if schema.get("exclusiveMinimum") is True else "exclusiveMaximum"
        yield {"type": "number", below: _number(least)}

    def _maximum(self, most: Any, schema: Schema) -> Iterator[Any]:
        above = "minimum" if schema.get("exclusiveMaximum") is True else "exclusiveMinimum"
        yield {"type": "number", above: _number(most)}

    def _exclusive_minimum(self, least: Any, _: Schema) -> Iterator[Any]:
        if not isinstance(least, bool):
            yield {"type": "number", "maximum": _number(least)}

    def _exclusive_maximum(self, most: Any, _: Schema) -> Iterator[Any]:
        if not isinstance(most, bool):
            yield {"type": "number", "minimum": _number(most)}


_METHODS = {
    "$ref": "reference",
    "type": "type",
    "enum": "enum",
    "const": "const",
    "allOf": "all_of",
    "anyOf": "any_of",
    "oneOf": "one_of",
    "not": "not",
    "if": "if",
    "properties": "properties",
    "additionalProperties": "additional",
    "required": "required",
    "minProperties": "min_properties",
    "maxProperties": "max_properties",
    "dependencies": "dependencies",
    "dependentRequired": "dependent",
    "dependentSchemas": "dependent",
    "items": "items",
    "minItems": "min_items",
    "maxItems": "max_items",
    "contains": "contains",
    "minLength": "min_length",
    "maxLength": "max_length",
    "pattern": "pattern",
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusiveMinimum": "exclusive_minimum",
    "exclusiveMaximum": "exclusive_maximum",
}
"""The name of the method that negates a keyword, by keyword. Other keywords do not restrict a
value."""


def places(items: list[Any], draft: int) -> Iterator[Any]:
    """Yields one schema for each index of ``items``. The schema allows the arrays whose item at
    this index matches ``items[index]``. Skips an index if ``items[index]`` is False."""
    prefix = "prefixItems" if draft == 2020 else "items"
    for number, item in enumerate(items):
        if item is not False:
            first: list[Any] = [{} for _ in range(number)]
            yield {"type": "array", "minItems": number + 1, prefix: [*first, item]}


def _typed(kinds: list[str]) -> Any:
    return {"type": kinds} if kinds else False


def _lacking(name: Any) -> Schema:
    return {"type": "object", "properties": {name: False}}


def _having(name: str, value: Any) -> Any:
    if value is False:
        return False
    if value is True:
        return {"type": "object", "required": [name]}
    return {"type": "object", "required": [name], "properties": {name: value}}


def _between(numbers: list[int | float]) -> Iterator[Schema]:
    """Yields schemas that together allow all numbers except ``numbers``, which are sorted. Each
    schema is an interval. Intervals that are shorter than 1 and have an integer at one end are left
    out, because llguidance would allow this integer."""
    yield {"type": "number", "exclusiveMaximum": numbers[0]}
    for low, high in pairwise(numbers):
        if high - low < 1 and (low == int(low) or high == int(high)):
            continue
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": "number", "exclusiveMinimum": numbers[-1]}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Unsupported
    return value


def _named(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unsupported
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise Unsupported
    return int(value)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise Unsupported
    return value
