"""Compiles a grammar or a regular expression of the library or of a file.

``Recognizer`` and ``Dfa`` interpret the compiled tables in Python. They are the *reference*: the
masks of the grammar backend are compared with their results.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from ...grammars import library
from ...grammars.regex import Dfa, RegexError, compile_regex
from ...grammars.yacc import (
    Compilation,
    GrammarError,
    Recognizer,
    Refusal,
    check_text,
    compile_grammar,
)
from .module_files import FileFault
from .source_places import Lines

SUFFIXES = (".y", ".rx")
"""Suffixes of the files of grammars and of regular expressions."""
END = "the end of the text"
EXCLUDED = 10
"""If at most this number of printable ASCII characters are not in a set, the description of the set
lists them."""

_PRINTED = range(0x20, 0x7F)


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a grammar or of a regular expression. ``kind`` is ``y`` or ``rx``."""

    name: str
    kind: str
    text: str


class Language(Protocol):
    """The interface of a compiled grammar and of a compiled regular expression."""

    source: Source
    seconds: float
    """The time of the compilation, in seconds."""

    @property
    def tables(self) -> bytes:
        """The compiled tables for the grammar backend."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by name, such as the number of parser states."""

    @property
    def notes(self) -> list[str]:
        """Conflicts and warnings, such as lexemes that never match."""

    def wrong_at(self, text: bytes) -> int | None:
        """None if the text is accepted. If not, the index of the first byte that may not follow the
        bytes before it, or the text's length if the text ends too early."""

    def expected(self, beginning: bytes) -> tuple[str, ...]:
        """The lexemes that may follow ``beginning``, the beginning of a text. For a regular
        expression, the result describes the characters that may follow."""


def library_sources() -> list[Source]:
    """The sources of all grammars and regular expressions of the library."""
    found = [(name, kind) for kind in ("y", "rx") for name in library.names(kind)]
    return [_of_library(name, kind) for name, kind in found]


def title(source: Source) -> str:
    """Describes a source of the library in one line. The line is the heading of the source's
    Markdown file, without the name."""
    page = files(library) / f"{source.name}.md"
    return page.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]


