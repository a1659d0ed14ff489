"""Decides whether an instance of a Wasm module can be copied. Some instructions change state that a
copy would not get. If the code has such an instruction, the instance cannot be copied.

A copy gets the memory and the globals. It also gets the tables of functions if the code changes
them. The host cannot find out which passive segments an instance has dropped. So an instance cannot
be copied if the code drops segments. One regular expression matches harmless instructions, and
scans 16 MB in 0.3 s. A function is scanned only if it contains the first bytes of an instruction
that changes a table or drops a segment. Source: WebAssembly core specification 2.0, section 5.4
(instructions), and tail calls, wide memory arguments and relaxed SIMD from the proposals that have
been merged since.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .wasm_binary import Binary, read
from .wasm_reader import Reader, WasmError

MAX_TABLE_ELEMENTS = 512
"""Maximum elements of all copied tables together. Copying this number takes up to 4 ms in each
fork."""
MAX_REFERENCES = 512
"""Maximum number of functions to which the copied tables may refer."""


def why_no_copy(wasm: bytes | Binary) -> str | None:
    """The reason why an instance of this module cannot be copied between calls; None if it can be
    copied.

    An unknown instruction in a scanned function prevents copies. Raises WasmError if the module
    cannot be read.
    """
    binary = wasm if isinstance(wasm, Binary) else read(wasm)
    for index, kind in enumerate(binary.globals):
        if kind.mutable and kind.is_reference:
            return f"its global {index} is mutable and holds a reference ({kind.type})"
    first = ""
    for number, change in _changes_of(binary):
        if not change.is_of_tables:
            return f"its function {number} has {change}"
        first = first or f"its function {number} has {change}"
    why = _why_no_tables(binary) if first else None
    return f"{first}, and {why}" if why else None


def changes_tables(binary: Binary) -> bool:
    """Whether the code changes tables. Only valid for modules whose instances can be copied."""
    return any(True for _ in _changes_of(binary))


def _changes_of(binary: Binary) -> Iterator[tuple[int, Change]]:
    """The changes that the module's functions make, each with the number of its function."""
    imported = len(binary.functions) - _own(binary)
    data = binary.data
    for number, (start, end) in enumerate(bodies(binary), imported):
        if _SUSPICIOUS.search(data, start, end):
            for change in changes(data, start, end):
                yield number, change


def _why_no_tables(binary: Binary) -> str | None:
    """The reason why the host cannot read the tables' elements in order to copy them; None if it
    can."""
    for index, table in enumerate(binary.tables):
        if table.elements != "funcref":
            return f"its table {index} is of {table.elements}, which cannot be read back"
    elements = sum(table.minimum for table in binary.tables)
    for count, what, most in (
        (elements, "elements in its tables", MAX_TABLE_ELEMENTS),
        (len(binary.references) + len(binary.exports), "references", MAX_REFERENCES),
    ):
        if count > most:
            return f"{count} {what} are more than the {most} that can be read back"
    return None


def bodies(binary: Binary) -> Iterator[tuple[int, int]]:
    """The offsets at which the body of each of the module's own functions begins and ends."""
    if binary.code is None:
        return
    reader = Reader(binary.data, binary.code.content, binary.code.end)
    for _ in range(reader.count("function bodies", len(binary.functions))):
        size = reader.u32()
        start = reader.at
        reader.skip(size, "a function")
        yield start, reader.at
    if reader.at != reader.end:
        raise WasmError(f"the section of functions continues at byte {reader.at}, after its end")


class Change(NamedTuple):
    """An instruction that changes state outside of memory and globals."""

    name: str
    """The name of the instruction; empty if the name is not known."""
    at: int
    code: int = 0

    @property
    def is_of_tables(self) -> bool:
        """Whether the instruction changes only tables, whose elements the host can read."""
        return self.name.startswith("table.")

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}, at byte {self.at}"
        return f"an instruction that is not known, 0x{self.code:02x}, at byte {self.at}"


def changes(data: bytes, start: int, end: int) -> Iterator[Change]:
    """The changes that a function's body makes. After an unknown instruction, which counts as a
    change, the rest of the code cannot be read."""
    reader = Reader(data, start, end)
    for _ in range(reader.count("groups of locals")):
        reader.u32()
        reader.value_type()
    at = reader.at
    while True:
        at = _match(_HARMLESS, data, at, end)
        if at >= end:
            return
        if data[at] == 0x0E:  # br_table: it has a count, which a regular expression cannot follow
            reader.at = at + 1
            targets = reader.count("branch targets", end - at)
            at = _match(_targets(targets + 1), data, reader.at, end)
            if at == reader.at:
                yield Change("", at, 0x0E)
                return
            continue
        change = _CHANGE.match(data, at, end)
        if change is None:
            yield Change("", at, data[at])
            return
        yield Change(_CHANGES[0x26 if data[at] == 0x26 else data[at + 1] & 0x7F], at)
        at = change.end()


