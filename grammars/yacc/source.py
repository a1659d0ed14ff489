"""Parses the text of a grammar to rules and declarations, each with its place in the text.

The format is AICI's (docs/grammars.md). AICI's format is yacc's format, but lexemes are written
inside the rules. Two directives are extensions. ``%reserved`` lists words that no rule contains.
The lexer recognises them, so these words cannot be names. ``%lexer declared`` replaces AICI's lexer
rules (``LexerRules``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .errors import GrammarError, error_at
from .scan import DIRECTIVES, Token, scan

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a grammar."""

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of an alternative: another rule, or a lexeme.

    ``text``: the rule's name, the keyword, or the regular expression without its slashes.
    """

    text: str
    kind: str
    """The kind of the symbol: rule, keyword or regex."""
    offset: int


@dataclass(slots=True)
class Alternative:
    """One right-hand side of a rule. ``prec``: the symbol after ``%prec``; None without
    ``%prec``."""

    symbols: list[Symbol]
    prec: Symbol | None
    offset: int


@dataclass(slots=True)
class Rule:
    """A rule with its alternatives, in order."""

    name: str
    offset: int
    alternatives: list[Alternative] = field(default_factory=list)


@dataclass(slots=True)
class Precedence:
    """A line of ``%left``, ``%right`` or ``%nonassoc``; later lines bind tighter."""

    associativity: str
    symbols: list[Symbol]


class LexerRules(Enum):
    """Determines two things: which lexeme the lexer chooses if several lexemes match the same text,
    and the state in which the lexer begins.

    With either value, a keyword is preferred to a regular expression, and a ``%reserved`` regular
    expression is preferred to any other regular expression.
    """

    AICI = "aici"
    """The default, as in AICI. The regular expression that is written with more bytes is preferred.
    The lexer begins as if it had just read a newline."""
    DECLARED = "declared"
    """As in flex. The regular expression that comes first in the grammar is preferred. The lexer
    begins at the first byte."""


@dataclass(slots=True)
class Source:
    """The parsed text of a grammar."""

    text: str
    start: Symbol
    lexer_rules: LexerRules
    precedences: list[Precedence]
    reserved: list[Symbol]
    rules: list[Rule]


def read_source(text: str) -> Source:
    """Parses a grammar. Raises GrammarError with line and column at the first error."""
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(
            f"the grammar has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed"
        )
    return _Reader(text).source()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = scan(text)
        self.at = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def is_mark(self, mark: str) -> bool:
        return self.token.kind == "mark" and self.token.text == mark

    def expected(self, what: str) -> GrammarError:
        return error_at(self.text, self.token.offset, f"expected {what}, found {self.token}")

    def source(self) -> Source:
        start: Symbol | None = None
        lexer_rules: LexerRules | None = None
        precedences: list[Precedence] = []
        reserved: list[Symbol] = []
        while self.token.kind == "directive":
            directive = self.next()
            if directive.text == "%start":
                if start is not None:
                    raise error_at(self.text, directive.offset, "%start is given a second time")
                if self.token.kind != "name":
                    raise self.expected("the name of the start rule")
                start = self.symbol()
            elif directive.text == "%lexer":
                if lexer_rules is not None:
                    raise error_at(self.text, directive.offset, "%lexer is given a second time")
                if self.token.text != LexerRules.DECLARED.value:
                    raise self.expected("'declared' after %lexer")
                self.next()
                lexer_rules = LexerRules.DECLARED
            elif directive.text == "%reserved":
                while self.token.kind == "quoted":
                    reserved.append(self.symbol())
                if self.tokens[self.at - 1] is directive:
                    raise self.expected("a lexeme in quotes")
            elif directive.text in DIRECTIVES:
                precedences.append(Precedence(directive.text[1:], self.precedence_symbols()))
            else:
                known = ", ".join(DIRECTIVES)
                message = f"expected one of {known} or %%, found {directive}"
                if directive.text == "%token":
                    message += "; lexemes are not declared: write each one in the rules that use it"
                raise error_at(self.text, directive.offset, message)
        if self.token.kind != "sections":
            raise self.expected(f"one of {', '.join(DIRECTIVES)} or %%")
        if start is None:
            raise error_at(self.text, self.token.offset, "missing '%start RULE' before %%")
        self.next()
        rules: list[Rule] = []
        while self.token.kind not in ("end", "sections"):
            rules.append(self.rule())
        if not rules:
            raise self.expected("a rule")
        chosen = lexer_rules or LexerRules.AICI
        return Source(self.text, start, chosen, precedences, reserved, rules)

    def precedence_symbols(self) -> list[Symbol]:
        symbols: list[Symbol] = []
        while self.token.kind in ("name", "quoted"):
            symbols.append(self.symbol())
        if not symbols:
            raise self.expected("a lexeme or a name")
        return symbols

    def rule(self) -> Rule:
        if self.token.kind != "name":
            raise self.expected("the name of a rule")
        name = self.next()
        if not self.is_mark(":"):
            raise self.expected(f"':' after '{name.text}'")
        rule = Rule(name.text, name.offset)
        while True:
            self.next()
            rule.alternatives.append(self.alternative(rule))
            if self.is_mark(";"):
                self.next()
                return rule

    def alternative(self, rule: Rule) -> Alternative:
        alternative = Alternative([], None, self.token.offset)
        said_empty = False
        while not (self.is_mark("|") or self.is_mark(";")):
            token = self.token
            if token.kind == "directive" and token.text == "%prec":
                self.next()
                if self.token.kind not in ("name", "quoted"):
                    raise self.expected("a lexeme or a name after %prec")
                alternative.prec = self.symbol()
                if not (self.is_mark("|") or self.is_mark(";")):
                    raise self.expected("'|' or ';' after %prec")
            elif token.kind == "directive" and token.text == "%empty":
                self.next()
                said_empty = True
            elif token.kind in ("name", "quoted"):
                alternative.symbols.append(self.symbol())
            else:
                raise self.expected(f"a lexeme, a rule, '|' or ';' in rule '{rule.name}'")
            if said_empty and alternative.symbols:
                wrong = "%empty must be the only symbol of its alternative"
                raise error_at(self.text, token.offset, wrong)
            if self.is_mark(":"):
                raise self.expected(f"';' before the rule '{token.text}'")
        return alternative

    def symbol(self) -> Symbol:
        token = self.next()
        if token.kind == "name":
            return Symbol(token.text, "rule", token.offset)
        inner = token.text[1:-1]
        if not inner:
            wrong = "the keyword is empty; write %empty for the empty text"
            raise error_at(self.text, token.offset, wrong)
        if len(inner) > 2 and inner[0] == inner[-1] == "/":
            return Symbol(inner[1:-1], "regex", token.offset)
        return Symbol(_ESCAPE.sub(self.unescape(token), inner), "keyword", token.offset)

    def unescape(self, token: Token) -> Callable[[re.Match[str]], str]:
        def one(found: re.Match[str]) -> str:
            code = found.group(1)
            if code[0] == "x" and len(code) == 3:
                return chr(int(code[1:], 16))
            if code in "\"'\\/":
                return code
            if code not in _ESCAPED:
                known = r"""\n \t \r \f \v \0 \xHH \\ \/ \" \'"""
                message = f"unknown escape \\{code} in a keyword; it must be one of {known}"
                raise error_at(self.text, token.offset + 1 + found.start(), message)
            return _ESCAPED[code]

        return one
