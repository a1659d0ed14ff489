"""Functions of the built-in constraints for the end of a text. They return the tokens before the
end, or a log line about the end."""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.errors import ControllerError
from ..host import Vocabulary


def before_end(tokens: Sequence[int], vocabulary: Vocabulary) -> Sequence[int]:
    """The tokens before the first end-of-sequence token."""
    ends = vocabulary.eos_ids
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


def tokens_before(stop: bytes, text: Sequence[int], vocabulary: Vocabulary) -> list[int] | None:
    """Tokens for the text before the first occurrence of ``stop``, which may begin inside a token.

    The text before ``stop`` is tokenized again, so the result may differ from the first tokens of
    ``text``. None if the text does not contain ``stop``, or if the vocabulary cannot write the text
    before ``stop``.
    """
    before, found, _ = b"".join(map(vocabulary.token, text)).partition(stop)
    try:
        return vocabulary.tokenize(before) if found else None
    except ControllerError:
        return None


def closing_line(appended: int, dropped: int, max_tokens: int) -> str:
    """The log line about a text that was closed before ``max_tokens`` would have cut it off.

    ``appended``, ``dropped``: the numbers of tokens that the closing appends and drops.
    """
    if not appended and not dropped:
        return f"the text was ended here, where it is complete: max_tokens is {max_tokens}"
    more = "1 more token" if appended == 1 else f"{appended} more tokens"
    after = f" after {dropped} were dropped" if dropped else ""
    return f"the text was closed with {more}{after}: max_tokens is {max_tokens}"
