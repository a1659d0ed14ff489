"""Checks values against the parts of a schema, in bounded time.

The library ``jsonschema`` evaluates the parts. llguidance matches their patterns and formats,
because Python's ``re`` may take exponential time. Each evaluated keyword takes steps of a
``Budget``. If the check of a value exceeds the budget, the value counts as invalid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import DecimalException, localcontext
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from llguidance import LLMatcher, LLParserLimits
from referencing import Registry

from ......protocol.json_schema import FORMATS, rewritten
from ......protocol.json_schema.formats import PATTERNS
from ......protocol.json_schema.parts import draft_of, objects
from ...compiling.bounds import RefusedGrammar
from ..trial import byte_tokenizer
from .budget import BYTES_OF_STEP, Budget
from .exact_json import exact, identity

MAX_PATTERNS = 64
"""Maximum number of patterns and formats of a schema whose values are checked."""
MAX_STATES = 5_000
"""Maximum states of the lexer for one pattern or format. A state has about 0.5 kB."""
MAX_SCANNED = 50_000
"""Maximum total number of objects in the parts that have their own ``$id``."""
STEPS_OF_REFERENCE = 8
"""Number of steps that are counted for resolving a reference."""
STEPS_OF_TEXT = 4
"""Number of steps that are counted for matching a pattern."""
DIGITS = 400
"""Precision of the divisions of ``multipleOf``, in digits."""

_OF_ITEMS = frozenset(
    ("items", "additionalItems", "contains", "propertyNames", "additionalProperties")
)
"""Keywords whose schema is applied to items, properties or names."""
_OF_PARTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
"""Keywords with a list of schemas."""

_END = byte_tokenizer().eos_token
_LOCAL: Registry[Any] = Registry()
"""A registry without other schemas: jsonschema must not open the URLs of references."""


class Texts:
    """Matches strings against the patterns and formats of one schema."""

    def __init__(self, root: Any) -> None:
        self._matchers: dict[str, LLMatcher] = {}
        found = dict.fromkeys(_texts_of(root))
        if len(found) > MAX_PATTERNS:
            raise RefusedGrammar(
                f"the schema has {len(found)} patterns; at most {MAX_PATTERNS} are allowed if it "
                "has keywords that are checked when a value ends"
            )
        self.grammar = LLMatcher.grammar_from_json_schema(
            json.dumps({"properties": {str(at): _string(one) for at, one in enumerate(found)}})
        )
        """A grammar that compiles if all patterns and formats compile."""
        self._all = found

    def prepare(self) -> None:
        """Compiles all patterns and formats, so that the first checks do not wait for the
        compiler."""
        for key in self._all:
            self._matchers[key] = self._compiled(key)

    def match(self, schema: dict[str, str], text: str) -> bool:
        """Whether a string matches a schema with only ``pattern`` or ``format``."""
        key = json.dumps(schema)
        matcher = self._matchers.get(key)
        if matcher is None or matcher.is_error():
            matcher = self._matchers[key] = self._compiled(key)
        try:
            written = json.dumps(text, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # Half of a surrogate pair.
            return False
        return bool(matcher.validate_tokens([*written, _END]) == len(written) + 1)

    @staticmethod
    def _compiled(key: str) -> LLMatcher:
        return LLMatcher(
            byte_tokenizer(),
            LLMatcher.grammar_from_json_schema(json.dumps(_string(key))),
            log_level=0,
            limits=LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False),
        )


class Values:
    """Checks values against parts of one schema. The caller serializes the calls."""

    def __init__(self, schema: str) -> None:
        """``schema``: the text of the root. Raises RefusedGrammar if the time of the checks cannot
        be bounded for this schema."""
        self.root: Any = exact(schema)
        """The schema, with exact decimal numbers."""
        _refuse(self.root)
        self.texts = Texts(self.root)
        self._enums: dict[int, frozenset[Any]] = {}
        """The identities of the values of each ``enum``, by the id of the list."""
        self._consts: dict[int, Any] = {}
        """The identity of each array or object in ``const``, by its id."""
        for one in objects(self.root):
            if isinstance(values := one.get("enum"), list):
                self._enums[id(values)] = frozenset(map(identity, values))
            if isinstance(value := one.get("const"), list | dict):
                self._consts[id(value)] = identity(value)
        self._budget = Budget(0)
        make = extend(validator_for(self.root, default=Draft202012Validator), self._keywords())
        self._validator: Validator = make(
            self.root, registry=_LOCAL, format_checker=FormatChecker(formats=())
        )

    def holds(self, part: Any, value: Any, budget: Budget) -> bool:
        """Whether a value matches a part of the schema. Raises ``Exhausted``."""
        self._budget = budget
        try:
            with localcontext(prec=DIGITS):
                return bool(self._validator.evolve(schema=part).is_valid(value))
        except (DecimalException, RecursionError):
            return False

    def matches(self, pattern: str, text: str, budget: Budget) -> bool:
        """Whether a pattern matches a part of a text. Raises ``Exhausted``."""
        budget.take(STEPS_OF_TEXT + len(text) // BYTES_OF_STEP)
        return self.texts.match({"pattern": pattern}, text)

    # --- keywords -------------------------------------------------------------------------------

    def _keywords(self) -> dict[str, Any]:
        base = validator_for(self.root, default=Draft202012Validator)
        own = {
            "pattern": self._pattern,
            "format": self._format,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "uniqueItems": self._unique_items,
            "enum": self._enum,
            "const": self._const,
        }
        return {
            name: self._counted(name, own.get(name, each)) for name, each in base.VALIDATORS.items()
        }

    def _counted(self, name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts the steps of the keyword ``name`` and then calls ``check``. If the
        keyword applies schemas to several values or parts, each of them counts as a step."""
        own = STEPS_OF_REFERENCE if name == "$ref" else 1

        def counted(validator: Validator, value: Any, instance: Any, schema: Any) -> Any:
            steps = own + _length(instance) // BYTES_OF_STEP
            if name in _OF_ITEMS:
                steps += _length(instance)
            steps += _length(value) // (1 if name in _OF_PARTS else BYTES_OF_STEP)
            self._budget.take(steps)
            return check(validator, value, instance, schema)

        return counted

    def _matches(self, pattern: str, text: str) -> bool:
        return self.matches(pattern, text, self._budget)

    def _pattern(self, _: Validator, pattern: Any, instance: Any, __: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not self._matches(pattern, instance):
            yield ValidationError("pattern")

    def _format(self, _: Validator, name: Any, instance: Any, __: Any) -> Iterator[Any]:
        if not isinstance(instance, str):
            return
        if name in PATTERNS:
            fits = self._matches(PATTERNS[name], instance)
        else:
            fits = name not in FORMATS or self.texts.match({"format": name}, instance)
        if not fits:
            yield ValidationError("format")

    def _pattern_properties(
        self, validator: Validator, patterns: Any, instance: Any, _: Any
    ) -> Iterator[Any]:
        for pattern, part in patterns.items() if isinstance(instance, dict) else ():
            for name, value in instance.items():
                if self._matches(pattern, name):
                    yield from validator.descend(value, part)

    def _additional_properties(
        self, validator: Validator, part: Any, instance: Any, schema: Any
    ) -> Iterator[Any]:
        patterns = schema.get("patternProperties", {})
        for name, value in instance.items() if isinstance(instance, dict) else ():
            if name not in schema.get("properties", {}) and not any(
                self._matches(pattern, name) for pattern in patterns
            ):
                yield from validator.descend(value, part)

    def _unique_items(self, _: Validator, unique: Any, instance: Any, __: Any) -> Iterator[Any]:
        if unique is True and isinstance(instance, list):
            self._budget.take(_size(instance) // BYTES_OF_STEP)
            if len(set(map(identity, instance))) < len(instance):
                yield ValidationError("uniqueItems")

    def _enum(self, _: Validator, values: Any, instance: Any, __: Any) -> Iterator[Any]:
        self._budget.take(_size(instance) // BYTES_OF_STEP)
        if identity(instance) not in self._enums[id(values)]:
            yield ValidationError("enum")

    def _const(self, _: Validator, value: Any, instance: Any, __: Any) -> Iterator[Any]:
        self._budget.take(_size(instance) // BYTES_OF_STEP)
        wanted = self._consts[id(value)] if isinstance(value, list | dict) else identity(value)
        if identity(instance) != wanted:
            yield ValidationError("const")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | dict) else 0


def _size(value: Any) -> int:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return len(value) + sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


def _texts_of(root: Any) -> Iterator[str]:
    """The patterns and formats of a schema, as JSON texts of schemas."""
    for one in objects(root):
        if isinstance(pattern := one.get("pattern"), str):
            yield json.dumps({"pattern": pattern})
        if isinstance(patterns := one.get("patternProperties"), dict):
            for pattern in patterns:
                yield json.dumps({"pattern": pattern})
        name = one.get("format")
        if not isinstance(name, str):
            continue
        if name in PATTERNS:
            yield json.dumps({"pattern": PATTERNS[name]})
        elif name in FORMATS:
            yield json.dumps({"format": name})


def _string(text: str) -> Any:
    """The schema of the strings that match a schema with only ``pattern`` or ``format``. A
    look-ahead is rewritten."""
    return rewritten({"type": "string", **json.loads(text)}).schema


def _refuse(root: Any) -> None:
    """Raises RefusedGrammar if jsonschema would match patterns with ``re``, or would resolve
    references relative to the ``$id`` of a part."""
    draft, scanned = draft_of(root), 0
    has_patterns = any("patternProperties" in one for one in objects(root))
    for one in objects(root):
        if has_patterns and "unevaluatedProperties" in one:
            raise RefusedGrammar(
                "unevaluatedProperties is not supported in a schema with patternProperties"
            )
        if not {"$dynamicRef", "$recursiveRef"}.isdisjoint(one):
            raise RefusedGrammar("$dynamicRef and $recursiveRef are not supported")
        base = one.get("id" if draft <= 4 else "$id", "#")
        if one is root or not isinstance(base, str) or base.startswith("#"):
            continue
        for inner in objects(one):
            scanned += 1
            if "$ref" in inner or scanned > MAX_SCANNED:
                raise RefusedGrammar("a part with its own $id is not supported")
