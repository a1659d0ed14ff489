"""Small languages by hypothesis, each with a reference that knows nothing of the guest: Python's
``re``, or AICI's lexer before an Earley parser."""

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
    """A language, as far as texts of ``longest`` bytes."""

    longest: int

    def allows(self, text: bytes) -> bool:
        """Whether a text can go on, or is one of the language."""

    def complete(self, text: bytes) -> bool:
        """Whether a text is one of the language."""


class Matches:
    """The texts that ``re`` matches whole.

    Every text over some letters is tried. Its characters are at most ``longest`` and the number of
    positions of the pattern. A shortest way to a match passes no position twice, so a prefix that
    none of these texts has is not one of a match.
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
        """As ``Reference`` says."""
        return text in self._prefixes

    def complete(self, text: bytes) -> bool:
        """As ``Reference`` says."""
        return text in self._whole


class Lexeme(NamedTuple):
    """The notation of a terminal of a grammar: a keyword, or a regular expression."""

    pattern: str
    is_keyword: bool

    @property
    def written(self) -> str:
        """The pattern as it stands in a grammar."""
        return self.pattern.replace("\n", "\\n")

    def __str__(self) -> str:
        return f'"{self.written}"' if self.is_keyword else f'"/{self.written}/"'


@dataclass(frozen=True)
class _Place:
    sets: list[set[Item]]
    lexeme: bytes


class Lexed:
    """AICI's lexer before an Earley parser: the longest match up to the byte that no lexeme goes on
    with; and a byte is refused where no lexeme that can still come of it is one that the parser can
    take. Keywords are preferred. Among the others it is the longest as written, and a newline comes
    before the text where one could; with ``declared`` it is the first, and no newline comes.

    Lexemes are judged by ``re`` over all texts of the first two letters up to ``MORE`` beyond
    ``longest``; those that SKIP matches have the third letter too.
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
        """``skip`` is a regular expression; ``lexemes`` are in the order of the grammar's text,
        after SKIP."""
        self.longest = longest
        self._earley = Earley(rules, "S")
        newline = "\n" in letters and not declared
        regexes = {SKIP: Lexeme(skip, False)} if skip is not None else {}
        regexes |= {name: lexeme for name, lexeme in lexemes.items() if not lexeme.is_keyword}
        preferred = list(regexes)
        if not declared:
            preferred.sort(key=lambda name: -len(regexes[name].written.encode()))
        # The last to name a word wins.
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
        """As ``Reference`` says."""
        return self._at(text) is not None

    def complete(self, text: bytes) -> bool:
        """As ``Reference`` says."""
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


# --- what is tried ------------------------------------------------------------------------------


class Case(NamedTuple):
    """Tables, a vocabulary, and what is true of them."""

    source: str
    tables: bytes
    vocabulary: TokenizerVocabulary
    reference: Reference
    depth: int
    """Bytes of the longest text whose mask the reference can tell."""

    def __repr__(self) -> str:
        tokens = [self.vocabulary.token(number) for number in range(self.vocabulary.size)]
        return f"{self.source!r} over {tokens}, the end of the text {self.vocabulary.eos}"


@st.composite
def vocabularies(draw: st.DrawFn, letters: str, longest: int) -> TokenizerVocabulary:
    """Pieces of texts over some letters, cut anywhere, of at most ``longest`` bytes; some twice,
    some special, some that nothing has; with an end of the text or without."""
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
    """Small regular expressions over one, two and three bytes a letter."""
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
    """Rules and lexemes as a grammar's text."""
    lines = ["%start S", *(["%lexer declared"] if declared else []), "%%"]
    lines += [f"SKIP: {Lexeme(skip, False)};"] if skip else []
    for name, alternatives in rules.items():
        sides = (" ".join(str(lexemes.get(symbol, symbol)) for symbol in a) for a in alternatives)
        lines.append(f"{name}: {' | '.join(side or '%empty' for side in sides)};")
    return "\n".join(lines)


@st.composite
def grammar_cases(draw: st.DrawFn) -> Case:
    """Small grammars: rules by hypothesis, over keywords and regular expressions that begin and
    contain one another, with and without SKIP, under both rule sets of the lexer. Those with
    conflicts are left out, as what they resolve to is not what Earley says."""
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
    """The rules that the start rule needs, without alternatives that derive no text; {} where the
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
        # The last one matches all that an earlier one does, and is written longer.
        inner, outer = chosen[regular[0]].pattern, chosen[regular[-1]].pattern
        wider = draw(st.sampled_from([f"(?:{inner})|{outer}", f"(?:{inner})"]))
        if spelled_out(tree_of(wider, Budget(1000, 5))) <= 4:
            chosen[regular[-1]] = Lexeme(wider, False)
    return dict(zip(names, chosen, strict=True))


def raw_vocabulary(tokens: Sequence[bytes], eos: Sequence[int] = (0,)) -> TokenizerVocabulary:
    """A vocabulary of raw tokens."""
    return TokenizerVocabulary.from_tokens(tokens, eos, "raw tokens of a test")
