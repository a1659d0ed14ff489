"""Finds the properties that a schema evaluates. ``unevaluatedProperties`` in the same schema does
not apply to these properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .parts import Schema, Unsupported

MAX_DEPTH = 10
"""Maximum depth to which references and ``allOf`` are followed."""
_CONDITIONAL = frozenset(
    {"anyOf", "oneOf", "if", "not", "dependentSchemas", "$dynamicRef", "$recursiveRef"}
)
"""Keywords that evaluate properties only for some values."""


def evaluated(schema: Schema, resolve: Callable[[Any], Any]) -> list[str] | None:
    """The names of the properties that a schema and the members of its ``allOf`` evaluate; None if
    they evaluate all properties. ``resolve`` returns the target of a reference. Raises Unsupported
    if the names depend on the value, or if they match patterns."""
    names: dict[str, None] = {}
    rest = {name: one for name, one in schema.items() if name != "unevaluatedProperties"}
    return list(names) if _collect(rest, resolve, names, MAX_DEPTH) else None


def _collect(
    schema: Any, resolve: Callable[[Any], Any], names: dict[str, None], depth: int
) -> bool:
    """Adds the names of the evaluated properties to ``names``. Returns False if all properties are
    evaluated."""
    if not isinstance(schema, dict):
        return True
    if depth < 0 or not _CONDITIONAL.isdisjoint(schema) or schema.get("patternProperties"):
        raise Unsupported
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return False
    names |= dict.fromkeys(schema.get("properties", ()))
    inner = list(schema.get("allOf", ()))
    if "$ref" in schema:
        inner.append(resolve(schema["$ref"]))
    is_open = True
    for one in inner:
        is_open &= _collect(one, resolve, names, depth - 1)
    return is_open
