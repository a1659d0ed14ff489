"""Compiles patterns and lexers to tables, within limits on states and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .blame import grown
from .bounds import MAX_PATTERN_CHARACTERS, Budget, Exhausted, RegexError
from .dfa import Dfa, LexerDfa, lexer_table, table
from .minimize import minimise
from .positions import positions_of, spelled_out
from .subsets import determinise
from .syntax import too_deep
from .tree import Alternation, Tree, literal_tree, tree_of
from .utf8 import ByteAutomaton, to_bytes

_BLAME_SHARE = 0.2
"""If a limit is exceeded, the search for the part that is too large may take this share of
``max_seconds``."""


@dataclass(frozen=True)
class Lexeme:
    """One lexeme of a lexer: a regular expression, or a literal text."""

    name: str
    pattern: str
    literal: bool


def compile_regex(pattern: str, *, max_states: int = 20_000, max_seconds: float = 5.0) -> Dfa:
    """The minimal automaton over bytes that accepts the UTF-8 of every full match of the pattern.

    ``max_states``: the maximum number of states at each step of the compilation. ``max_seconds``:
    the maximum CPU time of this thread. Raises RegexError if the pattern is not valid, uses an
    unsupported construct, does not match any text, or exceeds a limit. If a limit is exceeded, the
    message names the part that is too large.
    """
    budget = Budget(max_states, max_seconds * (1 - _BLAME_SHARE))
    tree: Tree | None = None
    try:
        tree = tree_of(pattern, budget)
        return table(_automaton([tree], budget))
    except Exhausted as over:
        part = tree and grown(tree, max_states, max_seconds * _BLAME_SHARE, over)
        why = f": {part.description(pattern)}" if part else ""
        raise RegexError(
            f"the pattern {over.what}{why}", pattern, part.part.start if part else None
        ) from None
    except RecursionError:
        raise too_deep(pattern) from None


def compile_choice(
    texts: Sequence[str], *, max_states: int = 100_000, max_seconds: float = 5.0
) -> Dfa:
    """The automaton of a choice of literal texts. It matches exactly these texts.

    Raises RegexError if ``texts`` is empty, exceeds the limits, or contains a lone surrogate.
    """
    if not texts:
        raise RegexError("the choice has 0 texts; it must have at least 1", "")
    length = sum(map(len, texts))
    if length > MAX_PATTERN_CHARACTERS:
        raise RegexError(
            f"the texts have {length:,} characters; at most {MAX_PATTERN_CHARACTERS:,} are allowed",
            texts[0],
        )
    budget = Budget(max_states, max_seconds)
    trees = [literal_tree(text) for text in dict.fromkeys(texts)]
    try:
        return table(_automaton([Alternation(0, length, tuple(trees))], budget))
    except Exhausted as over:
        raise RegexError(f"the choice of {len(texts):,} texts {over.what}", texts[0]) from None


def compile_lexer(
    lexemes: Sequence[Lexeme], *, max_states: int = 50_000, max_seconds: float = 20.0
) -> LexerDfa:
    """The minimal automaton of a lexer. For each text, it finds all lexemes that match the text.

    If a lexeme matches the empty text, the start state accepts. The caller decides whether this is
    an error. Limits and errors are the same as for ``compile_regex``. If one lexeme is faulty, the
    error has the pattern of the lexeme, and the message has its name.
    """
    budget = Budget(max_states, max_seconds * (1 - _BLAME_SHARE))
    length = sum(len(lexeme.pattern) for lexeme in lexemes)
    if not lexemes or length > MAX_PATTERN_CHARACTERS:
        raise RegexError(
            f"the lexer has {len(lexemes):,} lexemes with {length:,} characters in total; it must "
            f"have at least 1 lexeme and at most {MAX_PATTERN_CHARACTERS:,} characters",
            "",
        )
    trees: list[Tree] = []
    try:
        trees.extend(_lexeme_tree(lexeme, budget) for lexeme in lexemes)
        automaton = _automaton(trees, budget)
    except Exhausted as over:
        raise _blamed(lexemes, trees, over, max_states, max_seconds * _BLAME_SHARE) from None
    except RecursionError:
        raise too_deep(max((one.pattern for one in lexemes), key=len)) from None
    order = sorted(range(len(lexemes)), key=lambda number: not lexemes[number].literal)
    return lexer_table(automaton, order)


def _lexeme_tree(lexeme: Lexeme, budget: Budget) -> Tree:
    try:
        if lexeme.literal:
            return literal_tree(lexeme.pattern)
        return tree_of(lexeme.pattern, budget)
    except RegexError as error:
        message = f"lexeme {lexeme.name}: {error.message}"
        raise RegexError(message, error.pattern, error.position) from None


def _blamed(
    lexemes: Sequence[Lexeme],
    trees: list[Tree],
    over: Exhausted,
    max_states: int,
    seconds: float,
) -> RegexError:
    """The error for a lexer that exceeds a limit. If one lexeme alone is too large, the message
    names the lexeme and the part of it that is too large."""
    end = Budget(max_states, seconds)
    if len(trees) < len(lexemes):
        lexeme = lexemes[len(trees)]
        return RegexError(f"the lexer up to lexeme {lexeme.name} {over.what}", lexeme.pattern)
    order = sorted(range(len(trees)), key=lambda number: spelled_out(trees[number]), reverse=True)
    for number in order:
        lexeme = lexemes[number]
        part = grown(trees[number], max_states, seconds / 2)
        if part:
            description = part.description(lexeme.pattern)
            return RegexError(
                f"the lexer {over.what}: lexeme {lexeme.name}: {description}",
                lexeme.pattern,
                part.part.start,
            )
        try:
            end.check()
        except Exhausted:
            break
    largest = ", ".join(lexemes[number].name for number in order[:3])
    return RegexError(
        f"the lexer {over.what} for {len(lexemes):,} lexemes; the longest lexemes are {largest}",
        lexemes[order[0]].pattern,
    )


def _automaton(trees: Sequence[Tree], budget: Budget) -> ByteAutomaton:
    """Runs all steps from syntax trees to an automaton over bytes."""
    positions = positions_of(trees, budget)
    smallest = minimise(determinise(positions, budget), budget)
    automaton = to_bytes(smallest, budget)
    budget.check()
    return automaton
