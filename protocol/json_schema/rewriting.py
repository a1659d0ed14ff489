"""Rewrites schemas so that they use only keywords that llguidance implements.

A rewritten keyword is removed, and other keywords or a schema in ``allOf`` take its place. Each
text that matches the rewritten schema also matches the original schema. A keyword that cannot be
rewritten stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any, NamedTuple

from .complement import has_inner_anchor, matching, may_have_inner_anchor
from .disjoint import Disjoint
from .formats import KNOWN, PATTERNS
from .names import hazards, only_names
from .negation import MAX_ONE_OF, MAX_PLACES, Negation, places
from .parts import (
    TYPES,
    Schema,
    Unsupported,
    all_of,
    any_of,
    canonical,
    draft_of,
    knows,
    names_of,
    objects,
    target,
    types_of,
    values_of,
)
from .unevaluated import evaluated

MAX_STEPS = 20_000
"""Maximum number of schemas that are visited. Visiting this number takes about 0.1 s."""
MAX_DISTINCT = 4
"""Maximum number of different values that the items of an array may have. If a schema allows more
values, ``_distinct`` does not list the arrays without equal items."""
MAX_BYTES = 256 * 1024
"""Approximate maximum size of a rewritten schema as JSON."""
MAX_NESTED = 120
"""Maximum depth to which the objects and arrays of a rewritten schema are nested. llguidance parses
up to 128 levels of JSON, and the grammar around the schema has 3 of them."""

REWRITTEN = frozenset(
    {"not", "if", "then", "else", "oneOf", "contains", "minContains", "maxContains"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "propertyNames", "uniqueItems"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)
"""Keywords that are rewritten. Some values of ``pattern`` and ``format`` are rewritten too."""
LOOK_AROUND = re.compile(r"\(\?(?:=|!|<=|<!)")
"""Matches the beginning of look-ahead and look-behind, which llguidance does not implement."""
_NEXT_TO_REFERENCE = REWRITTEN | frozenset(
    {"type", "enum", "const", "allOf", "anyOf", "pattern", "format", "minLength", "maxLength"}
    | {"properties", "patternProperties", "additionalProperties", "required", "multipleOf"}
    | {"minProperties", "maxProperties", "items", "additionalItems", "minItems", "maxItems"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)
"""Keywords that drafts 4 to 7 ignore next to ``$ref``. llguidance does not ignore them."""
_REFERENCES = frozenset(("$dynamicRef", "$recursiveRef"))
"""References that llguidance does not implement."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_ATOM = r"[^()\\\[]|\\.|\[(?:[^\]\\]|\\.)*\]"
_NESTED = rf"(?:{_ATOM}|\((?!\?[=!<])(?:{_ATOM})*\))*"
"""Matches the content of a group. It may have inner groups, but these must not have further
groups."""
_LOOK_AHEAD = re.compile(rf"\^(?:\(\?[=!]{_NESTED}\))+")
_ONE_LOOK_AHEAD = re.compile(rf"\(\?(?P<kind>[=!])(?P<inner>{_NESTED})\)")


