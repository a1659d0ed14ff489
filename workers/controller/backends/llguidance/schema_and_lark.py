"""The built-in constraints ``json_schema`` and ``lark``, whose arguments are converted to
llguidance grammars."""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

from .....protocol.errors import Code, RequestError
from .....protocol.json_schema.relaxing import Measure
from ...host import Host
from ...pool import tenant_of_thread
from ..compiling.bounds import RefusedGrammar
from ..compiling.kept import Kept
from .closing import Closing
from .matcher_controller import MatcherController
from .matchers import Grammar, Matchers, Weakened
from .schemas import KEPT_CHARACTERS, KEPT_SCHEMAS, Rewriting, schema_grammar
from .spacing import spaced_lark
from .trial import UNSATISFIABLE

MAX_BYTES = 1024 * 1024
"""Maximum bytes of a schema or a grammar. ``compiling`` bounds the cost of compiling it."""

_LEXEME = re.compile(
    r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|/(?!/)[^/\\]*(?:\\.[^/\\]*)*/"
    r"|(?:\#|//)[^\n]*"
    r"|(?P<special><[^<>\s]+>)",
    re.DOTALL,
)
"""Lexemes of a Lark grammar that may contain ``<``: strings (also of JSON), regular expressions,
comments, and the names of special tokens. llguidance's lexer defines them in the same way."""


MEASURES: dict[str, tuple[Measure, ...]] = {
    "Unimplemented keys": ("keywords",),
    "oneOf constraints": ("keywords",),
    "Unknown format": ("keywords",),
    "patternProperty regexes": ("patterns",),
    "look-around": ("patterns",),
    "circular references": ("references", "patterns"),
    "min/maxProperties": ("counts",),
    "Unable to determine if regex is empty": ("texts",),
    "schema too large": ("original",),
    "intersection stack level exceeded": ("original", "references"),
}
"""Maps a part of llguidance's error message to the measures that relax the refused schema, in the
order in which they are taken (``protocol.json_schema.relaxing``)."""


MAX_EMPTY = 4
"""Maximum number of references of a schema whose targets allow no value."""
_EMPTY = re.compile(rf"^{UNSATISFIABLE}.*, at the reference (\S+)$")
"""Matches the error about the target of a reference that allows no value. llguidance refuses such a
reference even if its value is optional."""
_UNBLAMED = (*MEASURES, UNSATISFIABLE)
"""Errors after which a schema is relaxed without a search for the faulty part."""


class _Relaxed(NamedTuple):
    grammar: str
    """The grammar of the relaxed schema."""
    weakened: Weakened | None
    made: Grammar


class JsonSchemaProgram:
    """The built-in constraint ``json_schema``: the text is a JSON value that matches the schema in
    the argument.

    White space is as in ``json.dumps``, or as the schema's ``x-guidance`` defines, within bounds
    (``spacing``). Properties come in the order of the schema.
    """

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._rewriting = Rewriting(matchers.processes)
        self._relaxed = Kept[bytes, tuple[str, Weakened | None]](KEPT_SCHEMAS, KEPT_CHARACTERS)
        """The results of ``_relaxed_grammar``, by the hash of the schema."""

    def start(self, host: Host) -> MatcherController:
        """Makes the controller. Raises RequestError, with llguidance's reason, if the argument is
        not a schema that llguidance supports."""
        schema = _argument(host, "json_schema", "a JSON schema")
        try:
            made = self._compiled(host, _object_of(schema))
        except RefusedGrammar as error:
            raise _refusal(f"json_schema: {error}") from None
        except ValueError as error:
            raise _refusal(f"json_schema: the argument is not a JSON schema: {error}") from None
        return MatcherController(made, made.start(), host, Closing(made, host), "json_schema")

    def _compiled(self, host: Host, schema: str) -> Grammar:
        """Compiles a schema. If llguidance refuses the schema because of a keyword, the schema is
        relaxed in as few ways as possible."""
        key = hashlib.sha256(schema.encode()).digest()
        known = self._relaxed.get(key)
        if known is not None:
            return self._matchers.get(host.vocabulary, known[0], "json_schema", known[1])
        grammar = schema_grammar(schema, self._rewriting.implemented)
        try:
            return self._matchers.get(host.vocabulary, grammar, "json_schema", None, _UNBLAMED)
        except RefusedGrammar as error:
            found = self._relaxed_grammar(host, schema, str(error))
        if found is None:
            # This call raises the error again, now with the faulty part of the schema.
            return self._matchers.get(host.vocabulary, grammar, "json_schema")
        size = len(found.grammar) + len(schema)
        self._relaxed.add(tenant_of_thread(), key, (found.grammar, found.weakened), size)
        return found.made

    def _relaxed_grammar(self, host: Host, schema: str, refused: str) -> _Relaxed | None:
        """The grammar of a relaxed schema; None if no relaxed schema compiles. ``refused``: the
        reason why the schema itself was refused."""
        measures: set[Measure] = set()
        empty: list[str] = []
        while True:
            known = next((found for text, found in MEASURES.items() if text in refused), ())
            taken = next((one for one in known if one not in measures), None)
            found = _EMPTY.match(refused)
            if taken is not None:
                measures.add(taken)
            elif found is not None and found[1] not in empty and len(empty) < MAX_EMPTY:
                empty.append(found[1])
            else:
                return None
            relaxed, weakened = self._rewriting.relaxed(schema, frozenset(measures), empty)
            grammar = schema_grammar(relaxed, str)
            try:
                made = self._matchers.get(
                    host.vocabulary, grammar, "json_schema", weakened, _UNBLAMED
                )
            except RefusedGrammar as error:
                refused = str(error)
            else:
                return _Relaxed(grammar, weakened, made)


class LarkProgram:
    """The built-in constraint ``lark``: the text matches a grammar in llguidance's Lark dialect."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers

    def start(self, host: Host) -> MatcherController:
        """Makes the controller. Raises RequestError, with llguidance's reason, if the argument is
        not a grammar of this dialect."""
        text = _argument(host, "lark", "a grammar")
        for lexeme in _LEXEME.finditer(text):
            if lexeme["special"]:
                line = text.count("\n", 0, lexeme.start()) + 1
                raise _refusal(
                    f"lark: line {line} names the special token {lexeme['special'][:80]}, "
                    "which has no text to constrain; literal text must be in quotes"
                )
        try:
            text = spaced_lark(text)
        except RefusedGrammar as error:
            raise _refusal(f"lark: {error}") from None
        grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
        return _start(self._matchers, host, "lark", grammar)


def _start(matchers: Matchers, host: Host, name: str, grammar: str) -> MatcherController:
    try:
        made = matchers.get(host.vocabulary, grammar, name)
    except RefusedGrammar as error:
        raise _refusal(f"{name}: {error}") from None
    return MatcherController(made, made.start(), host, Closing(made, host), name)


def _argument(host: Host, name: str, what: str) -> str:
    if len(host.arg) > MAX_BYTES:
        raise _refusal(
            f"the argument of {name} has {len(host.arg)} bytes; at most {MAX_BYTES} are allowed"
        )
    try:
        text = host.arg.decode()
    except UnicodeDecodeError as error:
        raise _refusal(f"the argument of {name} is not UTF-8 text: {error}") from None
    if not text.strip():
        raise _refusal(f"the argument of {name} is empty; it must be {what}")
    return text


def _object_of(schema: str) -> str:
    """The schema as an object, as llguidance requires; the schema ``true`` becomes the empty
    object."""
    return "{}" if schema.strip() == "true" else schema


def _refusal(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message, path="$.controller_arg")
