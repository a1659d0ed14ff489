"""The bytes that each token of a tokenizer stands for, derived from its ``tokenizers`` JSON.

The JSON does not write tokens as bytes: GPT-2's byte level maps bytes to printable characters, and
SentencePiece writes ``▁`` for a space and ``<0xAB>`` for a byte. The decoder in the JSON defines
the mapping. If the JSON has no decoder, the model, the normalizer and the pre-tokenizer imply the
mapping.

The text of a sequence must be the concatenation of its tokens' bytes, because constraints work on
bytes. A tokenizer is refused if its decoder would give a different text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ....protocol.errors import Code, ControllerError

Spec = Mapping[str, Any]
"""A part of the JSON."""
Step = Callable[[str], str | bytes]
"""A step of the decoder, which is applied to one piece (an entry of the vocabulary). If a step
returns bytes, no further step is applied."""

METASPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DROPS_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit"}


def token_bytes(spec: Spec, size: int) -> list[bytes]:
    """The bytes of the tokens 0 to ``size - 1``; empty for an id that the tokenizer does not have.

    The bytes are also empty for special tokens and the unknown token. Any other added token has the
    bytes of its text. Raises ControllerError if the bytes cannot be determined.
    """
    model: Spec = spec.get("model") or {}
    pieces = _pieces(model)
    steps = _steps(spec)
    table = [b""] * size
    for piece, number in pieces.items():
        if number < size:
            table[number] = _write(piece, steps)
    byte_level = _byte_level in steps
    for added in spec.get("added_tokens") or []:
        number, content = added["id"], added["content"]
        if number < size:
            # Added tokens are literal text, except in SentencePiece, where they go through the
            # decoder too.
            written = content.encode() if byte_level else _write(content, steps)
            table[number] = b"" if added.get("special") else written
    unknown = model.get("unk_id")
    if unknown is None:
        unknown = pieces.get(model.get("unk_token") or "")
    if unknown is not None and unknown < size:
        table[unknown] = b""
    return table


def _pieces(model: Spec) -> Mapping[str, int]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        return {piece: number for number, (piece, _) in enumerate(vocabulary)}
    if isinstance(vocabulary, dict):
        return vocabulary
    kind = model.get("type", "of no type")
    raise _unknown(
        f"its model ({kind}) has no vocabulary; it must be BPE, Unigram, WordPiece or WordLevel"
    )


def _write(piece: str, steps: list[Step]) -> bytes:
    written: str | bytes = piece
    for step in steps:
        if isinstance(written, bytes):
            return written
        written = step(written)
    return written if isinstance(written, bytes) else written.encode()


# --- choice of steps ----------------------------------------------------------------------------


def _steps(spec: Spec) -> list[Step]:
    decoder = spec.get("decoder")
    parts = list(flat(decoder)) if decoder else list(_implied(spec))
    steps: list[Step] = []
    fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            # After Fuse, Strip only strips the ends of the whole text. It does not change the bytes
            # of each token.
            continue
        elif kind == "Replace" and fused and len(part["pattern"].get("String", "")) != 1:
            raise _unknown(f"its decoder replaces {part['pattern']}, which may span tokens")
        elif kind in _STEPS:
            steps.append(_STEPS[kind](part))
        else:
            raise _unknown(
                f"its decoder has the unknown step {kind}; known are {', '.join(sorted(_STEPS))}"
            )
    return steps


def flat(part: Spec | None) -> Iterator[Spec]:
    """The steps of a normalizer, pre-tokenizer or decoder, in order."""
    if not part:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in part.get(name, ()):
            yield from flat(inner)


def _implied(spec: Spec) -> Iterator[Spec]:
    """The steps of a decoder for a tokenizer whose JSON has no decoder. They reverse the
    pre-tokenizer, the normalizer or the model's way of writing spaces."""
    model: Spec = spec.get("model") or {}
    splitters = {part["type"]: part for part in flat(spec.get("pre_tokenizer"))}
    normalizers = list(flat(spec.get("normalizer")))
    if "ByteLevel" in splitters or any(part["type"] == "ByteLevel" for part in normalizers):
        yield {"type": "ByteLevel"}
    elif "Metaspace" in splitters:
        yield splitters["Metaspace"]
    elif any(spells_space(part) for part in normalizers):
        yield {"type": "Metaspace"}
    elif model.get("type") == "WordPiece":
        yield {"type": "WordPiece", "prefix": model["continuing_subword_prefix"], "cleanup": False}
    elif model.get("end_of_word_suffix"):
        yield {"type": "BPEDecoder", "suffix": model["end_of_word_suffix"]}
    elif not _DROPS_SPACES.isdisjoint(splitters):
        yield {"type": "WordPiece", "prefix": "", "cleanup": False}
    if model.get("byte_fallback"):
        yield {"type": "ByteFallback"}


def spells_space(part: Spec) -> bool:
    """Whether a step of a normalizer replaces each space by ``▁`` and does nothing else."""
    if part["type"] != "Replace":
        return False
    return bool(part["pattern"].get("String") == " " and part["content"] == METASPACE)


# --- the steps ----------------------------------------------------------------------------------


def _byte_characters() -> dict[str, int]:
    """Returns the inverse of GPT-2's map of bytes to printable characters. GPT-2 maps printable
    bytes to themselves, and other bytes to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_byte_of = _byte_characters().__getitem__


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(_byte_of, piece))
    except KeyError:
        # The piece has characters outside of GPT-2's alphabet, so it is literal text. The
        # tokenizers library treats it in the same way.
        return piece.encode()


def _byte_fallback(piece: str) -> str | bytes:
    found = _BYTE.fullmatch(piece)
    return bytes.fromhex(found[1]) if found else piece


def _metaspace(part: Spec) -> Step:
    replacement = part.get("replacement", METASPACE)
    return lambda piece: piece.replace(replacement, " ")


def _replace(part: Spec) -> Step:
    old, new = part["pattern"].get("String"), part["content"]
    if old is None:
        raise _unknown(f"its decoder replaces by a regular expression: {part['pattern']}")
    return lambda piece: piece.replace(old, new)


def _strip(part: Spec) -> Step:
    content, start, stop = part["content"], part["start"], part["stop"]

    def strip(piece: str) -> str:
        begun = len(piece) - len(piece.lstrip(content))
        piece = piece[min(start, begun) :]
        ended = len(piece) - len(piece.rstrip(content))
        return piece[: len(piece) - min(stop, ended)]

    return strip


def _word_piece(part: Spec) -> Step:
    if part.get("cleanup"):
        raise _unknown('its decoder cleans up the text ("cleanup": true), which moves spaces')
    prefix = part["prefix"]

    def written(piece: str) -> str:
        if prefix and piece.startswith(prefix):
            return piece.removeprefix(prefix)
        return " " + piece

    return written


def _bpe_decoder(part: Spec) -> Step:
    suffix = part["suffix"]
    return lambda piece: piece.replace(suffix, " ")


_STEPS: dict[str, Callable[[Spec], Step]] = {
    "ByteLevel": lambda _: _byte_level,
    "ByteFallback": lambda _: _byte_fallback,
    "Metaspace": _metaspace,
    "Replace": _replace,
    "Strip": _strip,
    "WordPiece": _word_piece,
    "BPEDecoder": _bpe_decoder,
}


def _unknown(why: str) -> ControllerError:
    return ControllerError(
        Code.CONTROLLER_FAILED, f"the bytes of this tokenizer's tokens cannot be determined: {why}"
    )