def read_source(name: str) -> Source:
    """Reads a source. If ``name`` ends with .y or .rx, or contains a /, the source is this file.
    Any other name is a source of the library. Raises FileFault if the source does not exist or
    cannot be read."""
    if "/" not in name and not name.endswith(SUFFIXES):
        for kind in ("y", "rx"):
            if name in library.names(kind):
                return _of_library(name, kind)
        known = ", ".join(each.name for each in library_sources())
        raise FileFault(
            f"unknown grammar {name!r}: the library has {known}; the name of a file must end with "
            ".y (a grammar) or .rx (a regular expression)"
        )
    if not name.endswith(SUFFIXES):
        raise FileFault(
            f"{name}: the name of a file must end with .y (a grammar) or .rx (a regular expression)"
        )
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise FileFault(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileFault(f"{name} is not valid UTF-8 at byte {error.start}") from None
    return Source(name, name.rpartition(".")[2], text)


def compiled(source: Source) -> Language:
    """Compiles a source. Raises FileFault with the place and the line of an error in the source."""
    return _Grammar(source) if source.kind == "y" else _Regex(source)


def refusal(language: Language, text: bytes, wrong_at: int) -> Refusal:
    """The refusal of a text at the character that contains the byte ``wrong_at`` (see
    ``Language.wrong_at``)."""
    start = _character(text, wrong_at)
    line, column = Lines(text).place(start)
    found = text[start : start + 4].decode(errors="replace")[:1]
    return Refusal(start, line, column, found, language.expected(text[:start]))


def _of_library(name: str, kind: str) -> Source:
    file = files(library) / f"{name}.{kind}"
    return Source(name, kind, file.read_text(encoding="utf-8"))


def _character(text: bytes, at: int) -> int:
    """The index of the first byte of the character that contains the byte ``at``. If the text
    around this byte is not valid UTF-8, the result is ``at``."""
    if at == len(text):
        return at
    for start in range(at - 1, max(at - 4, -1), -1):
        for end in range(at + 1, start + 5):
            try:
                if len(text[start:end].decode()) == 1:
                    return start
            except UnicodeDecodeError:
                continue
    return at


def _fault(source: Source, message: str, line: int, column: int) -> FileFault:
    if not line:
        return FileFault(f"{source.name}: {message}")
    pointed = Lines(source.text.encode()).pointed(line, column)
    return FileFault(f"{source.name}:{line}:{column}: {message}{pointed}")


# --- grammars -------------------------------------------------------------------------------------


class _Grammar:
    """A grammar in AICI's format."""

    def __init__(self, source: Source) -> None:
        self.source = source
        started = time.perf_counter()
        try:
            self._compilation: Compilation = compile_grammar(source.text)
        except GrammarError as error:
            raise _fault(source, error.message, error.line, error.column) from None
        self.seconds = time.perf_counter() - started

    @cached_property
    def tables(self) -> bytes:
        return self._compilation.grammar.to_bytes()

    @property
    def sizes(self) -> dict[str, int]:
        grammar = self._compilation.grammar
        # The compiler adds a terminal for the end of the text, and a rule for the whole text. These
        # two symbols and the rule's alternative are not in the grammar's file, so they are not
        # counted.
        return {
            "terminals": grammar.num_terminals - 1,
            "rules": grammar.num_nonterminals - 1,
            "alternatives": len(grammar.lhs) - 1,
            "parser states": grammar.num_states,
            "lexer states": grammar.num_lexer_states,
        }

    @property
    def notes(self) -> list[str]:
        return [*map(str, self._compilation.conflicts), *self._compilation.warnings]

    def wrong_at(self, text: bytes) -> int | None:
        found = check_text(self._compilation.grammar, text)
        return None if found is None else found.offset

    def expected(self, beginning: bytes) -> tuple[str, ...]:
        recognizer = Recognizer(self._compilation.grammar)
        recognizer.read(beginning)
        return recognizer.expected()


# --- regular expressions --------------------------------------------------------------------------


class _Regex:
    """A regular expression. ``joined`` reads its file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.notes: list[str] = []
        pattern, places = joined(source.text)
        started = time.perf_counter()
        try:
            self._dfa: Dfa = compile_regex(pattern)
        except RegexError as error:
            line, column = places[error.position] if error.position is not None else (0, 0)
            raise _fault(source, error.message, line, column) from None
        self.seconds = time.perf_counter() - started

    @cached_property
    def tables(self) -> bytes:
        return self._dfa.to_bytes()

    @property
    def sizes(self) -> dict[str, int]:
        return {"states": self._dfa.num_states, "classes of bytes": self._dfa.num_classes}

    def wrong_at(self, text: bytes) -> int | None:
        state = self._dfa.start
        for at, byte in enumerate(text):
            state = self._dfa.step(state, byte)
            if not state:
                return at
        return None if self._dfa.accepting[state] else len(text)

    def expected(self, beginning: bytes) -> tuple[str, ...]:
        state = self._dfa.walk(beginning)
        allowed = {byte for byte in range(256) if self._dfa.step(state, byte)}
        names = list(_characters(allowed))
        if self._dfa.accepting[state]:
            names.append(END)
        return tuple(names)


def joined(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Reads the pattern in the text of a file. Returns the pattern, and the line and column of each
    of its characters and of its end. Lines are stripped and joined. Lines that begin with ``#`` are
    left out."""
    pattern, places = "", [(1, 1)]
    for number, line in enumerate(text.splitlines(), 1):
        kept = line.strip()
        if kept and not kept.startswith("#"):
            first = len(line) - len(line.lstrip()) + 1
            places[-1:] = [(number, first + i) for i in range(len(kept) + 1)]
            pattern += kept
    return pattern, places


def _characters(allowed: set[int]) -> Iterable[str]:
    """Describes the characters whose first byte is in ``allowed``, as ranges or as all characters
    except a few."""
    beyond = any(byte >= 0xC2 for byte in allowed)
    printed = [byte for byte in _PRINTED if byte in allowed]
    if len(printed) >= len(_PRINTED) - EXCLUDED:
        others = "".join(chr(byte) for byte in _PRINTED if byte not in allowed)
        kind = "any character" if beyond else "any ASCII character"
        yield f"{kind} but {' '.join(map(_quoted, others))}" if others else kind
        return
    yield from (_quoted(chr(byte)) for byte in sorted(allowed) if byte < 0x20 or byte == 0x7F)
    for first, last in _runs(printed):
        if last - first < 2:
            yield from (_quoted(chr(byte)) for byte in range(first, last + 1))
        else:
            yield f"{chr(first)}-{chr(last)}"
    if beyond:
        yield "a character beyond ASCII"
    elif any(0x80 <= byte < 0xC0 for byte in allowed):
        yield "the rest of a character"


def _runs(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """Combines sorted character codes into ranges. A range does not mix digits, upper case, lower
    case and other characters."""
    first = 0
    for place, number in enumerate(numbers):
        last = place + 1 == len(numbers)
        if last or numbers[place + 1] != number + 1 or _kind(number) != _kind(number + 1):
            yield numbers[first], number
            first = place + 1


def _kind(byte: int) -> int:
    character = chr(byte)
    return character.isdigit() + 2 * character.islower() + 4 * character.isupper()


def _quoted(character: str) -> str:
    """A character in quotes, in the form in which grammars name keywords."""
    escaped = character.encode("unicode_escape").decode()
    return "'\"'" if character == '"' else f'"{escaped}"'
