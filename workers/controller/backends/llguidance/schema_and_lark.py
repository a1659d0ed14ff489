"""The built-in constraints ``json_schema`` and ``lark``: their argument, as llguidance takes it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from .....protocol.errors import Code, RequestError
from ...host import Host
from ...interface import Controller
from .matcher_controller import MatcherController
from .matchers import Matchers
from .trial import RefusedGrammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 1024 * 1024
"""Of a schema or a grammar. What compiling it may cost is bounded apart from that (``trial``)."""

_SPACING: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""As Python's ``json.dumps`` writes: a model cannot lose itself in spaces, and most of what is
between values is forced. A schema's own ``x-guidance`` says otherwise where that is wanted."""

_LEXEME = re.compile(
    r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|/(?!/)[^/\\]*(?:\\.[^/\\]*)*/"
    r"|(?:\#|//)[^\n]*"
    r"|(?P<special><[^<>\s]+>)",
    re.DOTALL,
)
"""What of a Lark grammar may hold a ``<``: strings (JSON's too), regular expressions, comments, and
the names of special tokens; as llguidance's own lexer has them."""


class JsonSchemaProgram:
    """The built-in ``json_schema``: the text is a JSON value that its argument, a schema, allows.

    The text is spaced as ``json.dumps`` does, properties come in the schema's order.
    """

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers

    def start(self, host: Host) -> Controller:
        """Raises RequestError, with llguidance's reason, where the argument is no schema that it
        can follow."""
        schema = _argument(host, "json_schema", "a JSON schema")
        try:
            grammar = LLMatcher.grammar_from_json_schema(_object_of(schema), _SPACING)
        except ValueError as error:
            raise _refusal(f"json_schema: the argument is not a JSON schema: {error}") from None
        return _start(self._matchers, host, "json_schema", grammar)


class LarkProgram:
    """The built-in ``lark``: the text is one of its argument, a grammar in llguidance's Lark."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers

    def start(self, host: Host) -> Controller:
        """Raises RequestError, with llguidance's reason, where the argument is no such grammar."""
        text = _argument(host, "lark", "a grammar")
        for lexeme in _LEXEME.finditer(text):
            if lexeme["special"]:
                line = text.count("\n", 0, lexeme.start()) + 1
                raise _refusal(
                    f"lark: line {line} names the special token {lexeme['special'][:80]}; a "
                    "constraint is of text, and special tokens have none: write text in quotes"
                )
        grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
        return _start(self._matchers, host, "lark", grammar)


def _start(matchers: Matchers, host: Host, name: str, grammar: str) -> Controller:
    try:
        made = matchers.get(host.vocabulary, grammar)
    except RefusedGrammar as error:
        raise _refusal(f"{name}: {error}") from None
    return MatcherController(made, made.start(), host)


def _argument(host: Host, name: str, what: str) -> str:
    if len(host.arg) > MAX_BYTES:
        raise _refusal(
            f"the argument of {name} has {len(host.arg)} bytes; at most {MAX_BYTES} are allowed"
        )
    try:
        text = host.arg.decode()
    except UnicodeDecodeError as error:
        raise _refusal(f"the argument of {name} is text, and this is not UTF-8: {error}") from None
    if not text.strip():
        raise _refusal(f"{name} needs {what} as its argument")
    return text


def _object_of(schema: str) -> str:
    """llguidance takes objects only; ``true`` is the empty one."""
    return "{}" if schema.strip() == "true" else schema


def _refusal(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message, path="$.controller_arg")
