"""Small languages that hypothesis draws, each with a reference that is independent of the grammar
backend: Python's ``re``, or AICI's lexer and an Earley parser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from hypothesis import assume
from hypothesis import strategies as st
from tokenbus.grammars.regex import compile_regex
from tokenbus.grammars.regex.bounds import Budget
from tokenbus.grammars.regex.positions import spelled_out
from tokenbus.grammars.regex.tree import tree_of
from tokenbus.grammars.yacc import GrammarError, compile_grammar
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from tests.grammars.earley import Earley, Item, Rules
from tests.grammars.patterns import narrow_patterns, prefixes, texts_over
from tests.grammars.test_yacc_language import ALPHABET, rule_sets

SKIP = "SKIP"


# --- references ---------------------------------------------------------------------------------


class Reference(Protocol):
    """A language. The reference can answer for texts of at most ``longest`` bytes."""

    longest: int

    def allows(self, text: bytes) -> bool:
        """Whether a text is in the language, or is the beginning of a text of the language."""

    def complete(self, text: bytes) -> bool:
        """Whether a text is in the language."""


class Matches:
    """The texts that match a regular expression of ``re`` as a whole.

    Every text over some letters is tried. The number of characters is at most ``longest`` plus the
    number of positions of the pattern. A shortest completion passes each position at most once. So
    if no matching text among them has a given prefix, no match of any length has this prefix.
    """

    def __init__(self, pattern: str, letters: str, longest: int) -> None:
        positions = spelled_out(tree_of(pattern, Budget(1000, 5)))
        narrowest = min(len(letter.encode()) for letter in letters)
        every = _texts_over(letters, -(-longest // narrowest) + positions)
        matched = [text for text in every if re.fullmatch(pattern, text)]
        self.longest = longest
        self._prefixes = prefixes(matched)
        self._whole = {text.encode() for text in matched}

    def allows(self, text: bytes) -> bool:
        return text in self._prefixes

    def complete(self, text: bytes) -> bool:
        return text in self._whole


class Lexeme(NamedTuple):
    """The notation of a terminal of a grammar: a keyword, or a regular expression."""

    pattern: str
    is_keyword: bool

    @property
    def written(self) -> str:
        """The pattern in the notation of a grammar."""
        return self.pattern.replace("\n", "\\n")

    def __str__(self) -> str:
        return f'"{self.written}"' if self.is_keyword else f'"/{self.written}/"'


@dataclass(frozen=True)
class _Place:
    sets: list[set[Item]]
    lexeme: bytes


class Lexed:
    """AICI's lexer and an Earley parser.

    A lexeme ends before the first byte that continues no lexeme. A byte is refused if the parser
    accepts none of the lexemes that the bytes so far can become. If several terminals match, a
    keyword is preferred, then the regular expression with the longest notation. If a lexeme may
    begin with a newline, the lexer inserts a newline before the text. With ``declared``, the first
    regular expression is preferred, and no newline is inserted.

    ``re`` finds the lexemes among all texts of the first two letters with at most ``longest`` plus
    ``MORE`` characters. Lexemes of SKIP may also contain the third letter.
    """

    MORE = 3

    def __init__(
        self,
        rules: Rules,
        lexemes: dict[str, Lexeme],
        skip: str | None,
        letters: str,
        longest: int,
        declared: bool,
    ) -> None:
        """``skip`` is a regular expression. ``lexemes`` are in the order of the grammar's text, in
        which SKIP comes first."""
        self.longest = longest
        self._earley = Earley(rules, "S")
        newline = "\n" in letters and not declared
        regexes = {SKIP: Lexeme(skip, False)} if skip is not None else {}
        regexes |= {name: lexeme for name, lexeme in lexemes.items() if not lexeme.is_keyword}
        preferred = list(regexes)
        if not declared:
            preferred.sort(key=lambda name: -len(regexes[name].written.encode()))
        # If several terminals match a word, the last one in this loop is chosen.
        self._terminal: dict[bytes, str] = {}
        for name in reversed(preferred):
            pattern = regexes[name].pattern
            if name == SKIP:
                matched = _skipped(pattern, letters, longest + newline + 1)
            else:
                words = _texts_over(letters[:2], longest + newline + self.MORE)
                matched = [word for word in words if re.fullmatch(pattern, word)]
            self._terminal |= dict.fromkeys((word.encode() for word in matched), name)
        for name, lexeme in lexemes.items():
            if lexeme.is_keyword:
                self._terminal[lexeme.pattern.encode()] = name
        self._reachable: dict[bytes, set[str]] = {}
        for word, name in self._terminal.items():
            for size in range(1, min(len(word), longest + newline) + 1):
                self._reachable.setdefault(word[:size], set()).add(name)
        begin = self._earley.begin()
        viable = self._earley.next(begin) | {SKIP}
        before = b"\n" if newline and self._reachable.get(b"\n", set()) & viable else b""
        self._places: dict[bytes, _Place | None] = {b"": _Place(begin, before)}

    def allows(self, text: bytes) -> bool:
        return self._at(text) is not None

    def complete(self, text: bytes) -> bool:
        place = self._at(text)
        sets = self._ended(place) if place else None
        return sets is not None and self._earley.complete(sets)

    def _at(self, text: bytes) -> _Place | None:
        if text not in self._places:
            before = self._at(text[:-1])
            self._places[text] = before and self._after(before, text[-1:])
        return self._places[text]

    def _ended(self, place: _Place) -> list[set[Item]] | None:
        if not place.lexeme:
            return place.sets
        terminal = self._terminal.get(place.lexeme)
        if terminal is None or terminal == SKIP:
            return place.sets if terminal else None
        after = self._earley.after(place.sets, terminal)
        return after if after[-1] else None

    def _after(self, place: _Place, byte: bytes) -> _Place | None:
        longer = place.lexeme + byte
        if longer in self._reachable:
            viable = self._earley.next(place.sets) | {SKIP}
            return _Place(place.sets, longer) if self._reachable[longer] & viable else None
        ended = self._ended(place) if place.lexeme else None
        return None if ended is None else self._after(_Place(ended, b""), byte)


@cache
def _texts_over(letters: str, longest: int) -> list[str]:
    return texts_over(letters, longest)


@cache
def _skipped(skip: str, letters: str, longest: int) -> list[str]:
    return [text for text in _texts_over(letters, longest) if re.fullmatch(skip, text)]


# --- cases --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A language: compiled tables, a vocabulary, and a reference."""

    source: str
    tables: bytes
    vocabulary: TokenizerVocabulary
    reference: Reference
    depth: int
    """The number of bytes of the longest text whose mask the reference can compute."""

    def __repr__(self) -> str:
        tokens = [self.vocabulary.token(number) for number in range(self.vocabulary.size)]
        return f"{self.source!r} over {tokens}, the end of the text {self.vocabulary.eos}"