_INVALID = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that are raised for a schema whose keywords have values of wrong types."""


class Rewritten(NamedTuple):
    """A rewritten schema."""

    schema: Any
    enforced: list[str]
    """The keywords that were rewritten in at least one place."""
    ignored: list[str]
    """Contains ``format`` if the rewriting has removed a format that JSON Schema does not
    define."""


def rewritten(root: Any) -> Rewritten:
    """Rewrites a schema. A schema is returned unchanged if it is not valid, is of draft 3, or has a
    part with its own ``$id``. It is also returned unchanged if the rewritten schema exceeds a
    bound, or if llguidance would not enforce the rewritten schema."""
    unchanged = Rewritten(root, [], [])
    if not isinstance(root, dict) or draft_of(root) == 3 or not needs_rewriting(root):
        return unchanged
    if any(one is not root and isinstance(one.get("$id"), str) for one in objects(root)):
        return unchanged  # In a part with its own $id, references are relative to this part.
    for skipped in (frozenset[str](), frozenset(("propertyNames", "unevaluatedProperties"))):
        rewriter = _Rewriter(root, skipped)
        try:
            made = rewriter.positive(root)
            rewriter.check(made)
            # llguidance ignores ``additionalProperties`` for names that match ``patternProperties``
            # of another member of an ``allOf``.
            if not rewriter.named or not hazards(made, rewriter.step):
                return Rewritten(made, list(rewriter.enforced), list(rewriter.ignored))
        except (Unsupported, _TooLarge, *_INVALID):
            return unchanged
    return unchanged


def needs_rewriting(root: Any) -> bool:
    """Whether a schema may have a keyword that is rewritten."""
    draft = draft_of(root)
    return any(
        not REWRITTEN.isdisjoint(one)
        or _is_text_rewritten(one)
        or _ignores_siblings(one, draft)
        or (one is not root and _names_ignored_draft(one, draft))
        for one in objects(root)
    )


def _ignores_siblings(schema: Schema, draft: int) -> bool:
    """Whether a schema has a reference, and keywords next to it that its draft ignores."""
    return (
        draft <= 7
        and isinstance(schema.get("$ref"), str)
        and not _NEXT_TO_REFERENCE.isdisjoint(schema)
    )


def _names_ignored_draft(part: Schema, draft: int) -> bool:
    """Whether a part has ``$schema`` and ``id``, but not ``$id``. llguidance would resolve the
    references in this part relative to ``id``, as in draft 4."""
    return draft > 4 and "id" in part and "$id" not in part and isinstance(part.get("$schema"), str)


def _is_text_rewritten(schema: Schema) -> bool:
    """Whether llguidance does not implement the pattern or the format of a schema, or the schema
    forbids names that match a pattern."""
    pattern, name = schema.get("pattern"), schema.get("format")
    return (
        _forbidden(schema) is not None
        or (isinstance(name, str) and name not in KNOWN)
        or (isinstance(pattern, str) and LOOK_AROUND.search(pattern) is not None)
        or (isinstance(pattern, str) and may_have_inner_anchor(pattern))
    )


def _forbidden(schema: Schema) -> str | None:
    """The pattern whose matching names a schema forbids: the only pattern in ``patternProperties``,
    with the schema ``false``. None if there is no such pattern."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict) or list(patterns.values()) != [False]:
        return None
    return str(*patterns)


class _TooLarge(Exception):
    """The schema has too many parts."""


