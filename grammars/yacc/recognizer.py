"""Checks byte by byte whether a text can still become a sentence of a grammar.

This recognizer is the reference for the guest engine. As in AICI, the lexer and the parser advance
together after each byte. If a byte leads the lexer to its dead state, the lexeme ends before this
byte, and the byte begins the next lexeme. A byte is refused at once if the parser cannot accept any
of the lexemes that the lexer can still match. For example, after ``int `` the ``1`` of ``123456``
is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from .compiled import CompiledGrammar
from .grammar import END, SKIP
from .parser import Parser, Stack
from .tables import set_bits

NAMED = 12
"""Maximum number of expected lexemes in a message."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The place at which a text is refused: after its first ``offset`` bytes. ``line`` and
    ``column`` count from 1, and columns count characters.

    ``found`` is the character that cannot follow, or "" at the end of a text that is not complete.
    ``expected`` has the names of the lexemes that can follow.
    """

    offset: int
    line: int
    column: int
    found: str
    expected: tuple[str, ...]

    def __str__(self) -> str:
        found = f"{self.found!r} cannot follow" if self.found else "the text ends here"
        named = ", ".join(self.expected[:NAMED])
        if len(self.expected) > NAMED:
            named += f" or one of {len(self.expected) - NAMED} more"
        return f"line {self.line}, column {self.column}: {found}; expected {named}"


@dataclass(frozen=True, slots=True)
class Place:
    """The states of the parser (its stack) and of the lexer. They determine how the text can
    continue."""

    stack: Stack
    lexer: int


class Recognizer:
    """Recognizes one text under one grammar.

    ``byte`` adds a byte; ``copy`` is cheap. A refused byte does not change the recognizer.
    """

    def __init__(self, grammar: CompiledGrammar, parser: Parser | None = None) -> None:
        self.grammar = grammar
        self._parser = parser or Parser(grammar)
        self.place = Place(self._parser.start, grammar.lexer_first)
        """The place of the text so far. If two texts are at equal places, they can be continued in
        the same ways."""

    def copy(self) -> Recognizer:
        """Another recognizer at the same place."""
        other = Recognizer(self.grammar, self._parser)
        other.place = self.place
        return other

    def byte(self, byte: int) -> bool:
        """Adds a byte (0 to 255); returns False if the byte cannot follow."""
        place = self._after(self.place, self.grammar.classes[byte])
        if place is None:
            return False
        self.place = place
        return True

    def read(self, text: bytes) -> int:
        """Adds bytes, and stops before the first byte that cannot follow. Returns the number of
        added bytes."""
        for count, byte in enumerate(text):
            if not self.byte(byte):
                return count
        return len(text)

    def allowed_bytes(self) -> bytes:
        """The bytes that can follow, in order."""
        classes = self.grammar.classes
        fits = [
            self._after(self.place, number) is not None
            for number in range(self.grammar.num_classes)
        ]
        return bytes(byte for byte in range(256) if fits[classes[byte]])

    @property
    def complete(self) -> bool:
        """Whether the text so far is a sentence of the grammar. Lexemes of SKIP may stand at its
        end."""
        stack = self._ended(self.place)
        return stack is not None and bool(self._parser.viable(stack) >> END & 1)

    def expected(self) -> tuple[str, ...]:
        """The names of the expected lexemes. A lexeme is expected if the unfinished lexeme at the
        end of the text can still become it. If the unfinished lexeme can end here, the lexemes that
        can follow are expected too. SKIP is expected only if the unfinished lexeme can still become
        SKIP."""
        place = self.place
        wanted = 0
        if place.lexer != self.grammar.lexer_start:
            wanted = self.grammar.reachable[place.lexer] & self._open(place.stack)
            if self.grammar.accepted[place.lexer] >= 0:
                wanted &= ~(1 << self.grammar.accepted[place.lexer])
        ended = self._ended(place)
        if ended is not None:
            wanted |= self._parser.viable(ended)
        names = [self.grammar.terminals[terminal] for terminal in set_bits(wanted)]
        if names and wanted & 1 << END:
            names = [*names[1:], names[0]]
        return tuple(names) or (f"more of {self._unfinished()}",)

    def _unfinished(self) -> str:
        place = self.place
        open_ones = self.grammar.reachable[place.lexer] & self._open(place.stack)
        return " or ".join(self.grammar.terminals[terminal] for terminal in set_bits(open_ones))

    def _open(self, stack: Stack) -> int:
        return self._parser.viable(stack) | 1 << SKIP

    def _ended(self, place: Place) -> Stack | None:
        """The stack after the current lexeme; None if the lexeme is unfinished or the parser cannot
        accept it."""
        if place.lexer == self.grammar.lexer_start:
            return place.stack
        terminal = self.grammar.accepted[place.lexer]
        if terminal < 0:
            return None
        return place.stack if terminal == SKIP else self._parser.push(place.stack, terminal)

    def _after(self, place: Place, byte_class: int) -> Place | None:
        """The place after a byte of a class; None if the byte cannot follow."""
        grammar = self.grammar
        lexer = grammar.transitions[place.lexer * grammar.num_classes + byte_class]
        if lexer:
            if grammar.reachable[lexer] & self._open(place.stack):
                return Place(place.stack, lexer)
            return None
        if place.lexer == grammar.lexer_start:
            return None
        stack = self._ended(place)
        if stack is None:
            return None
        return self._after(Place(stack, grammar.lexer_start), byte_class)


def check_text(grammar: CompiledGrammar, text: bytes) -> Refusal | None:
    """The place at which a complete text is refused; None if the text is a sentence of the
    grammar."""
    recognizer = Recognizer(grammar)
    count = recognizer.read(text)
    if count == len(text) and recognizer.complete:
        return None
    before = text[:count].decode(errors="replace")
    line_start = before.rfind("\n") + 1
    found = text[count:].decode(errors="replace")[:1]
    return Refusal(
        count, before.count("\n") + 1, len(before) - line_start + 1, found, recognizer.expected()
    )
