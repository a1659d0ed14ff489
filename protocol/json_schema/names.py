"""Restricts the names of properties. Other keywords replace ``propertyNames``: ``properties``,
``patternProperties`` and ``additionalProperties``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from .complement import matches, without
from .parts import Schema, Unsupported, objects, target, types_of, values_of, written

MAX_DEPTH = 8
"""Maximum length of a chain of references that is followed from ``propertyNames``."""

_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "$id", "id"}
)
_LOOK_AROUND = re.compile(r"\(\?(?:=|!|<=|<!)")

Resolve = Callable[[Any], Any]


def only_names(names: Any, found: Schema, resolve: Resolve, step: Callable[[int], None]) -> None:
    """Changes the schema ``found`` of an object, so that all names of properties match the schema
    ``names``. ``resolve`` returns the target of a reference, and ``step`` counts the work. Raises
    Unsupported if the names cannot be restricted."""
    names = _resolved(names, resolve)
    if names is True or names == {}:
        return
    rest = {} if names is False else {k: v for k, v in names.items() if k not in _ANNOTATIONS}
    if names is False or "string" not in types_of(rest):
        _only_listed([], found)
        return
    rest.pop("type", None)
    keys = set(rest)
    values = values_of(rest)
    if not keys:
        return
    if values is not None and len(keys) == 1:
        _only_listed([name for name in values if isinstance(name, str)], found)
    elif keys == {"pattern"}:
        _only_matching(_pattern(rest["pattern"]), found, step)
    elif keys <= {"minLength", "maxLength"}:
        least = int(rest.get("minLength", 0))
        most = int(rest["maxLength"]) if "maxLength" in rest else ""
        _only_matching(rf"^[\s\S]{{{least},{most}}}$", found, step)
    elif keys == {"not"}:
        _without(_resolved(rest["not"], resolve), found, step)
    else:
        raise Unsupported


def _resolved(names: Any, resolve: Resolve) -> Any:
    for _ in range(MAX_DEPTH):
        if not isinstance(names, dict):
            break
        if "$ref" not in names:
            return names
        if set(names) - _ANNOTATIONS != {"$ref"}:
            raise Unsupported
        names = resolve(names["$ref"])
    if isinstance(names, bool):
        return names
    raise Unsupported


def _only_listed(names: list[str], found: Schema) -> None:
    if found.get("patternProperties"):
        raise Unsupported
    listed = set(names)
    properties = _forbid(found, lambda name: name not in listed)
    others = found.get("additionalProperties", True)
    more = [name for name in dict.fromkeys(names) if name not in properties]
    if more and others is not False:
        options = "|".join("".join(map(written, name)) for name in more)
        found["patternProperties"] = {f"^(?:{options})$": others}
    found["additionalProperties"] = False


def _only_matching(pattern: str, found: Schema, step: Callable[[int], None]) -> None:
    if found.get("patternProperties"):
        raise Unsupported
    _forbid(found, lambda name: not matches(pattern, name, step))
    _only_others(pattern, found)


def _only_others(pattern: str, found: Schema) -> None:
    """Forbids additional properties whose names do not match a pattern."""
    others = found.get("additionalProperties", True)
    if others is not False:
        found["patternProperties"] = {pattern: others}
        found["additionalProperties"] = False


def _without(names: Any, found: Schema, step: Callable[[int], None]) -> None:
    """Forbids the names that match a schema."""
    if isinstance(names, bool):
        raise Unsupported
    rest = {k: v for k, v in names.items() if k not in _ANNOTATIONS}
    values = values_of(rest)
    if values is not None and len(rest) == 1:
        listed = [name for name in values if isinstance(name, str)]
        found["properties"] = {**found.get("properties", {}), **dict.fromkeys(listed, False)}
    elif set(rest) == {"pattern"} and not found.get("patternProperties"):
        pattern = _pattern(rest["pattern"])
        _forbid(found, lambda name: matches(pattern, name, step))
        _only_others(without(pattern, step), found)
    else:
        raise Unsupported


def _forbid(found: Schema, is_forbidden: Callable[[str], bool]) -> Schema:
    """Forbids each declared or required name for which ``is_forbidden`` is true. The schema of such
    a name in ``properties`` becomes False. Returns the new ``properties``."""
    properties: Schema = dict(found.get("properties", {}))
    for name in [*properties, *found.get("required", ())]:
        if is_forbidden(name):
            properties[name] = False
    if properties:
        found["properties"] = properties
    return properties


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, str) or _LOOK_AROUND.search(pattern):
        raise Unsupported
    return pattern


def hazards(root: Any, step: Callable[[int], None]) -> bool:
    """Whether llguidance may allow additional properties that the schema forbids. This may happen
    if a value has to match two schemas. One of them has ``patternProperties``, and the other
    restricts additional properties. llguidance then allows all names that match the patterns.

    ``step`` counts the visited schemas.
    """
    try:
        return any(
            _is_hazard(root, one, step)
            for one in objects(root)
            if not {"allOf", "anyOf", "oneOf", "$ref"}.isdisjoint(one)
        )
    except Unsupported:
        return True


def _is_hazard(root: Any, node: Schema, step: Callable[[int], None]) -> bool:
    named: set[int] = set()
    closed: set[int] = set()
    for member in _members(root, node):
        step(1)
        if member.get("patternProperties"):
            named.add(id(member))
        if member.get("additionalProperties", True) not in (True, {}):
            closed.add(id(member))
    return any(one != other for one in named for other in closed)


def _members(root: Any, node: Schema) -> Iterator[Schema]:
    """The schemas that may apply to the same value as ``node``, including ``node``."""
    seen: set[int] = set()
    left: list[Any] = [node]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for key in ("allOf", "anyOf", "oneOf"):
            inner = one.get(key)
            left += inner if isinstance(inner, list) else ()
        if "$ref" in one:
            left.append(target(root, one["$ref"]))
