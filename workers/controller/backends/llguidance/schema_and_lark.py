"""The built-in constraints ``json_schema`` and ``lark``, whose arguments are converted to
llguidance grammars."""

from __future__ import annotations

import json
import re

from .....protocol.errors import Code, RequestError
from ...host import Host
from ..compiling.bounds import RefusedGrammar
from .closing import Closing
from .matcher_controller import MatcherController
from .matchers import Matchers
from .schemas import Rewriting, schema_grammar
from .spacing import spaced_lark

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


class JsonSchemaProgram:
    """The built-in constraint ``json_schema``: the text is a JSON value that matches the schema in
    the argument.

    White space is as in ``json.dumps``, or as the schema's ``x-guidance`` defines, within bounds
    (``spacing``). Properties come in the order of the schema.
    """

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._rewriting = Rewriting(matchers.processes)

    def start(self, host: Host) -> MatcherController:
        """Makes the controller. Raises RequestError, with llguidance's reason, if the argument is
        not a schema that llguidance supports."""
        schema = _argument(host, "json_schema", "a JSON schema")
        try:
            grammar = schema_grammar(_object_of(schema), self._rewriting.implemented)
        except RefusedGrammar as error:
            raise _refusal(f"json_schema: {error}") from None
        except ValueError as error:
            raise _refusal(f"json_schema: the argument is not a JSON schema: {error}") from None
        return _start(self._matchers, host, "json_schema", grammar)


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
