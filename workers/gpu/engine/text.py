"""Decodes tokens to text incrementally. Before the end of a sequence, returned text never ends
inside a character. Stop strings are not returned, except for a stop string that is complete within
the first ``min_tokens`` tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from tokenizers import decoders

from .stop_strings import State, StopStrings

REPLACEMENT = "�"
CONTEXT_TOKENS = 6
"""Number of tokens at the end of the prompt that are decoded together with the first new token. The
text of a token can depend on the tokens before it."""
MAX_PENDING_TOKENS = 4
"""Maximum number of tokens that wait for the end of a character. A character has at most 4 bytes in
UTF-8. So an incomplete character has bytes of at most 3 tokens."""


class Detokenizer(Protocol):
    """Turns a sequence's tokens into text, one token at a time."""

    def push(self, token: int) -> str:
        """Takes the next token. Returns the new text that later tokens cannot change."""

    def finish(self) -> str:
        """Called at the end of the sequence. Returns the text that was held back."""

    def fork(self) -> Detokenizer:
        """A copy with the same state."""


class Text(NamedTuple):
    """The text that a ``TextStream`` returns after a token or at the end of its sequence."""

    certain: str
    """New text that later tokens cannot change, including text that was held back until now."""
    stop: str = ""
    """The stop string that was found; empty if none was found. ``certain`` ends before the stop
    string."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return bool(self.stop)


class TextStream:
    """The text of one sequence, up to the first stop string that it contains.

    Text that may be the beginning of a stop string is held back. It is returned when it can no
    longer become a stop string, or at the end of the sequence.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopStrings | None = None,
        skip: int = 0,
        min_tokens: int = 0,
    ) -> None:
        """``stop``: the stop strings, if the request has any. ``skip``: this number of characters
        at the beginning is left out. ``min_tokens``: during the first ``min_tokens`` tokens, the
        text is not searched for stop strings. A later token can complete a stop string that begins
        in the text of these tokens."""
        self._detokenizer = detokenizer
        self.stop = stop
        """The stop strings, which all sequences of a request share."""
        self._skip = skip
        self._early = 1 + min_tokens if min_tokens else 0
        """Counts down the tokens until the text is searched for stop strings: each token subtracts
        1, and at 0 the search begins."""
        self._state: State | None = stop.root if stop is not None else None
        """The state of the search, which contains the text that is held back. It is None if the
        request has no stop strings."""

    def push(self, token: int) -> Text:
        """Takes the next token."""
        if self._early:
            self._early -= 1
        return self._take(self._detokenizer.push(token))

    def finish(self) -> Text:
        """Called at the end of the sequence. Returns the text that was held back."""
        text = self._take(self._detokenizer.finish())
        if self.stop is None or self._state is None or text.stopped:
            return text
        rest, self._state = self._state.prefix, self.stop.root
        return Text(text.certain + rest)

    def fork(self) -> TextStream:
        """A copy with the same state."""
        copy = TextStream(self._detokenizer.fork(), self.stop, self._skip)
        copy._early, copy._state = self._early, self._state
        return copy

    def _take(self, new: str) -> Text:
        if self._skip:
            skipped = min(self._skip, len(new))
            self._skip -= skipped
            new = new[skipped:]
        if self.stop is None or self._state is None or not new:
            return Text(new)
        before = self._state.prefix
        self._state, found = self.stop.advance(self._state, new)
        held = before + new
        # The text of the first ``min_tokens`` tokens is not searched.
        if found is not None and not self._early:
            self._state = self.stop.root
            return Text(held[: len(before) + found.at], found.stop)
        return Text(held[: len(held) - self._state.depth])


def detokenizers(tokenizer: Any) -> Callable[[Sequence[int]], Detokenizer]:
    """A function that makes a sequence's detokenizer from the prompt."""
    found = _byte_table(tokenizer)
    if found is not None:
        table = ByteTable.of(found)
        return lambda prompt: ByteDetokenizer(table)
    skipped = _skipped(tokenizer)
    return lambda prompt: WindowDetokenizer(tokenizer, prompt, skipped)


def _skipped(tokenizer: Any) -> frozenset[int]:
    """The special tokens that the tokenizer leaves out when it decodes."""
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        added = backend.get_added_tokens_decoder()
        special.update(token for token, described in added.items() if described.special)
    return frozenset(
        token for token in special if not tokenizer.decode([token], skip_special_tokens=True)
    )


_utf8 = codecs.getincrementaldecoder("utf-8")


class ByteTable(NamedTuple):
    """A byte-level vocabulary."""

    tokens: Sequence[bytes]
    whole: Sequence[str | None]
    """The text of each token; None if its bytes are not valid UTF-8 by themselves."""

    @classmethod
    def of(cls, found: Sequence[bytes]) -> ByteTable:
        """The table of a vocabulary. ``found``: the bytes of each token."""
        return cls(found, [_whole(token) for token in found])


