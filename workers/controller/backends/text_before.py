"""The tokens of the part of a text before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.errors import ControllerError
from ..host import Vocabulary


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
