"""Numbers the terminals, nonterminals and productions of a grammar.

Terminal 0 is the end of the text. Terminal 1 is SKIP: lexemes that may stand between any two other
lexemes. Productions do not contain SKIP. The symbol of a terminal is the terminal's number. The
symbol of a nonterminal is its number plus the number of terminals. Nonterminal 0 is the whole text.
The source does not contain it. Production 0 derives the start rule from nonterminal 0.

If each alternative of a rule is a single lexeme that is used nowhere else, the rule becomes one
terminal with several lexemes. CONSTANT in AICI's C grammar is an example. This does not change
which texts match, and the parser needs fewer states and reductions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .errors import GrammarError, error_at
from .source import Alternative, LexerRules, Rule, Source, Symbol

END = 0
SKIP = 1
SKIP_RULE = "SKIP"
RESERVED = "a reserved word"


@dataclass(frozen=True, slots=True)
class GrammarLexeme:
    """A keyword or regular expression of the grammar, and the number of its terminal.

    ``pattern``: the text of a keyword, or a regular expression without its slashes. ``offset``: the
    place of the first use, in characters.
    """

    pattern: str
    literal: bool
    reserved: bool
    terminal: int
    offset: int


@dataclass(frozen=True, slots=True)
class Production:
    """One alternative of a rule. ``precedence``: the level of the alternative; 0 if it has no
    precedence. ``offset``: the place of the alternative, in characters."""

    lhs: int
    rhs: tuple[int, ...]
    precedence: int
    offset: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar with numbered symbols. ``precedence[t]`` and ``associativity[t]`` belong to
    terminal t; a terminal without precedence has precedence 0.

    ``lexemes`` are in the order in which they are first used.
    """

    text: str
    lexer_rules: LexerRules
    terminals: tuple[str, ...]
    nonterminals: tuple[str, ...]
    productions: tuple[Production, ...]
    lexemes: tuple[GrammarLexeme, ...]
    precedence: tuple[int, ...]
    associativity: tuple[str, ...]

    def symbol_name(self, symbol: int) -> str:
        """The name of a symbol in messages."""
        terminals = len(self.terminals)
        if symbol < terminals:
            return self.terminals[symbol]
        return self.nonterminals[symbol - terminals]

    def production_text(self, production: int) -> str:
        """A production as one line: ``sum: sum "+" number``."""
        chosen = self.productions[production]
        right = " ".join(map(self.symbol_name, chosen.rhs)) or "%empty"
        return f"{self.nonterminals[chosen.lhs]}: {right}"

    def error(self, offset: int, message: str) -> GrammarError:
        """The error at a place of the grammar's text."""
        return error_at(self.text, offset, message)


def number_grammar(source: Source) -> Grammar:
    """Numbers the symbols of a grammar.

    Raises GrammarError for a rule that is missing, defined twice, or used where it must not be.
    """
    return _Numbering(source).grammar()


def lexeme_name(symbol: Symbol) -> str:
    """The name that messages use for a lexeme without a separate rule."""
    if symbol.kind == "regex":
        return f"/{symbol.text}/"
    return '"' + symbol.text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