def _whole(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies, such as GPT-2's. Each token of such a vocabulary
    is a string of bytes."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._whole = table.whole
        self._decoder: codecs.IncrementalDecoder | None = None
        """Contains the bytes of an incomplete character; None if no character is incomplete."""

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        decoder = self._decoder
        if decoder is None:
            # A model's vocabulary may be padded. The tokens after the end of the tokenizer's
            # vocabulary have no text.
            text = self._whole[token] if token < len(self._whole) else ""
            if text is not None:
                return text
            decoder = self._decoder = _utf8("replace")
        text = decoder.decode(self._table.tokens[token] if token < len(self._whole) else b"")
        if not decoder.getstate()[0]:
            self._decoder = None
        return text

    def finish(self) -> str:
        """Returns a replacement character if the last character is incomplete, and an empty string
        if it is not."""
        decoder, self._decoder = self._decoder, None
        return decoder.decode(b"", True) if decoder is not None else ""

    def fork(self) -> ByteDetokenizer:
        """A copy with the same state."""
        copy = ByteDetokenizer(self._table)
        if self._decoder is not None:
            copy._decoder = _utf8("replace")
            copy._decoder.setstate(self._decoder.getstate())
        return copy


class WindowDetokenizer:
    """A detokenizer for tokenizers that are not byte-level. It decodes a short window of tokens
    with and without the new tokens. The new text is the difference of the two results.

    The length of the window is bounded, even if tokens never complete a character or do not have
    text.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], skipped: frozenset[int] = frozenset()
    ) -> None:
        """``skipped``: the tokens that the tokenizer leaves out when it decodes."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = list(prompt[-CONTEXT_TOKENS:])
        """The tokens before the pending tokens, whose text was returned."""
        self._pending: list[int] = []
        """The tokens whose text was not returned yet."""
        self._incomplete = 0
        """1 if the last character of the context's text was not returned because it may be
        incomplete; 0 if all characters were returned."""

    def push(self, token: int) -> str:
        """The new text; empty if it would end inside a character."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        sent, now = self._sent(), self._decode(len(self._pending))
        if not now.endswith(REPLACEMENT) and len(now) > sent:
            return self._advance(len(self._pending), sent, now)
        return self._shorten(sent, now) if len(self._pending) > MAX_PENDING_TOKENS else ""

    def finish(self) -> str:
        """The remaining text, even if it ends inside a character."""
        count = len(self._pending)
        return self._advance(count, self._sent(), self._decode(count))

    def fork(self) -> WindowDetokenizer:
        """A copy with the same state."""
        copy = WindowDetokenizer(self._tokenizer, (), self._skipped)
        copy._context = list(self._context)
        copy._pending, copy._incomplete = list(self._pending), self._incomplete
        return copy

    def _sent(self) -> int:
        return len(self._decode(0)) - self._incomplete

    def _decode(self, count: int) -> str:
        tokens = self._context + self._pending[:count]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _advance(self, count: int, sent: int, text: str, incomplete: int = 0) -> str:
        # ``text``: the text of the context and of the first ``count`` pending tokens.
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._incomplete = incomplete
        return text[sent : len(text) - incomplete]

    def _shorten(self, sent: int, now: str) -> str:
        # At most 3 tokens at the end belong to an incomplete character. Decoders write one
        # replacement character for each of these tokens, or one for all of them. The text without
        # these tokens has fewer replacement characters.
        count, text = len(self._pending), now
        for fewer in range(count - 1, count - MAX_PENDING_TOKENS, -1):
            shorter = self._decode(fewer)
            if shorter.count(REPLACEMENT) < text.count(REPLACEMENT):
                count, text = fewer, shorter
        if len(text) > sent:
            # A last character is held back only once, so that the window advances.
            final = self._incomplete and len(text) == sent + self._incomplete
            incomplete = 0 if final else int(text.endswith(REPLACEMENT))
            return self._advance(count, sent, text, incomplete)
        # The context remains, because the text of the next token can depend on it.
        del self._pending[0]
        return ""


def _byte_table(tokenizer: Any) -> list[bytes] | None:
    """The bytes of each token of a byte-level tokenizer, empty for special tokens. None for other
    tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    byte_of = _byte_of_character()
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    table = [b""] * (max(vocabulary.values()) + 1)
    special = set(tokenizer.all_special_ids)
    added = {int(i): str(t) for i, t in tokenizer.added_tokens_decoder.items()}
    for text, index in vocabulary.items():
        if index in special:
            continue
        if index in added:
            table[index] = added[index].encode()
        else:
            try:
                table[index] = bytes(map(byte_of.__getitem__, text))
            except KeyError:
                # A token with characters outside GPT-2's alphabet is plain text.
                table[index] = text.encode()
    return table


@cache
def _byte_of_character() -> dict[str, int]:
    """Maps characters to bytes. This is the reverse of GPT-2's map, which maps printable bytes to
    themselves, and all other bytes to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