@st.composite
def vocabularies(draw: st.DrawFn, letters: str, longest: int) -> TokenizerVocabulary:
    """Vocabularies of pieces of texts over some letters, of at most ``longest`` bytes, which may
    begin or end inside a character. Some tokens occur twice, some are special, some occur in no
    text. The token that ends a text may be missing."""
    texts = st.text(st.sampled_from(letters), min_size=1, max_size=longest)
    cuts = st.builds(
        lambda text, start: text.encode()[start:][:longest] or text.encode()[:1],
        texts,
        st.integers(0, 2),
    )
    tokens = draw(st.lists(cuts, min_size=2, max_size=12))
    if draw(st.integers(0, 3)):
        tokens += [bytes((byte,)) for byte in sorted(set(letters.encode()))]
    tokens += draw(st.lists(st.sampled_from(tokens), max_size=3))
    tokens += draw(st.lists(st.sampled_from([b"", b"\xff", b"q", b"\xc3", b"\n"]), max_size=3))
    tokens = draw(st.permutations(tokens))
    tokens += [b""] * draw(st.sampled_from([0, 1, 32 - len(tokens) % 32, 128 - len(tokens)]))
    eos = draw(st.none() | st.integers(0, len(tokens) - 1))
    return raw_vocabulary(tokens, () if eos is None else (eos,))


@st.composite
def regex_cases(draw: st.DrawFn) -> Case:
    """Small regular expressions over letters of one, two and three bytes."""
    letters = draw(st.sampled_from(["ab", "a\u00e9", "\u00e9\u00ea\u6f22"]))
    depth, token = 4, 6 if len(letters) == 3 else 4
    most = 5 if letters == "ab" else 4
    narrow = narrow_patterns(letters)
    few = st.text(st.sampled_from(letters), min_size=1, max_size=2)
    again = st.builds("{}(?:{})*{}".format, narrow, few, narrow)
    pattern = draw(narrow | again)
    assume(spelled_out(tree_of(pattern, Budget(1000, 5))) <= most)
    reference = Matches(pattern, letters, depth + token)
    tables = compile_regex(pattern).to_bytes()
    return Case(pattern, tables, draw(vocabularies(letters, token)), reference, depth)


