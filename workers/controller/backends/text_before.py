"""The tokens of a text before its end or before a stop string, and the log line about the end."""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.errors import ControllerError
from ..host import Vocabulary


def before_end(tokens: Sequence[int], vocabulary: Vocabulary) -> Sequence[int]:
    """The tokens before the first end-of-sequence token."""
    ends = vocabulary.eos_ids
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


def tokens_before(stop: bytes, text: Sequence[int], vocabulary: Vocabulary) -> list[int] | None:
    """Tokens of the text before the first occurrence of ``stop``, which may be inside of a token.

    The result has the tokenizer's own tokens, which may differ from those of ``text``. None if the
    text does not contain ``stop``, or if its beginning cannot be written in tokens.
    """
    before, found, _ = b"".join(map(vocabulary.token, text)).partition(stop)
    try:
        return vocabulary.tokenize(before) if found else None
    except ControllerError:
        return None


def closing_line(appended: int, dropped: int, max_tokens: int) -> str:
    """The log line about a text that ends before ``max_tokens`` cuts it off.

    ``appended``, ``dropped``: how many tokens the closing adds and removes.
    """
    if not appended and not dropped:
        return f"the text was ended here, where it is complete: max_tokens is {max_tokens}"
    more = "1 more token" if appended == 1 else f"{appended} more tokens"
    after = f" after {dropped} were dropped" if dropped else ""
    return f"the text was closed with {more}{after}: max_tokens is {max_tokens}"