class _Numbering:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.rules: dict[str, Rule] = {}
        for rule in source.rules:
            if rule.name in self.rules:
                raise self.error(rule.offset, f"the rule '{rule.name}' is defined a second time")
            self.rules[rule.name] = rule
        self.skip = self.rules.pop(SKIP_RULE, None)
        if source.start.text not in self.rules:
            found = f"the start rule '{source.start.text}' is not defined"
            raise self.error(source.start.offset, found)
        self.uses = Counter(
            (symbol.kind, symbol.text)
            for rule in self.rules.values()
            for alternative in rule.alternatives
            for symbol in alternative.symbols
        )
        self.check_names()

    def error(self, offset: int, message: str) -> GrammarError:
        return error_at(self.source.text, offset, message)

    def check_names(self) -> None:
        for rule in self.rules.values():
            for alternative in rule.alternatives:
                for symbol in alternative.symbols:
                    if symbol.kind == "rule" and symbol.text not in self.rules:
                        wrong = "is used in a rule, but its lexemes are skipped between all others"
                        if symbol.text != SKIP_RULE:
                            wrong = "is not defined"
                        raise self.error(symbol.offset, f"the rule '{symbol.text}' {wrong}")
        for symbol in self.source.reserved:
            if self.uses[key_of(symbol)]:
                found = f"{lexeme_name(symbol)} is reserved, and is used in a rule as well"
                raise self.error(symbol.offset, found)
        for alternative in self.skip.alternatives if self.skip else ():
            symbols = alternative.symbols
            if len(symbols) != 1 or symbols[0].kind == "rule" or alternative.prec:
                raise self.error(alternative.offset, "an alternative of SKIP must be one lexeme")
            if self.uses[key_of(symbols[0])]:
                found = f"{lexeme_name(symbols[0])} is in SKIP, and is used in a rule as well"
                raise self.error(symbols[0].offset, found)

    def named_levels(self) -> dict[tuple[str, str], tuple[int, str]]:
        """Level and associativity of each symbol in %left, %right and %nonassoc."""
        levels: dict[tuple[str, str], tuple[int, str]] = {}
        for level, line in enumerate(self.source.precedences, 1):
            for symbol in line.symbols:
                key = (symbol.kind, symbol.text)
                if key in levels:
                    found = f"{symbol.text!r} is given a second precedence"
                    raise self.error(symbol.offset, found)
                levels[key] = (level, line.associativity)
        return levels

    def is_lexeme_rule(self, rule: Rule, levels: dict[tuple[str, str], tuple[int, str]]) -> bool:
        if rule.name == self.source.start.text:
            return False
        return all(
            len(alternative.symbols) == 1
            and alternative.prec is None
            and (symbol := alternative.symbols[0]).kind != "rule"
            and self.uses[key_of(symbol)] == 1
            and key_of(symbol) not in levels
            for alternative in rule.alternatives
        )

    def grammar(self) -> Grammar:
        levels = self.named_levels()
        lexeme_rules = {r.name for r in self.rules.values() if self.is_lexeme_rule(r, levels)}
        for line in self.source.precedences:
            for symbol in line.symbols:
                if (
                    symbol.kind == "rule"
                    and symbol.text in self.rules
                    and symbol.text not in lexeme_rules
                ):
                    found = f"'{symbol.text}' is a rule; only lexemes have a precedence"
                    raise self.error(symbol.offset, found)

        names = ["the end of the text", SKIP_RULE]
        precedence = [0, 0]
        associativity = ["", ""]
        lexemes: list[GrammarLexeme] = []
        by_lexeme: dict[tuple[str, str], int] = {}
        by_rule: dict[str, int] = {}

        def terminal(name: str, key: tuple[str, str]) -> int:
            names.append(name)
            level, how = levels.get(key, (0, ""))
            precedence.append(level)
            associativity.append(how)
            return len(names) - 1

        if self.source.reserved:
            number = terminal(RESERVED, ("", ""))
            for symbol in self.source.reserved:
                literal = symbol.kind == "keyword"
                lexemes.append(GrammarLexeme(symbol.text, literal, True, number, symbol.offset))
                by_lexeme[key_of(symbol)] = number

        for rule in self.source.rules:
            for alternative in rule.alternatives:
                for symbol in alternative.symbols:
                    key = (symbol.kind, symbol.text)
                    if symbol.kind == "rule" or key in by_lexeme:
                        continue
                    if rule.name == SKIP_RULE:
                        number = SKIP
                    elif rule.name in lexeme_rules:
                        if rule.name not in by_rule:
                            by_rule[rule.name] = terminal(rule.name, ("rule", rule.name))
                        number = by_rule[rule.name]
                    else:
                        number = terminal(lexeme_name(symbol), key)
                    by_lexeme[key] = number
                    literal = symbol.kind == "keyword"
                    lexemes.append(
                        GrammarLexeme(symbol.text, literal, False, number, symbol.offset)
                    )

        unranked = {number for number in by_rule.values() if not precedence[number]}
        kept = [rule for rule in self.rules.values() if rule.name not in lexeme_rules]
        for number, rule in enumerate(kept, 1):
            by_rule[rule.name] = len(names) + number

        def symbol_number(symbol: Symbol) -> int:
            return by_rule[symbol.text] if symbol.kind == "rule" else by_lexeme[key_of(symbol)]

        def level_of(alternative: Alternative, rhs: tuple[int, ...]) -> int:
            if alternative.prec is not None:
                key = key_of(alternative.prec)
                if key not in levels:
                    found = f"{alternative.prec.text!r} has no %left, %right or %nonassoc"
                    raise self.error(alternative.prec.offset, found)
                return levels[key][0]
            # If all alternatives of a rule are lexemes, the rule is a terminal here, but a
            # nonterminal in yacc. In yacc, a nonterminal does not set the precedence of a
            # production. So such a terminal is skipped here, unless it has a precedence itself.
            terminals = [symbol for symbol in rhs if symbol < len(names) and symbol not in unranked]
            return precedence[terminals[-1]] if terminals else 0

        start = by_rule[self.source.start.text]
        productions = [Production(0, (start,), 0, self.source.start.offset)]
        for number, rule in enumerate(kept, 1):
            for alternative in rule.alternatives:
                rhs = tuple(map(symbol_number, alternative.symbols))
                level = level_of(alternative, rhs)
                productions.append(Production(number, rhs, level, alternative.offset))
        return Grammar(
            self.source.text,
            self.source.lexer_rules,
            tuple(names),
            ("the whole text", *(rule.name for rule in kept)),
            tuple(productions),
            tuple(lexemes),
            tuple(precedence),
            tuple(associativity),
        )


def key_of(symbol: Symbol) -> tuple[str, str]:
    """The kind and the text of a symbol. All uses of a symbol have the same key."""
    return symbol.kind, symbol.text
