"""Writes modules that would be too large as text."""

from __future__ import annotations

MARKER = "(drop (i32.const 24301))"
"""Instructions of a guest, which ``repeated`` replaces."""
MARKER_BYTES = b"\x41\xed\xbd\x01\x1a"
_CODE = 10


def unsigned(value: int) -> bytes:
    """A number in LEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def section(number: int, content: bytes) -> bytes:
    """A section of a module."""
    return bytes([number]) + unsigned(len(content)) + content


def vector(items: list[bytes]) -> bytes:
    """A vector of encoded items."""
    return unsigned(len(items)) + b"".join(items)


def custom(name: str, content: bytes) -> bytes:
    """A custom section."""
    encoded = name.encode()
    return section(0, unsigned(len(encoded)) + encoded + content)


def read_unsigned(data: bytes, at: int) -> tuple[int, int]:
    """The number in LEB128 at index ``at``, and the index after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def repeated(wasm: bytes, instructions: bytes, times: int) -> bytes:
    """The module with ``times`` copies of these instructions in place of its ``MARKER``."""
    return replaced(wasm, MARKER_BYTES, instructions * times)


def replaced(wasm: bytes, old: bytes, new: bytes) -> bytes:
    """The module with the bytes ``new`` in place of the bytes ``old`` in its functions."""
    out, at = bytearray(wasm[:8]), 8
    while at < len(wasm):
        number = wasm[at]
        size, content = read_unsigned(wasm, at + 1)
        body = wasm[content : content + size]
        out += section(number, _with_code(body, old, new) if number == _CODE else body)
        at = content + size
    return bytes(out)


def _with_code(code: bytes, old: bytes, new: bytes) -> bytes:
    count, at = read_unsigned(code, 0)
    bodies = []
    for _ in range(count):
        size, begin = read_unsigned(code, at)
        at = begin + size
        body = code[begin:at].replace(old, new)
        bodies.append(unsigned(len(body)) + body)
    return vector(bodies)
