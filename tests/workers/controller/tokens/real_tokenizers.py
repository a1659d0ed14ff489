"""Two real tokenizers from files of the package mistral-common: Tekken with 131,072 byte-level
tokens, and a SentencePiece model with 32,768 tokens, among them ``▁`` and ``<0xAB>``."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

DATA = Path(mistral_common.__file__).parent / "data"
TEKKEN = DATA / "tekken_240911.json"
SENTENCEPIECE = DATA / "mistral_instruct_tokenizer_240323.model.v3"
TEKKEN_SPECIAL = 1000
TEKKEN_SIZE = 131_072


@cache
def _tekken() -> tuple[str, list[bytes]]:
    content = json.loads(TEKKEN.read_text())
    kept = content["vocab"][: TEKKEN_SIZE - TEKKEN_SPECIAL]
    return content["config"]["pattern"], [base64.b64decode(entry["token_bytes"]) for entry in kept]


def tekken_tokens() -> list[bytes]:
    """The bytes of Tekken's tokens; empty for special tokens."""
    return [b""] * TEKKEN_SPECIAL + _tekken()[1]


@cache
def tekken_json() -> str:
    """Tekken as the ``tokenizers`` JSON of a checkpoint."""
    pattern, tokens = _tekken()
    rank = {token: number for number, token in enumerate(tokens)}
    characters = _byte_characters()
    written = [token.decode("latin-1").translate(characters) for token in tokens]
    merges: list[tuple[str, str]] = []
    for token in tokens:
        known = sorted(
            (a, b)
            for i in range(1, len(token))
            if (a := rank.get(token[:i])) is not None and (b := rank.get(token[i:])) is not None
        )
        merges += [(written[a], written[b]) for a, b in known]
    special = [f"<SPECIAL_{number}>" for number in range(TEKKEN_SPECIAL)]
    vocabulary = {text: number for number, text in enumerate([*special, *written])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str()


@cache
def tekken() -> TokenizerVocabulary:
    """The vocabulary of Tekken."""
    return TokenizerVocabulary.from_json(
        tekken_json(), size=TEKKEN_SIZE, eos=[2], fingerprint="tekken"
    )


def _byte_characters() -> dict[int, str]:
    """The characters that represent bytes in GPT-2's tokenizer, for ``str.translate``."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(0x100 + place) for place, byte in enumerate(others)}


@cache
def sentencepiece_model() -> Any:
    """The SentencePiece model in its own library."""
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(SENTENCEPIECE))


@cache
def sentencepiece_json() -> str:
    """The SentencePiece model as the ``tokenizers`` JSON of checkpoints of Llama 2 and Mistral."""
    model = sentencepiece_model()
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    number_of = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for number, piece in enumerate(pieces):
        if model.is_byte(number) or model.is_control(number) or model.is_unknown(number):
            continue
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(a, b) for a, b in halves if a in number_of and b in number_of]
        known.sort(key=lambda pair: (number_of[pair[0]], number_of[pair[1]]))
        merges += [(-model.get_score(number), pair) for pair in known]
    merges.sort(key=lambda merge: merge[0])
    tokenizer = Tokenizer(
        models.BPE(
            number_of,
            [pair for _, pair in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [
        piece
        for number, piece in enumerate(pieces)
        if model.is_control(number) or model.is_unknown(number)
    ]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer.to_str()


@cache
def sentencepiece() -> TokenizerVocabulary:
    """The vocabulary of the SentencePiece model."""
    return TokenizerVocabulary.from_json(
        sentencepiece_json(), size=32_768, eos=[2], fingerprint="sentencepiece"
    )
