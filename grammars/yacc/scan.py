"""The scanner of grammars, which splits their text into tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import error_at

DIRECTIVES = ("%start", "%left", "%right", "%nonassoc", "%reserved", "%lexer")
IN_RULES = ("%prec", "%empty")

_BLANK = re.compile(r"(?:[ \t\r\n\f\v]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<quoted>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
    |(?P<sections>%%)
    |(?P<directive>%[A-Za-z_-]*)
    |(?P<mark>[:|;])""",
    re.VERBOSE,
)
_UNREADABLE = {
    "{": "actions in braces are not supported: a grammar only describes texts",
    "/": "the comment '/*' is not closed with '*/'",
    "<": "type tags are not supported: a grammar only describes texts",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the grammar's text. ``kind``: name, quoted, sections, directive, mark or end.
    ``offset``: the place at which the token starts, in characters."""

    kind: str
    text: str
    offset: int

    def __str__(self) -> str:
        if self.kind == "end":
            return "the end of the grammar"
        return self.text if self.kind == "quoted" else f"'{self.text}'"


def scan(text: str) -> list[Token]:
    """All tokens up to and including the second ``%%``, and then a token of the kind ``end``.
    Raises GrammarError for text that is not a token."""
    tokens: list[Token] = []
    sections = 0
    at = 0
    while True:
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        if at == len(text) or sections == 2:
            tokens.append(Token("end", "", at))
            return tokens
        found = _TOKEN.match(text, at)
        if found is None:
            character = text[at]
            if character in "\"'":
                raise error_at(text, at, f"the quote {character} is not closed on its line")
            message = _UNREADABLE.get(character, f"unexpected character {character!r}")
            raise error_at(text, at, message)
        token = Token(str(found.lastgroup), found.group(), at)
        sections += token.kind == "sections"
        tokens.append(token)
        at = found.end()
