"""Reads the sections of a Wasm module, without running the module: its imports, its exports and the
declarations of its state.

Source: WebAssembly core specification 2.0, chapter 5 (binary format), and the parts of later
proposals that have to be recognized: 64-bit and shared memories, page sizes, typed references. This
file checks only the parts that it reads. Wasmtime validates the whole module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .wasm_reader import (
    MAX_ENTRIES,
    FunctionType,
    GlobalType,
    Reader,
    Size,
    WasmError,
    encode_u32,
)

OWN_EXPORT = "tokenbus:"
"""The prefix of the names of exports that the worker adds."""
GLOBAL_EXPORT = f"{OWN_EXPORT}global:"
"""The prefix of the names under which ``with_exported_globals`` exports globals."""
FUNC, TABLE, MEMORY, GLOBAL, TAG = range(5)
"""Kinds of imports and exports."""
KINDS = ("function", "table", "memory", "global", "tag")

_MAGIC = b"\0asm"
_EXPORTS = 7
_CODE = 10
_ORDER = {number: i for i, number in enumerate((1, 2, 3, 4, 5, 13, 6, 7, 8, 9, 12, 10, 11))}
"""The position of each section in a module, by the section's number."""


class Import(NamedTuple):
    """An import of a module."""

    module: str
    name: str
    kind: int
    type: int = 0
    """For a function: the number of its type."""


class Export(NamedTuple):
    """An export: its kind, and its number among all items of that kind."""

    kind: int
    number: int


class Section(NamedTuple):
    """A section: its number, and the offsets of its start, of its content and of its end."""

    number: int
    start: int
    content: int
    end: int


@dataclass(slots=True)
class Binary:
    """The content of a module's sections. In each list, imported items come before the module's own
    items, as in the format."""

    data: bytes
    sections: list[Section] = field(default_factory=list)
    types: list[FunctionType] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    """For each function: the number of its type."""
    tables: list[Size] = field(default_factory=list)
    memories: list[Size] = field(default_factory=list)
    globals: list[GlobalType] = field(default_factory=list)
    exports: dict[str, Export] = field(default_factory=dict)
    start: int | None = None
    """The number of the function that runs when the module is instantiated."""
    references: set[int] = field(default_factory=set)
    """The functions to which element segments and constants of the module refer, by number.
    An export alone does not add a function."""

    def function_type(self, index: int) -> FunctionType:
        """The type of a function; raises WasmError if the function does not exist."""
        if index >= len(self.functions):
            raise WasmError(
                f"unknown function {index}; the module has {len(self.functions)} functions"
            )
        return self.type_of(self.functions[index])

    def type_of(self, number: int) -> FunctionType:
        """The type with this number; raises WasmError if it does not exist."""
        if number >= len(self.types):
            raise WasmError(f"unknown type {number}; the module has {len(self.types)} types")
        return self.types[number]

    def exported(self, kind: int) -> dict[str, int]:
        """Maps the name of each export of a kind to its number."""
        return {name: e.number for name, e in self.exports.items() if e.kind == kind}

    def section(self, number: int) -> Section | None:
        """The section with this number; None if the module does not have it."""
        return next((s for s in self.sections if s.number == number), None)

    @property
    def code(self) -> Section | None:
        """The section of the functions' bodies."""
        return self.section(_CODE)


def read(wasm: bytes) -> Binary:
    """Reads the sections of a module. Raises WasmError with the first error and its offset."""
    if wasm[:4] != _MAGIC:
        what = f"it begins with {wasm[:4]!r} instead of {_MAGIC!r}" if wasm else "it is empty"
        hint = "; a script is uploaded as a file NAME.py or NAME.js"
        raise WasmError(f"this is not Wasm: {what}{hint}")
    if wasm[4:8] != b"\1\0\0\0":
        what = "a component" if wasm[6:8] == b"\1\0" else f"version {wasm[4:8].hex()}"
        raise WasmError(f"this is {what} of Wasm; a core module, version 01000000, is needed")
    binary = Binary(wasm)
    reader = Reader(wasm, 8, len(wasm))
    last = -1
    while reader.at < reader.end:
        start, number = reader.at, reader.byte()
        size = reader.u32()
        content = reader.at
        reader.skip(size, f"section {number}")
        section = Section(number, start, content, reader.at)
        binary.sections.append(section)
        if number == 0:
            continue
        place = _ORDER.get(number, -1)
        if place <= last:
            why = "is unknown" if place < 0 else "occurs twice or in the wrong place"
            raise WasmError(f"section {number} at byte {start} {why}")
        last = place
        _read_section(binary, section)
    return binary


def mutable_global_exports(binary: Binary) -> list[str | None]:
    """For each mutable global, in order, a name under which the global is exported; None if it is
    not exported."""
    names = {index: name for name, index in reversed(binary.exported(GLOBAL).items())}
    return [names.get(i) for i, kind in enumerate(binary.globals) if kind.mutable]


