"""The bytes of single tokens for ``logprobs``. A token may be a part of a character."""

from __future__ import annotations

import json
import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte for each letter of GPT-2's alphabet. Tokenizers write bytes as text in this
    alphabet. The letter of a printable byte is its own character. The letters of the other bytes
    begin at U+0100."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in set(printed)]
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def decoders(tokenizer_json: str) -> frozenset[str]:
    """The types of the decoders of a tokenizer: ``ByteLevel``, ``ByteFallback``, …"""
    found: set[str] = set()
    todo = [json.loads(tokenizer_json).get("decoder")]
    while todo:
        decoder = todo.pop()
        if isinstance(decoder, dict):
            found.add(str(decoder.get("type")))
            todo += decoder.get("decoders", [])
    return frozenset(found)


def bytes_of(piece: str, text: str, kinds: frozenset[str]) -> bytes:
    """The bytes of a token whose vocabulary entry is ``piece`` and whose text is ``text``."""
    if "ByteLevel" in kinds:
        letters = byte_level_alphabet()
        if all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
    if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
        return bytes.fromhex(byte[1])
    return text.encode()
