"""Checks values against the parts of a schema, in bounded time.

``jsonschema`` evaluates the parts. llguidance matches their patterns and formats, as it does in
masks, because ``re`` may take exponential time. Each evaluated keyword counts as steps of a
``Budget``; a value whose check exceeds the budget counts as not valid.
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
STEPS_OF_REFERENCE = 8
"""Number of steps that resolving a reference counts."""
DIGITS = 400
"""Precision of the divisions of ``multipleOf``, in digits."""

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
        """A grammar that compiles if all patterns and formats do."""

    def match(self, schema: dict[str, str], text: str) -> bool:
        """Whether a string matches a schema with only ``pattern`` or ``format``."""
        key = json.dumps(schema)
        matcher = self._matchers.get(key)
        if matcher is None or matcher.is_error():
            matcher = LLMatcher(
                byte_tokenizer(),
                LLMatcher.grammar_from_json_schema(json.dumps(_string(key))),
                log_level=0,
                limits=LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False),
            )
            self._matchers[key] = matcher
        try:
            written = json.dumps(text, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # Half of a surrogate pair.
            return False
        return bool(matcher.validate_tokens([*written, _END]) == len(written) + 1)


class Values:
    """Checks values against parts of one schema. The caller serializes the calls."""

    def __init__(self, schema: str) -> None:
        """``schema``: the text of the root. Raises RefusedGrammar if the bounds of checks cannot be
        given for this schema."""
        self.root: Any = exact(schema)
        """The schema, with exact decimal numbers."""
        _refuse(self.root)
        self._texts = Texts(self.root)
        self.grammar = self._texts.grammar
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
        budget.take(1 + len(text) // BYTES_OF_STEP)
        return self._texts.match({"pattern": pattern}, text)

    # --- keywords -------------------------------------------------------------------------------

    def _keywords(self) -> dict[str, Any]:
        base = validator_for(self.root, default=Draft202012Validator)
        own = {
            "pattern": self._pattern,
            "format": self._format,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "uniqueItems": self._unique_items,
        }
        return {
            name: self._counted(own.get(name, each), STEPS_OF_REFERENCE if name == "$ref" else 1)
            for name, each in base.VALIDATORS.items()
        }

    def _counted(self, check: Callable[..., Any], steps: int) -> Callable[..., Any]:
        def counted(validator: Validator, value: Any, instance: Any, schema: Any) -> Any:
            sized = isinstance(instance, str | list | dict)
            listed = len(value) if isinstance(value, list | dict) else 0
            size = (len(instance) if sized else 0) + listed
            self._budget.take(steps + size // BYTES_OF_STEP)
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
            fits = name not in FORMATS or self._texts.match({"format": name}, instance)
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
    """Raises RefusedGrammar if jsonschema would use ``re`` or the references of another base."""
    for one in objects(root):
        if "unevaluatedProperties" in one and any("patternProperties" in o for o in objects(root)):
            raise RefusedGrammar(
                "unevaluatedProperties is not supported in a schema with patternProperties"
            )
        if not {"$dynamicRef", "$recursiveRef"}.isdisjoint(one):
            raise RefusedGrammar("$dynamicRef and $recursiveRef are not supported")
        base = one.get("id" if draft_of(root) <= 4 else "$id", "#")
        if one is root or not isinstance(base, str) or base.startswith("#"):
            continue
        if any("$ref" in inner for inner in objects(one)):
            raise RefusedGrammar("a part with its own $id is not supported")