def _own(binary: Binary) -> int:
    if binary.code is None:
        return 0
    return Reader(binary.data, binary.code.content, binary.code.end).u32()


def _match(pattern: re.Pattern[bytes], data: bytes, at: int, end: int) -> int:
    found = pattern.match(data, at, end)
    return found.end() if found is not None else at


def _targets(count: int) -> re.Pattern[bytes]:
    return re.compile(rb"(?:%b){%d}+" % (_LEB, count), re.DOTALL)


_CHANGES = {
    0x26: "table.set",
    0x09: "data.drop",
    0x0C: "table.init",
    0x0D: "elem.drop",
    0x0E: "table.copy",
    0x0F: "table.grow",
    0x11: "table.fill",
}

# An LEB128 may be longer than necessary. Its first byte always has the low bits.
_LEB = rb"[\x80-\xff]*+[\x00-\x7f]"
_MORE = rb"(?:\x80*+\x00)"
_CHANGE = re.compile(
    rb"\x26%(leb)b"
    rb"|\xfc(?:[\x09\x0d\x0f\x11]|[\x89\x8d\x8f\x91]%(more)b)%(leb)b"
    rb"|\xfc(?:[\x0c\x0e]|[\x8c\x8e]%(more)b)%(leb)b%(leb)b" % {b"leb": _LEB, b"more": _MORE},
    re.DOTALL,
)
_SUSPICIOUS = re.compile(rb"\x26|\xfc[\x09\x0c-\x0f\x11\x89\x8c-\x8f\x91]")

# If bit 6 of the alignment is set, the number of a memory follows.
_MEMARG = rb"(?:(?:[\x40-\x7f]|[\xc0-\xff]%b)%b|[\x00-\x3f]|[\x80-\xbf]%b)%b" % ((_LEB,) * 4)
_BLOCK = rb"(?:[\x63\x64])?%b" % _LEB
_HARMLESS = re.compile(
    rb"(?:"
    # br, br_if, return, call, local.*, global.*, table.get, i32.const, i64.const, memory.size,
    # memory.grow, return_call, ref.null, ref.func
    rb"[\x0c\x0d\x10\x12\x20-\x25\x3f-\x42\xd0\xd2]%(leb)b"
    # unreachable, nop, else, end, return, drop, select, comparisons, arithmetic, ref.is_null
    rb"|[\x00\x01\x05\x0b\x0f\x1a\x1b\x45-\xc4\xd1]"
    rb"|[\x28-\x3e]%(memarg)b"
    rb"|[\x02-\x04]%(block)b"
    rb"|\x43.{4}|\x44.{8}"
    rb"|[\x11\x13]%(leb)b%(leb)b"  # call_indirect, return_call_indirect
    rb"|\x1c\x01%(block)b"
    # trunc_sat; memory.init and copy; memory.fill, table.size
    rb"|\xfc(?:[\x00-\x07]|[\x80-\x87]%(more)b)"
    rb"|\xfc(?:[\x08\x0a]|[\x88\x8a]%(more)b)%(leb)b%(leb)b"
    rb"|\xfc(?:[\x0b\x10]|[\x8b\x90]%(more)b)%(leb)b"
    rb"|\xfd(?:[\x00-\x0b\x5c\x5d]|[\x80-\x8b\xdc\xdd]%(more)b)%(memarg)b"
    rb"|\xfd(?:[\x0c\x0d]|[\x8c\x8d]%(more)b).{16}"
    rb"|\xfd(?:[\x15-\x22]|[\x95-\xa2]%(more)b)."
    rb"|\xfd(?:[\x54-\x5b]|[\xd4-\xdb]%(more)b)%(memarg)b."
    rb"|\xfd(?:[\x0e-\x14\x23-\x53\x5e-\x7f]|[\x8e-\x94\xa3-\xd3\xde-\xff]%(more)b)"
    rb"|\xfd[\x80-\xff](?:\x01|\x81%(more)b)"
    rb"|\xfd[\x80-\x94](?:\x02|\x82%(more)b)"
    rb")*+" % {b"leb": _LEB, b"more": _MORE, b"memarg": _MEMARG, b"block": _BLOCK},
    re.DOTALL,
)