def with_exported_globals(wasm: bytes, more: Mapping[str, Export] | None = None) -> bytes:
    """Returns the module with every mutable global exported, and with the additional exports
    ``more``. A global that was not exported gets the name ``tokenbus:global:<index>``. Only the
    export section changes.

    With these exports, a copy of an instance can get all of the state of the instance. Raises
    WasmError if the module cannot be read, or if exports are added and one of the module's own
    names begins with ``OWN_EXPORT``.
    """
    binary = read(wasm)
    named = set(binary.exported(GLOBAL).values())
    missing = [i for i, g in enumerate(binary.globals) if g.mutable and i not in named]
    globals_ = {f"{GLOBAL_EXPORT}{i}": Export(GLOBAL, i) for i in missing}
    return _with_exports(binary, {**(more or {}), **globals_})


def _with_exports(binary: Binary, more: Mapping[str, Export]) -> bytes:
    """The module with more exports, whose names begin with ``OWN_EXPORT``. Raises WasmError if the
    module uses such a name itself."""
    wasm = binary.data
    if not more:
        return wasm
    for name in binary.exports:
        if name.startswith(OWN_EXPORT):
            raise WasmError(f"the export {name!r} has a name that is reserved for the worker")
    entries = b"".join(
        _encoded_name(name) + bytes([export.kind]) + encode_u32(export.number)
        for name, export in more.items()
    )
    old = binary.section(_EXPORTS)
    if old is None:
        place = _ORDER[_EXPORTS]
        before = [s for s in binary.sections if s.number and _ORDER[s.number] < place]
        start = end = before[-1].end if before else 8
        content = encode_u32(len(more)) + entries
    else:
        reader = Reader(wasm, old.content, old.end)
        count = reader.u32()
        content = encode_u32(count + len(more)) + wasm[reader.at : old.end] + entries
        start, end = old.start, old.end
    section = bytes([_EXPORTS]) + encode_u32(len(content)) + content
    return wasm[:start] + section + wasm[end:]


def _encoded_name(name: str) -> bytes:
    encoded = name.encode()
    return encode_u32(len(encoded)) + encoded


def _read_section(binary: Binary, section: Section) -> None:
    reader = Reader(binary.data, section.content, section.end)
    match section.number:
        case 1:
            for _ in range(reader.count("types")):
                binary.types.append(_function_type(reader))
        case 2:
            for _ in range(reader.count("imports")):
                binary.imports.append(_import(reader, binary))
        case 3:
            count = reader.count("functions", 10 * MAX_ENTRIES)
            binary.functions += (reader.u32() for _ in range(count))
        case 4:
            binary.tables += (reader.table() for _ in range(reader.count("tables")))
        case 5:
            binary.memories += (reader.limits() for _ in range(reader.count("memories")))
        case 6:
            for _ in range(reader.count("globals")):
                binary.globals.append(reader.global_type())
                reader.skip_constant()
        case 7:
            for _ in range(reader.count("exports")):
                name, kind, index = reader.name(), reader.byte(), reader.u32()
                if kind >= len(KINDS):
                    raise WasmError(f"the export {name!r} is of an unknown kind, {kind}")
                if name in binary.exports:
                    raise WasmError(f"two exports have the name {name!r}")
                binary.exports[name] = Export(kind, index)
        case 8:
            binary.start = reader.u32()
        case 9:
            for _ in range(reader.count("element segments")):
                _read_elements(reader)
        case _:
            return
    binary.references |= reader.references
    if reader.at != section.end:
        at = f"its content ends at byte {reader.at}"
        raise WasmError(f"section {section.number} ends at byte {section.end}, but {at}")


def _read_elements(reader: Reader) -> None:
    """Adds the functions of an element segment to the references of the reader."""
    form = reader.u32()
    if form > 7:
        raise WasmError(
            f"the element segment at byte {reader.at - 1} is of an unknown form, {form}"
        )
    active, with_table, constants = not form & 1, form & 2, form & 4
    if active and with_table:
        reader.u32()
    if active:
        reader.skip_constant()
    if not active or with_table:
        if constants:
            reader.value_type()
        else:
            reader.skip(1, "the kind of an element segment")
    for _ in range(reader.count("elements", 10 * MAX_ENTRIES)):
        if constants:
            reader.skip_constant()
        else:
            reader.references.add(reader.u32())


def _function_type(reader: Reader) -> FunctionType:
    form = reader.byte()
    if form != 0x60:
        raise WasmError(
            f"the type at byte {reader.at - 1} is not of a function (0x{form:02x} instead of "
            "0x60); garbage-collected types are not supported"
        )
    params = tuple([reader.value_type() for _ in range(reader.count("parameters"))])
    results = tuple([reader.value_type() for _ in range(reader.count("results"))])
    return FunctionType(params, results)


def _import(reader: Reader, binary: Binary) -> Import:
    module, name, kind = reader.name(), reader.name(), reader.byte()
    match kind:
        case 0:
            number = reader.u32()
            binary.functions.append(number)
            return Import(module, name, kind, number)
        case 1:
            binary.tables.append(reader.table())
        case 2:
            binary.memories.append(reader.limits())
        case 3:
            binary.globals.append(reader.global_type())
        case 4:
            reader.skip(1, "a tag")
            reader.u32()
        case _:
            raise WasmError(f"the import {module}.{name} is of an unknown kind, {kind}")
    return Import(module, name, kind)