def written(
    rules: Rules, lexemes: dict[str, Lexeme], skip: str | None, *, declared: bool = False
) -> str:
    """The text of a grammar with these rules and lexemes."""
    lines = ["%start S", *(["%lexer declared"] if declared else []), "%%"]
    lines += [f"SKIP: {Lexeme(skip, False)};"] if skip else []
    for name, alternatives in rules.items():
        sides = (" ".join(str(lexemes.get(symbol, symbol)) for symbol in a) for a in alternatives)
        lines.append(f"{name}: {' | '.join(side or '%empty' for side in sides)};")
    return "\n".join(lines)


@st.composite
def grammar_cases(draw: st.DrawFn) -> Case:
    """Small grammars that hypothesis draws. A keyword or regular expression often begins with
    another one or contains it. A case may have SKIP, and has one of the lexer's two rule sets.
    Grammars with conflicts are excluded, because an Earley parser does not resolve conflicts."""
    letters = draw(st.sampled_from(["ab ", "ab\n", "a\n ", "a\u00e9 "]))
    depth, token = (4, 4) if "\n" not in letters else (4, 3)
    declared = draw(st.booleans())
    rules = _useful(draw(rule_sets()))
    assume(rules)
    used = [s for alternatives in rules.values() for a in alternatives for s in a if s in ALPHABET]
    lexemes = draw(_lexemes(letters, list(dict.fromkeys(used))))
    x, y, z = letters[0], letters[1], letters[2]
    skips = [None, z, f"{z}+", f"{z}{y}?", f"{z}{x}*{z}", f"{y}?{z}"]
    skip = draw(st.sampled_from(skips))
    source = written(rules, lexemes, skip, declared=declared)
    try:
        compilation = compile_grammar(source)
    except GrammarError:
        assume(False)
    assume(not compilation.conflicts)
    reference = Lexed(rules, lexemes, skip, letters, depth + token, declared)
    tables = compilation.grammar.to_bytes()
    return Case(source, tables, draw(vocabularies(letters, token)), reference, depth)


def _useful(rules: Rules) -> Rules:
    """The rules that the start rule needs, without alternatives that derive no text; {} if the
    start rule derives none."""
    ends: set[str] = set()
    while more := {
        name
        for name, alternatives in rules.items()
        if name not in ends
        and any(all(s in ends or s not in rules for s in a) for a in alternatives)
    }:
        ends |= more
    kept = {
        name: [a for a in rules[name] if all(s in ends or s not in rules for s in a)]
        for name in rules
        if name in ends
    }
    waiting = ["S"] if "S" in kept else []
    for name in waiting:
        waiting += {s for a in kept[name] for s in a if s in kept and s not in waiting}
    return {name: alternatives for name, alternatives in kept.items() if name in waiting}


@st.composite
def _lexemes(draw: st.DrawFn, letters: str, names: list[str]) -> dict[str, Lexeme]:
    few = letters[:2]
    keywords = st.text(st.sampled_from(few), min_size=1, max_size=3) | st.just(" ".join(few))
    regexes = narrow_patterns(few).filter(
        lambda pattern: (
            not re.fullmatch(pattern, "") and spelled_out(tree_of(pattern, Budget(1000, 5))) <= 3
        )
    )
    regex = st.builds(Lexeme, regexes, st.just(False))
    one = regex | regex | st.builds(Lexeme, keywords, st.just(True))
    size = len(names)
    chosen = draw(st.lists(one, min_size=size, max_size=size, unique_by=lambda o: str(o)))
    regular = [at for at, lexeme in enumerate(chosen) if not lexeme.is_keyword]
    if len(regular) > 1 and draw(st.integers(0, 3)):
        # The last lexeme matches all texts of an earlier one, and has a longer notation.
        inner, outer = chosen[regular[0]].pattern, chosen[regular[-1]].pattern
        wider = draw(st.sampled_from([f"(?:{inner})|{outer}", f"(?:{inner})"]))
        if spelled_out(tree_of(wider, Budget(1000, 5))) <= 4:
            chosen[regular[-1]] = Lexeme(wider, False)
    return dict(zip(names, chosen, strict=True))


def raw_vocabulary(tokens: Sequence[bytes], eos: Sequence[int] = (0,)) -> TokenizerVocabulary:
    """A vocabulary of raw tokens."""
    return TokenizerVocabulary.from_tokens(tokens, eos, "raw tokens of a test")
