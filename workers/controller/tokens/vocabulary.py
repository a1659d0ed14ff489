"""A model's vocabulary as controllers use it: token bytes, tokenization, and the token trie.

A vocabulary is built from a tokenizer's JSON or from raw tokens. This module requires
``tokenizers``, but neither transformers nor torch. The text of several tokens is the concatenation
of their bytes. The tokens that ``tokenize`` returns always have exactly the given text. So a
controller appends exactly the text that it requested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from ....protocol.errors import Code, ControllerError
from ....protocol.special_tokens import SpecialToken
from .longest_match import CHECKED_STEPS, LongestMatch
from .token_bytes import Spec, flat, spells_space, token_bytes
from .trie import encode_trie

_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


class TokenizerVocabulary:
    """Implements ``host.Vocabulary`` for one tokenizer and one model. Thread-safe.

    The constructor builds everything, including the trie. So this work does not count towards the
    time limit of a controller. With a vocabulary of 131,072 tokens, this takes about 0.4 s from raw
    tokens and 1.3 s from JSON.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos: Sequence[int],
        fingerprint: str,
        tokenizer: Tokenizer | None = None,
        special: Mapping[str, int] | None = None,
    ) -> None:
        """Callers use ``from_json`` or ``from_tokens``.

        The tokens in ``eos`` have no bytes, so that constraints do not allow them as text. Ids
        beyond the vocabulary, which the model cannot sample, are ignored. ``special``: the ids of
        special tokens, by name.
        """
        self.size = len(tokens)
        self.eos_ids = tuple(number for number in eos if 0 <= number < self.size)
        self.eos = self.eos_ids[0] if self.eos_ids else -1
        self.fingerprint = fingerprint
        self.special: Mapping[str, int] = {
            name: at for name, at in (special or {}).items() if at < self.size
        }
        self._roles: Mapping[str, int] = {}
        self._tokens = list(tokens)
        for number in self.eos_ids:
            self._tokens[number] = b""
        self._tokenizer = tokenizer
        self._longest_match = LongestMatch(self._tokens)
        self.has_every_byte = self._longest_match.has_every_byte
        self.trie = encode_trie(self._tokens, self.eos)
        self._tokens_with: dict[int, bytes] = {}
        """The result of ``tokens_with`` for each byte. Results are stored because they take time to
        compute, and clients choose the bytes."""

    @classmethod
    def from_json(
        cls, json: str, *, size: int, eos: Sequence[int], fingerprint: str
    ) -> TokenizerVocabulary:
        """Creates a vocabulary from the JSON of a tokenizer, as ``tokenizers`` writes it.

        ``size`` is the number of the model's logits. If the tokenizer has fewer tokens, the other
        ids are padding without bytes. If the tokenizer has more tokens, its tokens from id ``size``
        on are never used. Raises ControllerError if the JSON is not the JSON of a tokenizer, or if
        the bytes of its tokens cannot be determined.
        """
        try:
            spec: Spec = msgspec.json.decode(json)
            # tokenizers raises plain Exception.
            tokenizer = Tokenizer.from_str(msgspec.json.encode(_exact(spec)).decode())
        except BaseException as error:  # A panic is a BaseException.
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the tokenizer {fingerprint[:12]} cannot be read: {error}; "
                "it must be JSON as the tokenizers library writes it",
            ) from None
        # With this option, a text that looks like a special token is tokenized as text.
        tokenizer.encode_special_tokens = True
        added = spec.get("added_tokens") or []
        special = {token["content"]: token["id"] for token in added if token.get("special")}
        return cls(token_bytes(spec, size), eos, fingerprint, tokenizer, special)

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[bytes],
        eos: Sequence[int],
        fingerprint: str,
        special: Mapping[str, int] | None = None,
    ) -> TokenizerVocabulary:
        """Creates a vocabulary from the bytes of its tokens. Special tokens have no bytes. Text is
        tokenized by longest match."""
        return cls(tokens, eos, fingerprint, special=special)

    def assign_roles(self, roles: Mapping[str, int]) -> None:
        """Sets the special tokens that ``special_token`` finds, by role. Called before other
        threads use the vocabulary."""
        self._roles = {role: at for role, at in roles.items() if 0 <= at < self.size}

    def special_token(self, token: SpecialToken) -> int | None:
        """The id of a special token; None if the model does not have it."""
        if token is SpecialToken.EOS:
            return self.eos if self.eos >= 0 else None
        return self._roles.get(token.role)

    def token(self, number: int) -> bytes:
        """The bytes of a token; empty for a special token and for an id that is not valid."""
        return self._tokens[number] if 0 <= number < self.size else b""

    def tokens_with(self, byte: int) -> bytes:
        """See ``host.Vocabulary``. With a vocabulary of 131,072 tokens, the first call for each
        byte takes about 1 ms."""
        found = self._tokens_with.get(byte)
        if found is None:
            text, ends = self._text
            numbers = np.searchsorted(ends, np.flatnonzero(text == byte), side="right")
            bits = np.zeros(32 * -(-self.size // 32), np.uint8)
            bits[numbers] = 1
            found = self._tokens_with[byte] = np.packbits(bits, bitorder="little").tobytes()
        return found

    @cached_property
    def _text(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all tokens one after another, uint8, and the position after each token,
        int64 ``[size]``."""
        text = np.frombuffer(b"".join(self._tokens), np.uint8)
        return text, np.cumsum(np.fromiter(map(len, self._tokens), np.int64, self.size))

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens, as bytes."""
        return b"".join(map(self.token, tokens))

    def tokenize(self, text: bytes, check: Callable[[], None] | None = None) -> list[int]:
        """Tokenizes a continuation: without a prefix such as a space, and without special tokens.

        ``bytes_of`` of the result is always the text. If the tokens of the model's tokenizer would
        give another text, the text is tokenized by longest match. Each byte that is not valid UTF-8
        becomes a separate token. ``check`` is called repeatedly, but not within the tokenizer, and
        may raise to stop the call. Raises ControllerError if the vocabulary cannot represent the
        text.
        """
        try:
            return self._tokens_of(text.decode(), text, check)
        except UnicodeDecodeError:
            pass
        tokens: list[int] = []
        parts = _NOT_UTF8.split(text.decode("utf-8", "surrogateescape"))
        for part, is_text in zip(parts, [True, False] * len(parts), strict=False):
            written = part.encode("utf-8", "surrogateescape")
            if check is not None:
                check()
            if is_text:
                tokens += self._tokens_of(part, written, check)
            else:
                for at in range(len(written)):
                    tokens += self._longest_match(written[at : at + 1])
                    if check is not None and at % CHECKED_STEPS == 0:
                        check()
        return tokens

    def _tokens_of(
        self, text: str, written: bytes, check: Callable[[], None] | None = None
    ) -> list[int]:
        tokens = self._own_choice(text)
        return tokens if self.bytes_of(tokens) == written else self._longest_match(written, check)

    def _own_choice(self, text: str) -> list[int]:
        """The tokenizer's tokens for a text; empty if there is no tokenizer, or if it fails."""
        if self._tokenizer is None:
            return []
        try:
            # This method is used because, unlike the tokenizer's other methods, it releases the
            # GIL.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException:  # For example, a word is unknown and the model has no unknown token.
            return []


# --- a tokenizer that does not change the text ---------------------------------------------------


def _exact(spec: Spec) -> dict[str, Any]:
    """The JSON of a tokenizer without the steps that change the text, such as a prefix or
    lower-casing.

    In the normalizer, only the steps remain that map text to the alphabet of the vocabulary. If the
    removed steps would not change a text, the text gets the same tokens as from the original
    tokenizer.
    """
    kept = [
        part
        for part in flat(spec.get("normalizer"))
        if part["type"] == "ByteLevel" or spells_space(part)
    ]
    normalizer = {"type": "Sequence", "normalizers": kept} if kept else None
    return {
        **spec,
        "truncation": None,
        "padding": None,
        "normalizer": normalizer,
        "pre_tokenizer": _without_prefix(spec.get("pre_tokenizer")),
        "post_processor": None,
        "model": {name: part for name, part in spec["model"].items() if name != "dropout"},
    }


def _without_prefix(part: Spec | None) -> Spec | None:
    """A pre-tokenizer that does not add a space as a prefix."""
    if part is None:
        return None
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_without_prefix(p) for p in part["pretokenizers"]]}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if part["type"] == "Metaspace":
        rest = {name: part[name] for name in part if name != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    return part
