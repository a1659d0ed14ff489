"""Reads the vocabulary that ``--tokenizer`` names: a checkpoint, a file, or the embedded model.

Neither torch nor transformers is needed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from ...protocol.decoders import json_decoder
from ...protocol.errors import ControllerError
from ...workers.controller.tokens.vocabulary import TokenizerVocabulary
from ...workers.gpu import embedded
from .module_files import FileFault

FILES = ("tokenizer.json", "tekken.json")
"""The tokenizer files of a checkpoint; the first that exists is used."""
_WANTED = (
    "expected a tokenizer.json, a tekken.json, or a folder with one of them; transformers' "
    "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER) writes such a folder"
)


def read_vocabulary(name: str) -> TokenizerVocabulary:
    """The vocabulary of a folder, a file, or ``embedded``. Raises FileFault if the tokenizer cannot
    be read.

    A tekken.json contains the vocabulary size and the end-of-sequence tokens. For a tokenizer.json,
    both come from the configuration files in the same folder. If these files are missing, the size
    comes from the tokenizer.
    """
    path = embedded.path() if name == embedded.NAME else Path(name)
    if path.is_dir():
        found = [path / file for file in FILES if (path / file).exists()]
        if not found:
            raise FileFault(f"{name} has no tokenizer: {_WANTED}")
        path = found[0]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileFault(f"cannot read the tokenizer {name}: {error.strerror}; {_WANTED}") from None
    try:
        spec = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        spec = None
    if not isinstance(spec, dict):
        raise FileFault(f"{path} is not a tokenizer, because it is not a JSON object; {_WANTED}")
    fingerprint = hashlib.sha256(content).hexdigest()
    try:
        if "config" in spec and "model" not in spec:
            return _tekken(spec, fingerprint)
        ids = [number for _, number in _pieces(spec)]
        folder = path.parent if path.name == FILES[0] else None
        size = _configured(folder, "vocab_size") or max(ids, default=-1) + 1
        return TokenizerVocabulary.from_json(
            content.decode(), size=size, eos=_eos(folder, spec), fingerprint=fingerprint
        )
    except ControllerError as error:
        raise FileFault(f"{path}: {error.message}; {_WANTED}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFault(f"{path} is not a tokenizer ({error!r}); {_WANTED}") from None


def tokens_of(vocabulary: TokenizerVocabulary, tokenizer: str, name: str, text: bytes) -> list[int]:
    """The tokens of an input. Raises FileFault if the tokenizer cannot encode the input."""
    try:
        return vocabulary.tokenize(text)
    except ControllerError as error:
        raise FileFault(
            f"the tokenizer {tokenizer} cannot encode {name}: {error.message}"
        ) from None


# --- tokenizers' own JSON -------------------------------------------------------------------------


def _pieces(spec: dict[str, Any]) -> list[tuple[str, int]]:
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):
        pieces = [(piece, number) for number, (piece, _) in enumerate(vocabulary)]
    else:
        pieces = list(vocabulary.items())
    return pieces + [(added["content"], added["id"]) for added in spec.get("added_tokens") or []]


def _eos(folder: Path | None, spec: dict[str, Any]) -> list[int]:
    """The end-of-sequence tokens. They come from the first file that has them: the generation
    configuration, the model's configuration, or the tokenizer's configuration. The GPU worker uses
    the same order."""
    found = _configured(folder, "eos_token_id")
    if found is not None:
        return found if isinstance(found, list) else [found]
    name = _setting(folder, "tokenizer_config.json").get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    return [number for piece, number in _pieces(spec) if piece == name][:1]


def _configured(folder: Path | None, name: str) -> Any:
    config = _setting(folder, "config.json")
    holders = (_setting(folder, "generation_config.json"), config.get("text_config") or {}, config)
    return next((h[name] for h in holders if h.get(name) is not None), None)


def _setting(folder: Path | None, file: str) -> dict[str, Any]:
    if folder is None or not (folder / file).exists():
        return {}
    return json_decoder(dict[str, Any]).decode((folder / file).read_bytes())


# --- Tekken ---------------------------------------------------------------------------------------


def _tekken(spec: dict[str, Any], fingerprint: str) -> TokenizerVocabulary:
    """The vocabulary of Mistral's tekken.json: special tokens first, then the other tokens in the
    order of their ranks."""
    config = spec["config"]
    special = config["default_num_special_tokens"]
    size = config["default_vocab_size"]
    listed = {s["token_str"]: s["rank"] for s in spec.get("special_tokens") or []}
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in spec["vocab"][: size - special]]
    return TokenizerVocabulary(
        [b""] * special + tokens,
        [listed.get("</s>", 2)],
        fingerprint,
        _byte_level_bpe(tokens, special, config["pattern"]),
    )


def _byte_level_bpe(tokens: Sequence[bytes], first: int, pattern: str) -> Tokenizer:
    """Makes a tokenizer like tiktoken's from ``tokens``, which are sorted by rank. Each step of an
    encoding merges two neighbouring tokens: those whose merged token has the lowest rank. ``first``
    is the id of rank 0."""
    rank = {token: number for number, token in enumerate(tokens)}
    written = [_in_letters(token) for token in tokens]
    merges: list[tuple[str, str]] = []
    for token in tokens:
        known = sorted(
            (a, b)
            for i in range(1, len(token))
            if (a := rank.get(token[:i])) is not None and (b := rank.get(token[i:])) is not None
        )
        merges += [(written[a], written[b]) for a, b in known]
    vocabulary = {text: first + number for number, text in enumerate(written)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _letters() -> dict[int, str]:
    """A table for ``str.translate``. GPT-2's vocabulary represents each byte by a character, and
    the table maps the byte to this character. A byte that is represented by the character with the
    same number is left out."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(0x100 + place) for place, byte in enumerate(others)}


_LETTERS = _letters()


def _in_letters(token: bytes) -> str:
    return token.decode("latin-1").translate(_LETTERS)
