"""The tokens of the part of a text before a stop string, or before its end."""

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

    They are the tokenizer's own and not always those of ``text``. None where the text does not have
    ``stop``, or where its beginning cannot be written in tokens.
    """
    before, found, _ = b"".join(map(vocabulary.token, text)).partition(stop)
    try:
        return vocabulary.tokenize(before) if found else None
    except ControllerError:
        return None
