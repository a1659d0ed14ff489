"""Reads values of the Wasm binary format (numbers, names, types) one after another, and checks that
no value extends beyond the end of the data.

Source: WebAssembly core specification 2.0, chapter 5. Errors contain the offset in the module.
"""

from __future__ import annotations

from typing import NamedTuple

from ....protocol.errors import Code, RequestError

PAGE_BYTES = 65_536
MAX_ENTRIES = 100_000
"""Maximum number of entries of one kind in a module, such as types, imports or exports. The maximum
for functions is ten times this number."""
_VALUE_TYPES = {0x7F: "i32", 0x7E: "i64", 0x7D: "f32", 0x7C: "f64", 0x7B: "v128"}
_REFERENCES = {0x70: "funcref", 0x6F: "externref"}


class WasmError(RequestError):
    """The bytes are not a Wasm module, or the module cannot be read or compiled."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_FIELD, message, path="$.data")


class FunctionType(NamedTuple):
    """Parameters and results of a function: ``i32``, ``i64``, ``f32``, ``f64``, ``v128``, …"""

    params: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"({', '.join(self.params)}) -> ({', '.join(self.results)})"


class GlobalType(NamedTuple):
    """The type of a global. The type ``ref`` stands for all typed references."""

    type: str
    mutable: bool

    @property
    def is_reference(self) -> bool:
        """Whether the global's value is a reference, which cannot be copied to another instance."""
        return self.type.endswith("ref")


class Size(NamedTuple):
    """The size of a table, in elements, or of a memory, in pages."""

    minimum: int
    maximum: int | None = None
    shared: bool = False
    is_64: bool = False
    page_bytes: int = PAGE_BYTES
    elements: str = ""
    """The type of a table's elements."""


def encode_u32(value: int) -> bytes:
    """A number as unsigned LEB128."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class Reader:
    """Reads ``data[at:end]``; raises WasmError for a read beyond ``end``."""

    __slots__ = ("at", "data", "end", "references")

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data = data
        self.at = at
        self.end = end
        self.references: set[int] = set()
        """The numbers of the functions to which constants refer."""

    def byte(self) -> int:
        """The next byte."""
        if self.at >= self.end:
            raise WasmError(f"the module is cut off at byte {self.at}")
        self.at += 1
        return self.data[self.at - 1]

    def u32(self) -> int:
        """An unsigned number of 32 bits, as LEB128."""
        return self.unsigned(32)

    def unsigned(self, bits: int) -> int:
        """An unsigned number of at most ``bits`` bits, as LEB128."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= bits:
                raise WasmError(f"the number at byte {self.at} is longer than {bits} bits")
        if value >> bits:
            raise WasmError(f"the number at byte {self.at} is larger than {bits} bits")
        return value

    def skip(self, size: int, what: str) -> None:
        """Skips ``size`` bytes."""
        if size > self.end - self.at:
            raise WasmError(
                f"{what} at byte {self.at} has {size} bytes; {self.end - self.at} are there"
            )
        self.at += size

    def skip_number(self) -> None:
        """Skips an LEB128 of any kind."""
        for _ in range(10):
            if self.byte() < 0x80:
                return
        raise WasmError(f"the number at byte {self.at} is too long")

    def name(self) -> str:
        """Reads a name: its size in bytes, and then its text in UTF-8."""
        size = self.u32()
        start = self.at
        self.skip(size, "a name")
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise WasmError(f"the name at byte {start} is not UTF-8") from None

    def count(self, what: str, most: int = MAX_ENTRIES) -> int:
        """Reads the number of entries that follow. Raises WasmError if the number is above
        ``most``, or above the number of bytes left, because each entry has at least one byte."""
        number = self.u32()
        if number > most:
            raise WasmError(f"the module has {number} {what}; at most {most} are allowed")
        if number > self.end - self.at:
            raise WasmError(f"{number} {what} are announced, but the section ends before them")
        return number

    def value_type(self) -> str:
        """The type of a value; ``ref`` for every typed reference of later proposals."""
        byte = self.byte()
        known = _VALUE_TYPES.get(byte) or _REFERENCES.get(byte)
        if known is not None:
            return known
        if byte in (0x63, 0x64):
            self.skip_number()
        elif not 0x68 <= byte <= 0x74:
            raise WasmError(f"the type 0x{byte:02x} at byte {self.at - 1} is unknown")
        return "ref"

    def global_type(self) -> GlobalType:
        """The type of a global."""
        kind, mutable = self.value_type(), self.byte()
        if mutable > 1:
            raise WasmError(f"the mutability {mutable} at byte {self.at - 1} is unknown")
        return GlobalType(kind, mutable == 1)

    def limits(self) -> Size:
        """The size of a table or a memory."""
        flags = self.byte()
        if flags & ~0xF:
            raise WasmError(f"the flags 0x{flags:02x} at byte {self.at - 1} are unknown")
        bits = 64 if flags & 4 else 32
        minimum = self.unsigned(bits)
        maximum = self.unsigned(bits) if flags & 1 else None
        page = PAGE_BYTES
        if flags & 8:
            power = self.u32()
            if power > 16:
                raise WasmError(f"the page size 2**{power} at byte {self.at - 1} is unknown")
            page = 1 << power
        return Size(minimum, maximum, bool(flags & 2), bool(flags & 4), page)

    def table(self) -> Size:
        """Reads the size of a table, and skips the initial value of its elements if there is
        one."""
        given = self.at < self.end and self.data[self.at] == 0x40
        if given:
            self.skip(2, "a table")
        elements = self.value_type()
        size = self.limits()._replace(elements=elements)
        if given:
            self.skip_constant()
        return size

    def skip_constant(self) -> None:
        """Skips a constant expression, including its end. Functions to which the expression refers
        are added to ``references``."""
        while (op := self.byte()) != 0x0B:
            if op == _REF_FUNC:
                self.references.add(self.u32())
            elif op in _CONSTANT_NUMBERS:
                self.skip_number()
            elif op in _CONSTANT_BYTES:
                self.skip(_CONSTANT_BYTES[op], "a constant")
            elif op == 0xFD:
                if self.u32() != 0x0C:
                    raise WasmError(f"the instruction at byte {self.at - 1} is not a constant")
                self.skip(16, "a constant")
            elif op not in _CONSTANT_ARITHMETIC:
                raise WasmError(
                    f"the instruction 0x{op:02x} at byte {self.at - 1} is unknown in a constant"
                )


_REF_FUNC = 0xD2
_CONSTANT_NUMBERS = frozenset({0x41, 0x42, 0x23, 0xD0})
"""i32.const, i64.const, global.get, ref.null."""
_CONSTANT_BYTES = {0x43: 4, 0x44: 8}
_CONSTANT_ARITHMETIC = frozenset({0x6A, 0x6B, 0x6C, 0x7C, 0x7D, 0x7E})
