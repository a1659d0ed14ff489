"""Checks the length of a text for a model before the text is tokenized, because tokenizing takes
seconds for each megabyte.

A token represents a bounded number of bytes. So a text with more than ``max_tokens`` times this
number of bytes cannot fit. But some tokenizers shorten a text first: they normalize it (as
Unicode's NFKC does), or have one token for all unknown text. For such a tokenizer, four times as
much text is allowed. A text that would shrink even more, such as a long run of spaces that becomes
one space, is refused although it might fit.

Most tokens are much shorter than the longest token. So a text within this bound may still have far
too many tokens. Therefore, the tokens of a long text are first counted segment by segment, and the
count stops at twice the allowed number of tokens. The borders between segments can add tokens, but
do not double the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .errors import Code, RequestError

SEGMENT_CHARS = 65_536
"""Number of characters of a segment. If a text has more characters, its tokens are counted in
segments before the text is tokenized."""
MAX_SHORTENING = 4
"""The factor by which the bound grows for a tokenizer that shortens text."""


class TokenSize(NamedTuple):
    """The amount of text that a token of a tokenizer can represent."""

    max_bytes: int
    """Bytes of the tokenizer's longest token, in UTF-8."""
    shortens: bool = True
    """Whether a token may represent more text than its entry in the vocabulary has."""


def token_size(vocabulary: Iterable[str | bytes], byte_level: bool, shortens: bool) -> TokenSize:
    """The size of the longest token of a vocabulary. ``byte_level``: whether each character in the
    vocabulary stands for one byte."""
    sizes = (
        len(token)
        if byte_level or isinstance(token, bytes)
        else len(token.encode(errors="replace"))
        for token in vocabulary
    )
    return TokenSize(max(sizes, default=1) or 1, shortens)


def size_of_tokenizer(tokenizer: Mapping[str, Any]) -> TokenSize:
    """The token size of a tokenizer in the tokenizers library's form, decoded from JSON."""
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab") or {}
    pieces = (p if isinstance(p, str) else p[0] for p in vocabulary)
    byte_level = "ByteLevel" in _types(tokenizer.get("pre_tokenizer"))
    size = token_size(pieces, byte_level, not byte_level or tokenizer.get("normalizer") is not None)
    added = token_size((a["content"] for a in tokenizer.get("added_tokens") or []), False, False)
    return size._replace(max_bytes=max(size.max_bytes, added.max_bytes))


def _types(part: Any) -> set[str]:
    """The ``type`` of a part of a tokenizer's JSON, and the types of the parts inside this part."""
    if not isinstance(part, Mapping):
        return set()
    parts = part.get("pretokenizers") or []
    return {str(part.get("type"))}.union(*map(_types, parts))


class TextBound(NamedTuple):
    """The amount of text that one request may have for a model."""

    model: str
    max_tokens: int
    """Maximum number of tokens of a prompt."""
    size: TokenSize

    @property
    def max_bytes(self) -> int:
        """Maximum number of bytes of all texts of a request, in UTF-8."""
        shortening = MAX_SHORTENING if self.size.shortens else 1
        return self.max_tokens * self.size.max_bytes * shortening

    def check(self, texts: Iterable[str], path: str = "$.prompt") -> int:
        """Returns the number of bytes of ``texts``; raises RequestError if ``texts`` are too long
        for the model."""
        texts = list(texts)
        # Each character has at least one byte, so a text with too many characters is not encoded.
        self.check_bytes(sum(map(len, texts)), path)
        num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        self.check_bytes(num_bytes, path)
        return num_bytes

    def check_bytes(self, num_bytes: int, path: str = "$.prompt") -> None:
        """Raises RequestError if a text of ``num_bytes`` bytes is too long for the model."""
        if num_bytes > self.max_bytes:
            shortens = f", times {MAX_SHORTENING} because the tokenizer may shorten text"
            factor = shortens if self.size.shortens else ""
            raise RequestError(
                Code.PROMPT_TOO_LONG,
                f"the text has {num_bytes} bytes or more; {self.model} takes at most "
                f"{self.max_bytes} bytes of text ({self.max_tokens} tokens of at most "
                f"{self.size.max_bytes} bytes each{factor}); send a shorter text",
                path=path,
            )

    def check_count(
        self,
        text: str,
        count: Callable[[str], int],
        path: str = "$.prompt",
        go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Counts the tokens of a long text in segments; raises RequestError if there are more than
        twice ``max_tokens``.

        ``count`` returns the number of tokens of a segment. Counting stops, without an error, when
        ``go_on`` returns false.
        """
        found = 0
        for start in range(0, len(text) if len(text) > SEGMENT_CHARS else 0, SEGMENT_CHARS):
            if not go_on():
                return
            end = start + SEGMENT_CHARS
            found += count(text[start:end])
            if found > 2 * self.max_tokens:
                raise RequestError(
                    Code.PROMPT_TOO_LONG,
                    f"the first {min(end, len(text))} of {len(text)} characters of the text have "
                    f"{found} tokens; {self.model} takes at most {self.max_tokens}; send a "
                    "shorter text",
                    path=path,
                )
