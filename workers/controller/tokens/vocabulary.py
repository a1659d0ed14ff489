"""A model's vocabulary as controllers use it: bytes of tokens, tokens of bytes, the trie.

It is made of the tokenizer's JSON, or of raw tokens; it needs ``tokenizers``, and neither
transformers nor torch. The text of tokens is their bytes, one after another, and ``tokenize`` is
the reverse of that for every text: what a controller appends is what it asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ....protocol.errors import Code, ControllerError
from .longest_match import LongestMatch
from .token_bytes import Spec, flat, spells_space, token_bytes
from .trie import encode_trie

_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


class TokenizerVocabulary:
    """What ``host.Vocabulary`` says, for one tokenizer and one model. Safe to use from any thread.

    All of it is built at once, the trie too, so that no controller's time goes into it: about
    0.4 s for raw tokens and 1.3 s for the JSON of a vocabulary of 131,072.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos: Sequence[int],
        fingerprint: str,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """``from_json`` and ``from_tokens`` are the ways to make one.

        A token of ``eos`` has no bytes, so that no constraint allows it as text; one that the model
        cannot sample, being beyond its vocabulary, is left out.
        """
        self.size = len(tokens)
        self.eos_ids = tuple(number for number in eos if 0 <= number < self.size)
        self.eos = self.eos_ids[0] if self.eos_ids else -1
        self.fingerprint = fingerprint
        self._tokens = list(tokens)
        for number in self.eos_ids:
            self._tokens[number] = b""
        self._tokenizer = tokenizer
        self._longest_match = LongestMatch(self._tokens)
        self.trie = encode_trie(self._tokens, self.eos)

    @classmethod
    def from_json(
        cls, json: str, *, size: int, eos: Sequence[int], fingerprint: str
    ) -> TokenizerVocabulary:
        """Of the JSON of a tokenizer, as ``tokenizers`` writes it.

        ``size`` is the model's vocabulary, its number of logits: ids beyond the tokenizer's are
        padding, without bytes, and tokens beyond the model's are never used. Raises ControllerError
        where the JSON is no tokenizer's, or where it does not say what bytes its tokens write.
        """
        try:
            spec: Spec = msgspec.json.decode(json)
            # tokenizers raises plain Exception.
            tokenizer = Tokenizer.from_str(msgspec.json.encode(_exact(spec)).decode())
        except BaseException as error:  # Its panics are BaseExceptions.
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the tokenizer {fingerprint[:12]} cannot be read: {error}; "
                "it has to be JSON as the tokenizers library writes it",
            ) from None
        # What looks like a special token in a text is text.
        tokenizer.encode_special_tokens = True
        return cls(token_bytes(spec, size), eos, fingerprint, tokenizer)

    @classmethod
    def from_tokens(
        cls, tokens: Sequence[bytes], eos: Sequence[int], fingerprint: str
    ) -> TokenizerVocabulary:
        """Of raw tokens, special ones empty; text is tokenized by longest match."""
        return cls(tokens, eos, fingerprint)

    def token(self, number: int) -> bytes:
        """The bytes of a token; empty for a special one and for an id that is none."""
        return self._tokens[number] if 0 <= number < self.size else b""

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The text that tokens write."""
        return b"".join(map(self.token, tokens))

    def tokenize(self, text: bytes) -> list[int]:
        """The tokens of a text that goes on: nothing is put before it, none of them is special.

        ``bytes_of`` of them is the text, always: where the tokenizer's own choice would write
        something else, the longest match is taken; bytes that are no UTF-8 go one by one. Raises
        ControllerError where the vocabulary cannot write the text.
        """
        try:
            return self._tokens_of(text.decode(), text)
        except UnicodeDecodeError:
            pass
        tokens: list[int] = []
        parts = _NOT_UTF8.split(text.decode("utf-8", "surrogateescape"))
        for part, is_text in zip(parts, [True, False] * len(parts), strict=False):
            written = part.encode("utf-8", "surrogateescape")
            if is_text:
                tokens += self._tokens_of(part, written)
            else:
                for at in range(len(written)):
                    tokens += self._longest_match(written[at : at + 1])
        return tokens

    def _tokens_of(self, text: str, written: bytes) -> list[int]:
        tokens = self._own_choice(text)
        return tokens if self.bytes_of(tokens) == written else self._longest_match(written)

    def _own_choice(self, text: str) -> list[int]:
        """What the tokenizer makes of a text; nothing where there is none, or where it fails."""
        if self._tokenizer is None:
            return []
        try:
            # Of all ways this one lets other threads run meanwhile.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException:  # A word is unknown and there is no token for that, or a panic.
            return []


# --- a tokenizer whose tokens write the text, and no more -----------------------------------------


def _exact(spec: Spec) -> dict[str, Any]:
    """The same tokenizer without what changes the text: a space before it, upper case, accents.

    Of the normalizer only that stays which spells the text in the model's own alphabet. A text that
    the rest would not have changed gets the tokens that it had.
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
    """A pre-tokenizer that puts no space before the text."""
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
