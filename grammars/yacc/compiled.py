"""A compiled grammar: its parse tables and lexer, and their binary form.

``CompiledGrammar.to_bytes`` is the form that the guest engine reads and that is cached on disk. The
form is little-endian throughout. A header of 64 bytes:

     0  4s   magic "TBYG"
     4  u32  version, 3
     8  u32  total bytes
    12  u32  CRC-32 of everything after the header
    16  u32  num_terminals T (0 is the end of the text, 1 is SKIP)
    20  u32  num_nonterminals N
    24  u32  num_productions P
    28  u32  num_states S of the parser; the start is 0
    32  u32  num_lexer_states L; 0 is dead
    36  u32  num_classes C
    40  u16  lexer_start: before a lexeme
    42  u16  lexer_first: before the text
    44  u32  words W of a set of terminals, ceil(T / 32): terminal t is bit t % 32 of word t / 32
    48  u32  num_reductions R
    52  u32  bytes of the names
    56  u32  num_rests Q: a rest completes a rule (closing.py)
    60  u32  sum Y of the numbers of terminals of all rests

then these arrays, each at the next multiple of 8 bytes, padded with zeros:

    classes      u8  [256]      class of a byte
    transitions  u16 [L * C]    next lexer state
    accepted     u16 [L]        terminal that the lexer state matched, 0xFFFF for none
    reachable    u32 [L * W]    set of terminals that the lexer state has matched or can still match
    actions      u16 [S * T]    0 error, else number << 2 | kind: 1 shift to a state, 2 reduce a
                                production, 3 accept
    gotos        u16 [S * N]    state after a nonterminal, 0 for none
    lhs          u16 [P]        nonterminal of a production
    length       u16 [P]        number of symbols of a production
    shifted      u32 [S * W]    set of terminals that the state shifts or accepts
    first        u32 [S + 1]    where the state's reductions start in reduced, lookahead
    reduced      u16 [R]        the production of a reduction
    lookahead    u32 [R * W]    the set of terminals at which this production is reduced
    first_rest   u32 [S + 1]    where the state's rests start in rest_* (closing.py)
    rest_lhs     u16 [Q]        nonterminal that a rest completes
    rest_pops    u16 [Q]        number of states that the reduction pops
    rest_cost    u32 [Q]        cost of a rest (closing.py)
    rest_at      u32 [Q + 1]    where the terminals of a rest start in rest
    rest         u16 [Y]        terminals
    shortest_at  u32 [T + 1]    where the terminal's text starts in shortest
    shortest     u8             a shortest text of each terminal that the lexer can match
    names        u8             UTF-8 JSON: [[terminals], [nonterminals]], for messages
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .closing import Rest

MAGIC = b"TBYG"
VERSION = 3
_HEADER = struct.Struct("<4s9I2H5I")
_NONE = 0xFFFF
_U16 = "H"
_U32 = "I"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The tables of a grammar. Recognizers compute the allowed texts from these tables. Terminal 0
    is the end of the text, and terminal 1 is SKIP.

    A set of terminals is an integer. Bit t is set if the set contains terminal t.
    """

    terminals: tuple[str, ...]
    """The names of the terminals in messages."""
    nonterminals: tuple[str, ...]

    classes: bytes
    """[256] class of each byte."""
    num_classes: int
    lexer_start: int
    """The state before the first byte of a lexeme. No transition leads to this state, and no
    terminal is matched in it."""
    lexer_first: int
    """The state before the first byte of a text: ``lexer_start``, or the state after a newline."""
    transitions: tuple[int, ...]
    """[num_lexer_states * num_classes] next lexer state; state 0 is dead."""
    accepted: tuple[int, ...]
    """By lexer state: the terminal that the lexer has matched; -1 if no terminal is matched. If
    several terminals match, the preferred terminal."""
    reachable: tuple[int, ...]
    """By lexer state: the set of terminals that can still match, including terminals that match in
    this state."""

    num_states: int
    actions: tuple[int, ...]
    """[num_states * num_terminals] as in ParseTables."""
    gotos: tuple[int, ...]
    """[num_states * num_nonterminals] as in ParseTables."""
    lhs: tuple[int, ...]
    length: tuple[int, ...]
    shifted: tuple[int, ...]
    """By parser state: the set of terminals that are shifted or accepted."""
    reduced: tuple[tuple[tuple[int, int], ...], ...]
    """For each parser state, pairs of a production and the set of terminals at which the production
    is reduced."""
    rests: tuple[tuple[Rest, ...], ...]
    """For each parser state, the rests that complete its items."""
    shortest: tuple[bytes, ...]
    """A shortest text of each terminal; empty for a terminal that the lexer cannot match."""

    @property
    def num_terminals(self) -> int:
        """Number of terminals, including the end of the text and SKIP."""
        return len(self.terminals)

    @property
    def num_nonterminals(self) -> int:
        """Number of nonterminals, including the nonterminal of the whole text."""
        return len(self.nonterminals)

    @property
    def num_lexer_states(self) -> int:
        """Number of lexer states, including the dead state."""
        return len(self.accepted)

    def to_bytes(self) -> bytes:
        """The binary form. The same grammar gives the same bytes."""
        words = (self.num_terminals + 31) // 32
        reductions = [pair for pairs in self.reduced for pair in pairs]
        rests = [rest for of_state in self.rests for rest in of_state]
        names = json.dumps([self.terminals, self.nonterminals], separators=(",", ":")).encode()
        parts = [
            self.classes,
            _packed(_U16, self.transitions),
            _packed(_U16, (_NONE if terminal < 0 else terminal for terminal in self.accepted)),
            _packed_sets(self.reachable, words),
            _packed(_U16, self.actions),
            _packed(_U16, self.gotos),
            _packed(_U16, self.lhs),
            _packed(_U16, self.length),
            _packed_sets(self.shifted, words),
            _packed(_U32, _starts(self.reduced)),
            _packed(_U16, (production for production, _ in reductions)),
            _packed_sets((lookahead for _, lookahead in reductions), words),
            _packed(_U32, _starts(self.rests)),
            _packed(_U16, (rest.lhs for rest in rests)),
            _packed(_U16, (rest.pops for rest in rests)),
            _packed(_U32, (rest.cost for rest in rests)),
            _packed(_U32, _starts([rest.terminals for rest in rests])),
            _packed(_U16, (terminal for rest in rests for terminal in rest.terminals)),
            _packed(_U32, _starts(self.shortest)),
            b"".join(self.shortest),
            names,
        ]
        body = b"".join(part + bytes(-len(part) % 8) for part in parts)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            _HEADER.size + len(body),
            zlib.crc32(body),
            self.num_terminals,
            self.num_nonterminals,
            len(self.lhs),
            self.num_states,
            self.num_lexer_states,
            self.num_classes,
            self.lexer_start,
            self.lexer_first,
            words,
            len(reductions),
            len(names),
            len(rests),
            sum(len(rest.terminals) for rest in rests),
        )
        return header + body

    @classmethod
    def from_bytes(cls, blob: bytes) -> CompiledGrammar:
        """The grammar of a binary form. Raises ValueError if the bytes are not a compiled grammar,
        have another version, or are damaged."""
        if len(blob) < _HEADER.size or blob[:4] != MAGIC:
            raise ValueError("not a compiled grammar: it does not begin with TBYG")
        (
            _,
            version,
            size,
            crc,
            terminals,
            nonterminals,
            productions,
            states,
            lexer_states,
            classes,
            start,
            first_state,
            words,
            reductions,
            names_size,
            num_rests,
            rest_terminals,
        ) = _HEADER.unpack_from(blob)
        if version != VERSION:
            raise ValueError(
                f"the compiled grammar has version {version}; this code reads version {VERSION}"
            )
        if size != len(blob) or zlib.crc32(memoryview(blob)[_HEADER.size :]) != crc:
            raise ValueError("the compiled grammar is truncated or damaged")
        read = _Reader(blob)
        byte_classes = read.bytes(256)
        transitions = read.numbers(_U16, lexer_states * classes)
        accepted = read.numbers(_U16, lexer_states)
        reachable = read.sets(lexer_states, words)
        actions = read.numbers(_U16, states * terminals)
        gotos = read.numbers(_U16, states * nonterminals)
        lhs = read.numbers(_U16, productions)
        length = read.numbers(_U16, productions)
        shifted = read.sets(states, words)
        first = read.numbers(_U32, states + 1)
        reduced = read.numbers(_U16, reductions)
        lookahead = read.sets(reductions, words)
        first_rest = read.numbers(_U32, states + 1)
        rest_lhs = read.numbers(_U16, num_rests)
        rest_pops = read.numbers(_U16, num_rests)
        rest_cost = read.numbers(_U32, num_rests)
        rest_at = read.numbers(_U32, num_rests + 1)
        rest = read.numbers(_U16, rest_terminals)
        rests = [
            Rest(lhs, pops, cost, rest[begin:end])
            for lhs, pops, cost, (begin, end) in zip(
                rest_lhs, rest_pops, rest_cost, pairwise(rest_at), strict=True
            )
        ]
        shortest_at = read.numbers(_U32, terminals + 1)
        shortest = read.bytes(shortest_at[-1])
        terminal_names, nonterminal_names = json.loads(read.bytes(names_size))
        pairs = tuple(zip(reduced, lookahead, strict=True))
        return cls(
            terminals=tuple(terminal_names),
            nonterminals=tuple(nonterminal_names),
            classes=byte_classes,
            num_classes=classes,
            lexer_start=start,
            lexer_first=first_state,
            transitions=transitions,
            accepted=tuple(-1 if terminal == _NONE else terminal for terminal in accepted),
            reachable=reachable,
            num_states=states,
            actions=actions,
            gotos=gotos,
            lhs=lhs,
            length=length,
            shifted=shifted,
            reduced=tuple(pairs[begin:end] for begin, end in pairwise(first)),
            rests=tuple(tuple(rests[begin:end]) for begin, end in pairwise(first_rest)),
            shortest=tuple(shortest[begin:end] for begin, end in pairwise(shortest_at)),
        )


def _starts(parts: Iterable[Sequence[object]]) -> list[int]:
    """The offset of each part in the concatenation of all parts, and the end of the last part."""
    return list(accumulate(map(len, parts), initial=0))


def _packed(kind: str, numbers: Iterable[int]) -> bytes:
    packed = array(kind, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _packed_sets(sets: Iterable[int], words: int) -> bytes:
    return b"".join(terminals.to_bytes(words * 4, "little") for terminals in sets)


class _Reader:
    """Reads the arrays of a binary form in turn."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._at = _HEADER.size

    def bytes(self, size: int) -> bytes:
        part = self._blob[self._at : self._at + size]
        self._at += size + -size % 8
        return part

    def numbers(self, kind: str, count: int) -> tuple[int, ...]:
        numbers = array(kind)
        numbers.frombytes(self.bytes(count * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        return tuple(numbers)

    def sets(self, count: int, words: int) -> tuple[int, ...]:
        size = words * 4
        part: Sequence[int] = self.bytes(count * size)
        return tuple(
            int.from_bytes(bytes(part[at : at + size]), "little")
            for at in range(0, count * size, size)
        )
