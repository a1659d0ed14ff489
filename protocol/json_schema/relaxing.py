"""Relaxes schemas: leaves out the keywords that token masks cannot enforce.

A relaxed schema allows all values that the original schema allows, and further values. The
*weakened places* are the parts of the original schema that have lost a keyword. A value that was
generated under the relaxed schema must also be checked against these places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from .formats import KNOWN, PATTERNS
from .parts import Schema, Unsupported, any_of, draft_of, objects, target
from .rewriting import LOOK_AROUND

Measure = Literal[
    "keywords", "original", "patterns", "references", "counts", "texts", "look_around"
]
"""Kinds of keywords that can be left out. ``keywords``: keywords that llguidance does not
implement; they are always left out. ``original``: the keywords that the rewriting replaces; they
are left out if the rewritten schema is too large. ``look_around``: each ``pattern`` with look-ahead
or look-behind. The other kinds are keywords that llguidance refuses in some schemas. ``patterns``:
``patternProperties``. ``references``: the keywords next to a circular ``$ref``. ``counts``: the
bounds of the number of properties. ``texts``: ``pattern`` in the members of ``allOf``, and in their
alternatives and references."""
Path = tuple[str | int, ...]
"""The keys and indices that lead from a schema to one of its parts."""

NOT_ENFORCED = frozenset(
    {"propertyNames", "uniqueItems", "not", "if", "then", "else"}
    | {"contains", "minContains", "maxContains", "dependencies", "dependentRequired"}
    | {"dependentSchemas", "unevaluatedProperties", "unevaluatedItems"}
)
"""Keywords that llguidance does not implement."""
MAX_DEPTH = 250
"""Maximum length of the path of a part that is relaxed; deeper parts are not changed."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object with schemas as its values."""
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_COUNTS = ("minProperties", "maxProperties")
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
_KEPT = frozenset(
    {"$defs", "definitions", "$schema", "$id", "id", "$comment", "title", "description", "default"}
    | {"examples", "readOnly", "writeOnly", "deprecated"}
)
"""Keywords that may stay next to a circular reference, because they do not constrain values."""


class Relaxed(NamedTuple):
    """A relaxed schema."""

    schema: Any
    places: list[Path]
    """The weakened places, as paths in the original schema."""
    keywords: list[str]
    """The keywords that were left out in at least one place."""


def relaxed(
    root: Any,
    made: Any,
    measures: frozenset[Measure] = frozenset(),
    empty: frozenset[str] = frozenset(),
) -> Relaxed:
    """Relaxes ``made``, which is the rewritten form of the schema ``root``. ``measures``: the kinds
    of keywords to leave out, in addition to ``keywords``. If ``measures`` has ``original``,
    ``root`` itself is relaxed. ``empty``: references whose targets allow no value. They are
    replaced by ``false``."""
    if "original" in measures:
        made = root
    relaxer = _Relaxer(made, measures, empty)
    schema = relaxer.part(made, root, ())
    return Relaxed(schema, list(relaxer.places), list(relaxer.keywords))