class _Rewriter:
    def __init__(self, root: Schema, skipped: frozenset[str]) -> None:
        """``skipped``: keywords that are not rewritten."""
        self._root = root
        self._draft = draft_of(root)
        self._skipped = skipped
        self._steps = MAX_STEPS
        self._left = 0
        """Number of keywords that were not rewritten."""
        self._exact = 0
        """Number of calls of ``exact`` that are running, one inside another."""
        self._targets: set[str] = set()
        """References in schemas that were passed to ``exact``. The targets of these references must
        be rewritten completely too."""
        self._negation = Negation(root, self._draft, self.exact, self.step)
        self._disjoint = Disjoint(root, self._draft, self.step)
        self.enforced: dict[str, None] = {}
        self.ignored: dict[str, None] = {}
        self.named = False
        """Whether the rewriting has added restrictions on names of properties."""

    def step(self, count: int) -> None:
        """Counts visited schemas. Raises _TooLarge after ``MAX_STEPS``."""
        self._steps -= count
        if self._steps < 0:
            raise _TooLarge

    def check(self, made: Any) -> None:
        """Raises _TooLarge if a rewritten schema exceeds ``MAX_BYTES`` or ``MAX_NESTED``, and
        Unsupported if it lacks the target of a local reference."""
        size, depth = self._size(made, {})
        if size > MAX_BYTES or depth > MAX_NESTED:
            raise _TooLarge
        for one in objects(made):
            reference = one.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/"):
                target(made, reference)

    def _size(self, value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """The approximate size of a value as JSON, and the depth to which its objects and arrays
        are nested. ``known`` has the results for objects that were already measured, because an
        object may occur in very many places."""
        if isinstance(value, str):
            return len(value) + 4, 0
        if not isinstance(value, dict | list):
            return len(str(value)) + 2, 0
        found = known.get(id(value))
        if found is None:
            self.step(1)
            inner = [self._size(one, known) for one in value]
            if isinstance(value, dict):
                inner += [self._size(one, known) for one in value.values()]
            size = 2 + sum(size for size, _ in inner)
            found = known[id(value)] = size, 1 + max((depth for _, depth in inner), default=0)
        return found

    def exact(self, schema: Any) -> Any:
        """Rewrites a schema completely. Raises Unsupported if one of its keywords cannot be
        rewritten."""
        left, targets = self._left, set(self._targets)
        self._exact += 1
        try:
            made = self.positive(schema)
            if self._left != left:
                raise Unsupported
        except Unsupported:
            self._left, self._targets = left, targets
            raise
        finally:
            self._exact -= 1
        return made

    def positive(self, schema: Any) -> Any:
        """Rewrites a schema as far as possible. Keywords that cannot be rewritten stay in it."""
        self.step(1)
        if not isinstance(schema, dict):
            return schema
        if _ignores_siblings(schema, self._draft):
            schema = {name: one for name, one in schema.items() if name not in _NEXT_TO_REFERENCE}
        if schema is not self._root and _names_ignored_draft(schema, self._draft):
            schema = {name: one for name, one in schema.items() if name != "$schema"}
        reference = schema.get("$ref")
        if self._exact and isinstance(reference, str) and reference not in self._targets:
            self._targets.add(reference)
            self.positive(self._target(reference))
        if not _REFERENCES.isdisjoint(schema):
            self._left += 1
        found = {name: self._inside(name, value) for name, value in schema.items()}
        more: list[Any] = []
        for names, rewrite in _REWRITES:
            present = [name for name in names if name in found and knows(self._draft, name)]
            if present:
                self._rewrite(present, rewrite, schema, found, more)
        more = [one for one in more if one is not True and one != {}]
        if more:
            found["allOf"] = [*found.get("allOf", ()), *more]
        return found

    def _inside(self, name: str, value: Any) -> Any:
        if name in _MAPS and isinstance(value, dict):
            return {key: self.positive(one) for key, one in value.items()}
        if (name in _LISTS or name == "items") and isinstance(value, list):
            return [self.positive(one) for one in value]
        return self.positive(value) if name in _SCHEMAS else value

    def _rewrite(
        self,
        names: list[str],
        rewrite: Callable[[_Rewriter, Schema, Schema], Iterable[Any]],
        schema: Schema,
        found: Schema,
        more: list[Any],
    ) -> None:
        enforced, left, before = dict(self.enforced), self._left, dict(found)
        try:
            if not self._skipped.isdisjoint(names):
                raise Unsupported
            more += list(rewrite(self, schema, found))
        except Unsupported:
            self.enforced, self._left = enforced, left + 1
            found.clear()
            found |= before

    def _negated(self, schema: Any, *others: Any) -> Any:
        """The negation of a schema, for values that also have to match the schemas ``others``."""
        before = self._negation.names
        self._negation.names = list(
            dict.fromkeys(name for one in others for name in names_of(self._root, one, self.step))
        )
        try:
            return any_of(self._negation.of(schema))
        finally:
            self._negation.names = before

    def _done(self, found: Schema, *names: str) -> None:
        for name in names:
            if name in found:
                del found[name]
                self.enforced[name] = None

    # --- any type -------------------------------------------------------------------------------

    def _not(self, schema: Schema, found: Schema) -> Iterable[Any]:
        made = self._negated(schema["not"], found)
        self._done(found, "not")
        yield made

    def _if(self, schema: Schema, found: Schema) -> Iterable[Any]:
        made: Any = True
        if "if" in schema and not {"then", "else"}.isdisjoint(schema):
            condition = schema["if"]
            made = any_of(
                [
                    all_of([self.exact(condition), self.exact(schema.get("then", True))]),
                    all_of([self._negated(condition, found), self.exact(schema.get("else", True))]),
                ]
            )
        self._done(found, "if", "then", "else")
        yield made

    def _one_of(self, schema: Schema, found: Schema) -> Iterable[Any]:
        options = schema["oneOf"]
        if not isinstance(options, list) or len(options) > MAX_ONE_OF:
            raise Unsupported
        overlapping: list[list[Any]] = [[] for _ in options]
        for number, one in enumerate(options):
            for at in range(number):
                if not self._disjoint.holds(one, options[at]):
                    overlapping[number].append(options[at])
                    overlapping[at].append(one)
        rest = {name: value for name, value in found.items() if name != "oneOf"}
        if not any(overlapping):
            made = any_of(found["oneOf"])
        else:
            made = any_of(
                all_of([self.exact(one), *(self._negated(other, one, rest) for other in others)])
                for one, others in zip(options, overlapping, strict=True)
            )
        if "anyOf" not in found and isinstance(made, dict) and list(made) == ["anyOf"]:
            # ``anyOf`` takes the place of ``oneOf`` in the order of the keywords, so that
            # properties keep their order.
            items = list(found.items())
            found.clear()
            found |= {"anyOf" if key == "oneOf" else key: one for key, one in items}
            found["anyOf"], made = made["anyOf"], True
            self.enforced["oneOf"] = None
        self._done(found, "oneOf")
        yield made

    # --- objects --------------------------------------------------------------------------------

    def _dependent(self, schema: Schema, found: Schema) -> Iterable[Any]:
        names = ("dependencies", "dependentRequired", "dependentSchemas")
        needs = [(key, schema[key]) for key in names if key in found and knows(self._draft, key)]
        made = []
        for _, by_name in needs:
            if not isinstance(by_name, dict):
                raise Unsupported
            for name, need in by_name.items():
                lacking = {"properties": {name: False}}
                if isinstance(need, list):
                    having: Any = {"type": "object", "required": [name, *need]}
                else:
                    inner = self.exact(need)
                    having = all_of([{"type": "object", "required": [name]}, inner])
                if having is not True:
                    made.append(any_of([lacking, having]))
        self._done(found, *(key for key, _ in needs))
        yield from made

    def _property_names(self, schema: Schema, found: Schema) -> Iterable[Any]:
        only_names(schema["propertyNames"], found, self._target, self.step)
        self._done(found, "propertyNames")
        self.named = True
        return ()

    def _forbidden_names(self, _: Schema, found: Schema) -> Iterable[Any]:
        """Rewrites ``patternProperties`` if it forbids all names that match its pattern. Without
        the rewriting, llguidance would allow such a name, and no value could follow it."""
        pattern = _forbidden(found)
        if pattern is None or self._skipped or "propertyNames" in found:
            return ()
        made = {name: one for name, one in found.items() if name != "patternProperties"}
        try:
            only_names({"not": {"pattern": pattern}}, made, self._target, self.step)
        except Unsupported:
            return ()
        found.clear()
        found |= made
        self.enforced["patternProperties"] = None
        self.named = True
        return ()

    def _unevaluated_properties(self, schema: Schema, found: Schema) -> Iterable[Any]:
        names = evaluated(schema, self._target)
        if names is not None:
            other = self.exact(schema["unevaluatedProperties"])
            yield {"properties": dict.fromkeys(names, True), "additionalProperties": other}
        self._done(found, "unevaluatedProperties")
        self.named = True

    def _target(self, reference: Any) -> Any:
        self.step(1)
        return target(self._root, reference)

    # --- arrays ---------------------------------------------------------------------------------

    def _contains(self, schema: Schema, found: Schema) -> Iterable[Any]:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if not knows(self._draft, "minContains"):
            least, most = 1, None
        made: Any = True
        if "contains" in schema and (least or most is not None):
            if least != 1 or most is not None:
                raise Unsupported
            item = self.exact(schema["contains"])
            others = [kind for kind in TYPES if kind != "array"]
            made = any_of([{"type": others}, *places([item] * MAX_PLACES, self._draft)])
        self._done(found, "contains", "minContains", "maxContains")
        yield made

    def _unique_items(self, schema: Schema, found: Schema) -> Iterable[Any]:
        made: Any = True
        if schema["uniqueItems"] is True and _most_items(schema) > 1:
            others = [kind for kind in TYPES if kind != "array"]
            made = any_of([{"type": others}, {"enum": self._distinct(schema)}])
        self._done(found, "uniqueItems")
        yield made

    def _distinct(self, schema: Schema) -> list[list[Any]]:
        """All arrays without equal items. Raises Unsupported unless ``items`` allows only a few
        values."""
        items = schema.get("items")
        while isinstance(items, dict) and "$ref" in items:
            items = self._target(items["$ref"])
        values = values_of(items) if isinstance(items, dict) else None
        if values is None or len(values) > MAX_DISTINCT or "prefixItems" in schema:
            raise Unsupported
        distinct = list({canonical(value): value for value in values}.values())
        least = schema.get("minItems", 0)
        sizes = range(int(least), int(min(_most_items(schema), len(distinct))) + 1)
        return [list(one) for size in sizes for one in permutations(distinct, size)]

    def _unevaluated_items(self, schema: Schema, found: Schema) -> Iterable[Any]:
        if not {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}.isdisjoint(schema):
            raise Unsupported
        prefix = "prefixItems" if self._draft == 2020 else "items"
        rest = "items" if self._draft == 2020 else "additionalItems"
        if self._draft == 2020 and "contains" in schema:
            raise Unsupported
        if rest not in found and not isinstance(found.get("items"), dict | bool):
            other = self.exact(schema["unevaluatedItems"])
            found[rest if prefix in found else "items"] = other
        self._done(found, "unevaluatedItems")
        return ()

    # --- strings --------------------------------------------------------------------------------

    def _format(self, _: Schema, found: Schema) -> Iterable[Any]:
        name = found["format"]
        if name in PATTERNS:
            self._done(found, "format")
            yield {"pattern": PATTERNS[name]}
        elif isinstance(name, str) and name not in KNOWN:
            del found["format"]
            self.ignored["format"] = None

    def _pattern(self, _: Schema, found: Schema) -> Iterable[Any]:
        pattern = found["pattern"]
        if not isinstance(pattern, str):
            return
        if LOOK_AROUND.search(pattern) is None:
            self.step(1)
            if has_inner_anchor(pattern):
                found["pattern"] = matching(pattern, self.step)
                self.enforced["pattern"] = None
            return
        begin = _LOOK_AHEAD.match(pattern)
        rest = "" if begin is None else pattern[begin.end() :]
        if begin is None or LOOK_AROUND.search(rest) or _has_alternatives(rest):
            raise Unsupported
        if rest.startswith(("*", "+", "?", "{")):  # This would repeat the last look-ahead.
            raise Unsupported
        made = [f"^{rest}"]
        for ahead in _ONE_LOOK_AHEAD.finditer(begin[0]):
            inner = f"^(?:{ahead['inner']})"
            made.append(self._negation.without(inner) if ahead["kind"] == "!" else inner)
        self._done(found, "pattern")
        yield from ({"pattern": one} for one in made)


_REWRITES: tuple[tuple[tuple[str, ...], Callable[[Any, Schema, Schema], Iterable[Any]]], ...] = (
    (("unevaluatedProperties",), _Rewriter._unevaluated_properties),
    (("unevaluatedItems",), _Rewriter._unevaluated_items),
    (("propertyNames",), _Rewriter._property_names),
    (("patternProperties",), _Rewriter._forbidden_names),
    (("format",), _Rewriter._format),
    (("pattern",), _Rewriter._pattern),
    (("uniqueItems",), _Rewriter._unique_items),
    (("not",), _Rewriter._not),
    (("if", "then", "else"), _Rewriter._if),
    (("dependencies", "dependentRequired", "dependentSchemas"), _Rewriter._dependent),
    (("contains", "minContains", "maxContains"), _Rewriter._contains),
    (("oneOf",), _Rewriter._one_of),
)


def _most_items(schema: Schema) -> float:
    """The maximum number of items that ``maxItems`` and ``type`` of a schema allow in an array;
    infinity if they do not limit it."""
    most = schema.get("maxItems")
    if "array" not in types_of(schema):
        return 0
    return most if isinstance(most, int | float) else float("inf")


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern may have a ``|`` outside groups and classes."""
    return "|" in re.sub(r"\\.|\[(?:[^\]\\]|\\.)*(?:\]|\Z)|\((?:[^()\\]|\\.)*\)", "", pattern)
