"""Makes a module whose instances start with the memory and the globals of an initialized instance.

Source: Wizer. The data segments are replaced by the memory of an initialized instance, and the
initial values of the mutable globals by the instance's values. Wasmtime maps these segments
copy-on-write, so that an instance starts in tens of microseconds. Instances share the pages that
they do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..wasm.wasm_binary import Binary, read
from ..wasm.wasm_reader import Reader, encode_u32

PAGE_BYTES = 4096
"""Size of a page in bytes. Consecutive pages that are not zero become one data segment."""
WASM_PAGE_BYTES = 65536

_CUSTOM, _MEMORY, _GLOBAL, _EXPORT, _START, _DATA, _DATA_COUNT = 0, 5, 6, 7, 8, 11, 12
_CONSTANTS = {"i32": 0x41, "i64": 0x42}


def with_memory(
    wasm: bytes, memory: memoryview, values: Mapping[int, int], without: set[str]
) -> bytes:
    """Returns the module with ``memory`` as its initial memory, and ``values`` as the initial
    values of its mutable globals. A key of ``values`` is the number of a global.

    The new module has neither a start function nor the exports in ``without``. The code must not
    use passive segments, because compiling the new module would fail.
    """
    binary = read(wasm)
    made = [wasm[:8]]
    written_data = _data(memory)
    for section in binary.sections:
        content = wasm[section.content : section.end]
        match section.number:
            case 5:
                content = _memory(binary, len(memory) // WASM_PAGE_BYTES)
            case 6:
                content = _globals(binary, values)
            case 7:
                content = _exports(binary, without)
            case 11:
                content = written_data
            case 0 | 8 | 12:
                continue
        made.append(bytes([section.number]) + encode_u32(len(content)) + content)
    return b"".join(made)


def custom_section(name: str, content: bytes) -> bytes:
    """Encodes a custom section, which can be appended to a module without changing the module's
    behaviour."""
    encoded = name.encode()
    body = encode_u32(len(encoded)) + encoded + content
    return b"\0" + encode_u32(len(body)) + body


def read_custom(wasm: bytes, name: str) -> bytes:
    """The content of a custom section; raises KeyError if the module does not have it."""
    for section in read(wasm).sections:
        if section.number == _CUSTOM:
            reader = Reader(wasm, section.content, section.end)
            if reader.name() == name:
                return wasm[reader.at : section.end]
    raise KeyError(name)


def _memory(binary: Binary, pages: int) -> bytes:
    [memory] = binary.memories
    return encode_u32(1) + b"\0" + encode_u32(max(pages, memory.minimum))


def _globals(binary: Binary, values: Mapping[int, int]) -> bytes:
    section = binary.section(_GLOBAL)
    assert section is not None
    reader = Reader(binary.data, section.content, section.end)
    count = reader.u32()
    made = [encode_u32(count)]
    for number in range(count):
        start = reader.at
        kind = reader.global_type()
        after_type = reader.at
        reader.skip_constant()
        if number in values:
            constant = bytes([_CONSTANTS[kind.type]]) + _signed(values[number]) + b"\x0b"
            made.append(binary.data[start:after_type] + constant)
        else:
            made.append(binary.data[start : reader.at])
    return b"".join(made)


def _exports(binary: Binary, without: set[str]) -> bytes:
    kept = {name: export for name, export in binary.exports.items() if name not in without}
    entries = [
        encode_u32(len(name.encode())) + name.encode() + bytes([kind]) + encode_u32(number)
        for name, (kind, number) in kept.items()
    ]
    return encode_u32(len(kept)) + b"".join(entries)


def _data(memory: memoryview) -> bytes:
    runs = list(_runs(memory))
    segments = [
        b"\0\x41" + _signed(start) + b"\x0b" + encode_u32(end - start) + bytes(memory[start:end])
        for start, end in runs
    ]
    return encode_u32(len(runs)) + b"".join(segments)


def _runs(memory: memoryview) -> Iterator[tuple[int, int]]:
    """The ranges of pages that are not zero."""
    zeros = bytes(PAGE_BYTES)
    start = None
    for at in range(0, len(memory), PAGE_BYTES):
        if memory[at : at + PAGE_BYTES] == zeros:
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, len(memory)


def _signed(value: int) -> bytes:
    """A signed LEB128 number."""
    made = bytearray()
    while True:
        byte = value & 0x7F
        value >>= 7
        if (value == 0 and not byte & 0x40) or (value == -1 and byte & 0x40):
            made.append(byte)
            return bytes(made)
        made.append(byte | 0x80)
