"""Finds where the values of a JSON text have to be checked, because token masks do not enforce all
keywords of the schema there.

Each value of a text has *parts*: the parts of the schema that apply to the value regardless of its
content. They are reached through ``properties``, ``patternProperties``, ``additionalProperties``,
``items``, ``prefixItems``, ``additionalItems``, ``allOf`` and ``$ref``.

A part is *weakened* if one of its own keywords was left out of the grammar. A part is *obligated*
if masks do not enforce the part completely. Each weakened part is obligated. A part is also
obligated if ``anyOf``, ``oneOf``, ``not`` or a similar keyword leads from it to a weakened part.
The effect of such a keyword depends on the content of the value. An *obligation* of a value is an
obligated part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ......protocol.json_schema.parts import Unsupported, draft_of, knows, target, values_of
from ......protocol.json_schema.relaxing import Path
from ...compiling.bounds import RefusedGrammar
from .budget import Budget, Known
from .exact_json import identity

if TYPE_CHECKING:
    from .values import Values

MAX_REFERENCES = 8
"""Maximum number of references that are followed one after another to find a list of values."""
MAX_LISTED = 1_000
"""Maximum length of a list of the values that the items of an array may have. A longer list is not
compared with the items."""

_MAPS = ("properties", "patternProperties")
_ONE_OR_MORE = ("items", "prefixItems", "additionalItems", "additionalProperties")
_CONDITIONAL = ("anyOf", "oneOf", "not", "if", "then", "else", "contains", "propertyNames")
_CONDITIONAL_MAPS = ("dependentSchemas", "dependencies")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")

Parts = tuple[Any, ...]
"""Parts of a schema that apply to one value. A part without obligations is not listed."""


class Obligations:
    """The obligations of one schema. The caller serializes the calls."""

    def __init__(self, values: Values, places: Iterable[Path]) -> None:
        """``places``: the paths of the weakened parts (``protocol.json_schema.relaxing``). Raises
        RefusedGrammar if a reference has no target."""
        self.values = values
        self._root = values.root
        self._draft = draft_of(self._root)
        weakened = map(self._part_at, places)
        self._weakened = {id(part) for part in weakened if isinstance(part, dict)}
        self._dirty = self._leading_to(self._weakened)
        """The ids of the parts from which a weakened part can be reached."""
        self._all: dict[int, Parts] = {}
        self._few: dict[tuple[int, ...], dict[Any, bytes] | None] = {}
        self._of_names = Known[tuple[tuple[int, ...], str], Parts]()
        """The parts of a property, by the ids of the object's parts and the property's name."""

    @property
    def root(self) -> Parts:
        """The parts of the whole text."""
        return self.parts([self._root])

    def is_obligated(self, part: Any) -> bool:
        """Whether the values of a part have to be checked."""
        return (
            part is False
            or id(part) in self._weakened
            or any(id(one) in self._dirty for one in self._conditional(part))
        )

    def is_weakened(self, part: Any) -> bool:
        """Whether one of a part's own keywords was left out of the grammar."""
        return id(part) in self._weakened

    def parts(self, found: Iterable[Any]) -> Parts:
        """The parts in ``found``, and the parts that ``allOf`` and ``$ref`` of these parts add."""
        made: dict[int, Any] = {}
        for one in found:
            for part in self._closed(one):
                made[id(part)] = part
        return tuple(made.values())

    def property(self, parts: Parts, name: str, budget: Budget) -> Parts:
        """The parts of the property ``name`` of an object. Raises ``Exhausted``."""
        return self._of_names.find(
            (tuple(map(id, parts)), name),
            len(name),
            budget,
            lambda: self.parts(one for part in parts for one in self._property(part, name, budget)),
        )

    def item(self, parts: Parts, number: int) -> Parts:
        """The parts of an item of an array."""
        return self.parts(one for part in parts for one in self._item(part, number))

    def few_items(self, parts: Parts) -> dict[Any, bytes] | None:
        """The JSON text of each value that the items of an array may have, by the identity of the
        value. None if no keyword lists the values."""
        key = tuple(map(id, parts))
        if key not in self._few:
            self._few[key] = self._few_items(parts)
        return self._few[key]

    # --- inside ---------------------------------------------------------------------------------

    def _part_at(self, path: Path) -> Any:
        found = self._root
        for key in path:
            found = found[key]
        return found

    def _closed(self, part: Any) -> Parts:
        if part is False:
            return (False,)
        known = self._all.get(id(part))
        if known is not None:
            return known
        left, made = [part], dict[int, Any]()
        while left:
            one = left.pop()
            if id(one) not in made and (one is False or id(one) in self._dirty):
                made[id(one)] = one
                left += self._same(one)
        self._all[id(part)] = tuple(made.values())
        return self._all[id(part)]

    def _ignores_siblings(self, part: Any) -> bool:
        return self._draft <= 7 and "$ref" in part

    def _same(self, part: Any) -> Iterator[Any]:
        """The parts to which ``$ref`` and ``allOf`` of a part refer. They apply to the same value
        as the part."""
        if not isinstance(part, dict):
            return
        if isinstance(reference := part.get("$ref"), str):
            try:
                yield target(self._root, reference)
            except Unsupported:
                raise RefusedGrammar(f"the reference {reference[:80]} has no target") from None
        if not self._ignores_siblings(part):
            yield from _listed(part.get("allOf"))

    def _conditional(self, part: Any) -> Iterator[Any]:
        """The parts below ``anyOf`` and other keywords whose effect depends on the content of a
        value."""
        if not isinstance(part, dict) or self._ignores_siblings(part):
            return
        for name in (*_CONDITIONAL, *_UNEVALUATED):
            if name in part and knows(self._draft, name):
                yield from _listed(part[name])
        for name in _CONDITIONAL_MAPS:
            if isinstance(part.get(name), dict):
                yield from part[name].values()

    def _below(self, part: Any) -> Iterator[Any]:
        """The parts of the properties and items of a value."""
        if not isinstance(part, dict) or self._ignores_siblings(part):
            return
        for name in _MAPS:
            if isinstance(part.get(name), dict):
                yield from part[name].values()
        for name in _ONE_OR_MORE:
            yield from _listed(part.get(name, ()))

    def _property(self, part: Any, name: str, budget: Budget) -> Iterator[Any]:
        if not isinstance(part, dict) or self._ignores_siblings(part):
            return
        declared = part.get("properties")
        found = False
        if isinstance(declared, dict) and name in declared:
            found = True
            yield declared[name]
        for pattern, one in (part.get("patternProperties") or {}).items():
            if self.values.matches(pattern, name, budget):
                found = True
                yield one
        if not found:
            yield part.get("additionalProperties", True)

    def _item(self, part: Any, number: int) -> Iterator[Any]:
        if not isinstance(part, dict) or self._ignores_siblings(part):
            return
        items = part.get("items", True)
        prefix = part.get("prefixItems") if self._draft == 2020 else items
        if not isinstance(prefix, list):
            yield items
        elif number < len(prefix):
            yield prefix[number]
        else:
            yield items if self._draft == 2020 else part.get("additionalItems", True)

    def _few_items(self, parts: Parts) -> dict[Any, bytes] | None:
        for part in parts:
            items = part.get("items") if isinstance(part, dict) else None
            for _ in range(MAX_REFERENCES):
                if isinstance(items, dict) and isinstance(items.get("$ref"), str):
                    items = target(self._root, items["$ref"])
            if isinstance(items, dict):
                values = [False, True] if items.get("type") == "boolean" else values_of(items)
                texts = {identity(one): _text(one) for one in (values or ())[:MAX_LISTED]}
                if values is not None and None not in texts.values() and len(values) <= MAX_LISTED:
                    return {item: text for item, text in texts.items() if text is not None}
        return None

    def _leading_to(self, weakened: set[int]) -> set[int]:
        """The ids of the parts from which a part of ``weakened`` can be reached."""
        before: dict[int, list[int]] = {}
        left, seen = [self._root], {id(self._root)}
        while left:
            part = left.pop()
            for way in (self._same, self._conditional, self._below):
                for one in way(part):
                    if isinstance(one, dict):
                        before.setdefault(id(one), []).append(id(part))
                        if id(one) not in seen:
                            seen.add(id(one))
                            left.append(one)
        found, reached = list(weakened), set(weakened)
        while found:
            for one in before.get(found.pop(), ()):
                if one not in reached:
                    reached.add(one)
                    found.append(one)
        return reached


def _listed(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from value
    elif isinstance(value, dict | bool):
        yield value


def _text(value: Any) -> bytes | None:
    """The JSON text of a listed value; None if a grammar may allow several texts for the value."""
    if isinstance(value, str):
        plain = value.isprintable() and value.isascii() and not {'"', "\\"} & set(value)
        return f'"{value}"'.encode() if plain else None
    return json.dumps(value).encode() if value is None or isinstance(value, bool) else None