class _Relaxer:
    def __init__(self, made: Any, measures: frozenset[Measure], empty: frozenset[str]) -> None:
        self._made = made
        self._empty = empty
        self._measures = measures
        self._ignores_siblings = draft_of(made) <= 7
        self._circular: dict[str, bool] = {}
        self._targets = {_path_of(one["$ref"]) for one in objects(made) if _is_local(one)}
        """The paths of the targets of references, which may be at any place of the root."""
        self._leading = _tree(self._targets)
        """A tree of the paths in ``_targets``."""
        self._joined = _members_of_all(made) if "texts" in measures else frozenset[int]()
        """The ids of the parts whose ``pattern`` is left out."""
        self.places: dict[Path, None] = {}
        self.keywords: dict[str, None] = {}

    def part(self, schema: Any, original: Any, path: Path) -> Any:
        """Relaxes a part of the rewritten schema. ``original``: the part of the original schema, at
        ``path``, from which this part was made. If the rewriting has added this part, ``original``
        is None, and ``path`` leads to a place above the part."""
        if not isinstance(schema, dict) or len(path) > MAX_DEPTH:
            return schema
        if path and self._empty and str(schema.get("$ref")) in self._empty:
            return False
        joined = id(schema) in self._joined
        if "references" in self._measures:
            schema = self._without_siblings(schema, path)
        found: Schema = {}
        for name, value in schema.items():
            if name in NOT_ENFORCED or self._is_left_out(name, value, joined):
                self._leave_out(path, name)
            elif name in _MAPS and isinstance(value, dict):
                found[name] = {
                    key: self._inside(one, original, path, name, key) for key, one in value.items()
                }
            elif (name in _LISTS or name == "items") and isinstance(value, list):
                found[name] = [
                    self._inside(one, original, path, name, at) for at, one in enumerate(value)
                ]
            elif name in _SCHEMAS:
                found[name] = self._inside(value, original, path, name)
            elif self._leads_to_target(path, name):
                found[name] = self._elsewhere(value, original, path, name)
            else:
                found[name] = value
        self._replace_format(found)
        if "patterns" in self._measures and found.get("patternProperties"):
            self._merge_patterns(found, original, path)
        return self._without_one_of(found, path)

    def _elsewhere(self, value: Any, original: Any, path: Path, *keys: str | int) -> Any:
        """Relaxes the targets of references in a value that is not itself a schema."""
        if (*path, *keys) in self._targets:
            return self._inside(value, original, path, *keys)
        if len(path) + len(keys) > MAX_DEPTH or not self._leads_to_target(path, *keys):
            return value
        if isinstance(value, dict):
            return {
                key: self._elsewhere(one, original, path, *keys, key) for key, one in value.items()
            }
        return value

    def _leads_to_target(self, path: Path, *keys: str | int) -> bool:
        """Whether there may be targets of references at or below a path."""
        found = self._leading
        for key in (*path, *keys):
            inner = found.get(str(key))
            if inner is None:
                return False
            found = inner
        return True

    def _inside(self, schema: Any, original: Any, path: Path, *keys: str | int) -> Any:
        inner = original
        for key in keys:
            if isinstance(inner, dict):
                inner = inner.get(key)
            elif isinstance(inner, list) and isinstance(key, int) and key < len(inner):
                inner = inner[key]
            else:
                inner = None
        return self.part(schema, inner, path if inner is None else (*path, *keys))

    def _is_left_out(self, name: str, value: Any, joined: bool) -> bool:
        """``joined``: whether the keyword is in a part of ``_joined``."""
        if name == "pattern" and joined:
            return True
        if name == "pattern" and "look_around" in self._measures:
            return isinstance(value, str) and LOOK_AROUND.search(value) is not None
        return name in _COUNTS and "counts" in self._measures

    def _leave_out(self, path: Path, keyword: str) -> None:
        self.places[path] = None
        self.keywords[keyword] = None

    def _replace_format(self, found: Schema) -> None:
        name = found.get("format")
        if not isinstance(name, str) or name in KNOWN:
            return
        del found["format"]
        if name in PATTERNS:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": PATTERNS[name]}]
        else:
            self.keywords["format"] = None

    def _merge_patterns(self, found: Schema, original: Any, path: Path) -> None:
        """Replaces ``patternProperties`` by ``additionalProperties`` that allow the values of every
        pattern."""
        patterns = found.pop("patternProperties")
        others = found.get("additionalProperties", True)
        found["additionalProperties"] = any_of([*patterns.values(), others])
        self._leave_out(path, "patternProperties")
        if not isinstance(original, dict):
            return
        own = original.get("patternProperties")
        for name in own if isinstance(own, dict) else ():
            self.places[(*path, "patternProperties", name)] = None
        if "additionalProperties" in original:
            self.places[(*path, "additionalProperties")] = None

    def _without_siblings(self, schema: Schema, path: Path) -> Schema:
        """If a schema, or a member of its ``anyOf``, ``oneOf`` or ``allOf``, is a circular
        reference, removes the other keywords of the schema. One member of ``allOf`` stays."""
        kept = next((name for name in _COMBINING if self._leads_back(schema.get(name))), None)
        if kept is None:
            return schema
        kept_names = _KEPT | {kept}
        if not path:
            kept_names |= {str(one[0]) for one in self._targets}
        rest = {name: one for name, one in schema.items() if name in kept_names}
        if kept != "$ref" or not self._ignores_siblings:
            for name in schema.keys() - rest.keys():
                self._leave_out(path, name)
        if kept == "allOf" and len(schema[kept]) > 1:
            self._leave_out(path, kept)
            stays = next(one for one in schema[kept] if self._leads_back(one))
            rest[kept] = [one if one is stays else True for one in schema[kept]]
        return rest

    def _leads_back(self, value: Any) -> bool:
        """Whether a value is a circular reference, or a schema or a list that contains one."""
        if isinstance(value, list):
            return any(map(self._leads_back, value))
        if isinstance(value, dict):
            return self._leads_back(value.get("$ref"))
        return self._is_circular(value)

    def _is_circular(self, reference: Any) -> bool:
        """Whether a reference is circular: the target contains a reference that leads to the target
        again."""
        if not isinstance(reference, str):
            return False
        if reference not in self._circular:
            self._circular[reference] = reference in self._reached(reference)
        return self._circular[reference]

    def _reached(self, reference: str) -> set[str]:
        reached: set[str] = set()
        left = [reference]
        while left:
            for one in _references(self._made, left.pop()):
                if one not in reached:
                    reached.add(one)
                    left.append(one)
        return reached

    def _without_one_of(self, schema: Schema, path: Path) -> Schema:
        """Replaces ``oneOf`` in a schema by ``anyOf``, because masks cannot enforce that only one
        alternative matches."""
        if "oneOf" not in schema:
            return schema
        self._leave_out(path, "oneOf")
        if "anyOf" not in schema:
            return {"anyOf" if name == "oneOf" else name: one for name, one in schema.items()}
        rest = {name: value for name, value in schema.items() if name != "oneOf"}
        return {**rest, "allOf": [*rest.get("allOf", ()), {"anyOf": schema["oneOf"]}]}


