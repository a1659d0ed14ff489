"""The table of an automaton over bytes, and its binary form.

State 0 is dead: it does not accept, and all its transitions lead back to it. Each other state can
lead to a match. So a byte is allowed if its transition does not lead to state 0.

The binary form is little-endian, without padding; ``Dfa.from_bytes`` validates it:

    header       "TBDF", u16 version 1, u16 kind (0 a Dfa, 1 a LexerDfa), u32 states, u32 classes,
                 u32 start, u32 lexemes (0 for a Dfa)
    classes      256 bytes, the class of each byte
    accepting    1 byte for each state
    transitions  u32 for each state and class
    and for a LexerDfa
    accepted     i32 for each state
    accepts_all  for each state ceil(lexemes / 8) bytes, bit i of byte b is lexeme 8 b + i
    reachable    as accepts_all
    and for both
    check        u32, the CRC-32 of everything before it
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from .utf8 import ByteAutomaton, Runs

_MAGIC = b"TBDF"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIIII")
_WORD = "I" if array("I").itemsize == 4 else "L"


@dataclass(frozen=True)
class Dfa:
    """A deterministic automaton over bytes.

    ``classes[b]`` is the class of byte b, below ``num_classes``. ``transitions[s * num_classes +
    classes[b]]`` is the state after byte b in state s, as u32. ``accepting[s]`` is 1 if a match may
    end in state s. The automaton of a pattern is minimal. So if two patterns have the same matches,
    they have the same table.
    """

    classes: bytes
    num_classes: int
    transitions: array[int]
    start: int
    accepting: bytes

    @property
    def num_states(self) -> int:
        """Number of states, including the dead state."""
        return len(self.accepting)

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte; 0 if no match begins with the bytes so far."""
        return self.transitions[state * self.num_classes + self.classes[byte]]

    def walk(self, data: bytes, state: int | None = None) -> int:
        """The state after the bytes ``data``. ``state``: the state before them; by default, the
        start state."""
        at = self.start if state is None else state
        for byte in data:
            at = self.transitions[at * self.num_classes + self.classes[byte]]
        return at

    def accepts(self, data: bytes) -> bool:
        """Whether all of these bytes together are a match."""
        return bool(self.accepting[self.walk(data)])

    def is_live(self, state: int) -> bool:
        """Whether some bytes (or none) lead from a state to a match."""
        return state != 0

    def to_bytes(self) -> bytes:
        """The binary form of the automaton."""
        return _checked(self._header(0, 0) + self._tables())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The automaton of a binary form. Raises ValueError, with the reason, if the bytes are not
        valid."""
        return cls(**_Reading(data, cls is not Dfa).fields())

    def _header(self, kind: int, lexemes: int) -> bytes:
        return _HEADER.pack(
            *(_MAGIC, _VERSION, kind),
            *(self.num_states, self.num_classes, self.start, lexemes),
        )

    def _tables(self) -> bytes:
        return self.classes + self.accepting + _little(self.transitions)


@dataclass(frozen=True)
class LexerDfa(Dfa):
    """One automaton for all lexemes of a lexer.

    ``accepted[s]`` is the lexeme that matches in state s; -1 if no lexeme matches. If several
    lexemes match, it is the preferred lexeme: a literal is preferred to a regular expression, and
    an earlier lexeme to a later lexeme. ``accepts_all[s]`` and ``reachable[s]`` are bit sets, in
    which bit i stands for lexeme i. ``accepts_all[s]`` contains every lexeme that matches in s.
    ``reachable[s]`` contains every lexeme that is ``accepted`` in s or in a state that can follow
    s.
    """

    num_lexemes: int
    accepted: array[int]
    accepts_all: list[int]
    reachable: list[int]

    def reaching(self, marks: Sequence[int]) -> list[int]:
        """For each state s, the union of the bit sets ``marks[t]``, where t is s or any state that
        can follow s.

        For example, ``reaching(accepts_all)`` has all lexemes that can still match, even if another
        lexeme is preferred.
        """
        return _reaching(self.transitions, self.num_classes, marks)

    def to_bytes(self) -> bytes:
        """The binary form of the automaton."""
        size = -(-self.num_lexemes // 8)
        return _checked(
            self._header(1, self.num_lexemes)
            + self._tables()
            + _little(self.accepted)
            + b"".join(bits.to_bytes(size, "little") for bits in self.accepts_all)
            + b"".join(bits.to_bytes(size, "little") for bits in self.reachable)
        )


def table(automaton: ByteAutomaton) -> Dfa:
    """The table of an automaton. Bytes that have the same transitions in all states form one
    class."""
    classes, num_classes, transitions = _table(automaton.rows)
    accepting = bytes(bool(accepted) for accepted in automaton.accepts)
    return Dfa(classes, num_classes, transitions, 1, accepting)


def lexer_table(automaton: ByteAutomaton, preference: Sequence[int]) -> LexerDfa:
    """The table of a lexer. ``preference``: all lexemes, the most preferred first."""
    classes, num_classes, transitions = _table(automaton.rows)
    chosen = {0: -1}
    for bits in set(automaton.accepts) - {0}:
        chosen[bits] = next(lexeme for lexeme in preference if bits >> lexeme & 1)
    accepted = array("i", [chosen[bits] for bits in automaton.accepts])
    marks = [1 << lexeme if lexeme >= 0 else 0 for lexeme in accepted]
    return LexerDfa(
        classes=classes,
        num_classes=num_classes,
        transitions=transitions,
        start=1,
        accepting=bytes(lexeme >= 0 for lexeme in accepted),
        num_lexemes=len(preference),
        accepted=accepted,
        accepts_all=automaton.accepts,
        reachable=_reaching(transitions, num_classes, marks),
    )


def _table(rows: list[Runs]) -> tuple[bytes, int, array[int]]:
    cuts = {0, 256}
    for row in rows:
        for low, high, _ in row:
            cuts.add(low)
            cuts.add(high + 1)
    points = sorted(cuts)
    column = {point: number for number, point in enumerate(points)}
    width = len(points) - 1
    wide = array(_WORD, bytes(4 * width * len(rows)))
    base = 0
    for row in rows:
        for low, high, to in row:
            first, end = base + column[low], base + column[high + 1]
            if end - first == 1:
                wide[first] = to
            else:
                wide[first:end] = array(_WORD, (to,)) * (end - first)
        base += width
    numbers: dict[bytes, int] = {}
    classes = bytearray(256)
    kept: list[array[int]] = []
    for number in range(width):
        targets = wide[number::width]
        label = numbers.setdefault(targets.tobytes(), len(kept))
        if label == len(kept):
            kept.append(targets)
        for byte in range(points[number], points[number + 1]):
            classes[byte] = label
    transitions = array(_WORD, bytes(4 * len(kept) * len(rows)))
    for label, targets in enumerate(kept):
        transitions[label :: len(kept)] = targets
    return bytes(classes), len(kept), transitions


def _reaching(transitions: array[int], width: int, marks: Sequence[int]) -> list[int]:
    sources: list[set[int]] = [set() for _ in marks]
    for at, target in enumerate(transitions):
        if target:
            sources[target].add(at // width)
    reached = list(marks)
    # A state usually has a higher number than the states that lead to it. So the last states are
    # processed first.
    pending = [state for state, bits in enumerate(marks) if bits]
    while pending:
        state = pending.pop()
        bits = reached[state]
        for source in sources[state]:
            if bits & ~reached[source]:
                reached[source] |= bits
                pending.append(source)
    return reached


def _little(words: array[int]) -> bytes:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


def _checked(data: bytes) -> bytes:
    return data + struct.pack("<I", zlib.crc32(data))


class _Reading:
    """Reads and validates a binary form."""

    def __init__(self, data: bytes, lexer: bool) -> None:
        if len(data) < _HEADER.size + 4:
            raise ValueError(f"not an automaton: {len(data)} bytes are too few for one")
        magic, version, kind, states, classes, start, lexemes = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError(f"not an automaton of version {_VERSION}: it begins with {data[:6]!r}")
        if kind != lexer:
            wanted = "a lexer" if lexer else "a plain automaton"
            raise ValueError(f"the automaton is of kind {kind}, not {wanted}")
        size = -(-lexemes // 8)
        length = _HEADER.size + 256 + states + 4 * states * classes + 4
        length += states * (4 + 2 * size) if lexer else 0
        if len(data) != length:
            raise ValueError(f"an automaton of {states} states has {length} bytes, not {len(data)}")
        if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise ValueError("the automaton's checksum is wrong: it is damaged")
        if not (1 <= start < states and 1 <= classes <= 256 and (lexer or lexemes == 0)):
            raise ValueError(
                f"the automaton's header is wrong: start {start}, {states} states, "
                f"{classes} classes"
            )
        self.data = data
        self.at = _HEADER.size
        self.lexer = lexer
        self.states, self.width, self.start, self.lexemes = states, classes, start, lexemes

    def fields(self) -> dict[str, Any]:
        """The constructor arguments of a Dfa or a LexerDfa."""
        states, width = self.states, self.width
        classes = self.take(256)
        accepting = self.take(states)
        transitions = self.words(_WORD, states * width)
        if max(classes) >= width or max(transitions) >= states or max(accepting) > 1:
            raise ValueError("a transition of the automaton leads out of its table")
        if any(transitions[:width]) or accepting[0]:
            raise ValueError("state 0 of the automaton is not dead")
        fields = {
            "classes": classes,
            "num_classes": width,
            "transitions": transitions,
            "start": self.start,
            "accepting": accepting,
        }
        if self.lexer:
            accepted = self.words("i", states)
            if any(
                (lexeme >= 0) != bool(yes) for lexeme, yes in zip(accepted, accepting, strict=True)
            ):
                raise ValueError("the lexer's accepting states and lexemes do not agree")
            fields |= {
                "num_lexemes": self.lexemes,
                "accepted": accepted,
                "accepts_all": self.bits(),
                "reachable": self.bits(),
            }
            if max(accepted) >= self.lexemes:
                raise ValueError(
                    f"the lexer has {self.lexemes} lexemes, but accepts lexeme {max(accepted)}"
                )
        return fields

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def words(self, code: str, count: int) -> array[int]:
        found = array(code)
        found.frombytes(self.take(4 * count))
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def bits(self) -> list[int]:
        size = -(-self.lexemes // 8)
        sets = [int.from_bytes(self.take(size), "little") for _ in range(self.states)]
        if any(bits >> self.lexemes for bits in sets):
            raise ValueError(f"a bit set of the lexer has a bit beyond its {self.lexemes} lexemes")
        return sets