def _members_of_all(root: Any) -> frozenset[int]:
    """The ids of the members of each ``allOf``, and of their members, alternatives and
    references."""
    left = [one for schema in objects(root) for one in _listed(schema.get("allOf"))]
    found = set[int]()
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in found:
            continue
        found.add(id(one))
        left += [inner for name in ("allOf", "anyOf", "oneOf") for inner in _listed(one.get(name))]
        if _is_local(one):
            with suppress(Unsupported):
                left.append(target(root, one["$ref"]))
    return frozenset(found)


def _references(root: Any, reference: str) -> Iterator[str]:
    """The references in the target of a reference."""
    try:
        found = target(root, reference)
    except Unsupported:
        return
    for one in objects(found):
        inner = one.get("$ref")
        if isinstance(inner, str):
            yield inner


def _tree(paths: Iterable[Path]) -> dict[str, Any]:
    """A tree of paths: a dict with the first key of each path. The value of a key is the tree of
    all paths that begin with this key, without the key."""
    root: dict[str, Any] = {}
    for path in paths:
        found = root
        for key in path:
            found = found.setdefault(str(key), {})
    return root


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_local(schema: Schema) -> bool:
    reference = schema.get("$ref")
    return isinstance(reference, str) and reference.startswith("#/")


def _path_of(reference: str) -> Path:
    names = unquote(reference).split("/")[1:]
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in names)
