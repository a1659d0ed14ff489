"""Tokenizes by longest match. A text is tokenized in this way if the tokens of the model's
tokenizer would not give exactly this text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ....protocol.errors import Code, ControllerError

CHECKED_STEPS = 256
"""Number of steps of a search between two calls of ``check``."""
_SHOWN_BYTES = 20


class LongestMatch:
    """Tokenizes by longest match. If several tokens have the same bytes, the highest id is used, as
    in the trie."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """``tokens[i]`` are the bytes of token i; empty for a token that must not be used for
        text."""
        self._number = {token: number for number, token in enumerate(tokens) if token}
        lengths: dict[bytes, set[int]] = {}
        for token in self._number:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(found)[::-1] for start, found in lengths.items()}
        """The key is the first two bytes of a token, or its only byte. The value is the lengths of
        the tokens that begin with the key, in descending order."""
        self.has_every_byte = all(bytes([byte]) in self._number for byte in range(256))
        """Whether each byte is a token."""

    def __call__(self, text: bytes, check: Callable[[], None] | None = None) -> list[int]:
        """The tokens of a text: at each position, from left to right, the longest token after which
        the rest can still be tokenized.

        ``check`` is called after every ``CHECKED_STEPS`` steps of the search. Raises
        ControllerError if no tokenization exists.
        """
        starts = [0]
        choices = [self._at(text, 0)]
        tokens: list[int] = []
        hopeless: set[int] = set()
        steps = 0
        while starts and starts[-1] < len(text):
            steps += 1
            if check is not None and steps % CHECKED_STEPS == 0:
                check()
            length, number = next(choices[-1], (0, -1))
            at = starts[-1] + length
            if not length:
                choices.pop()
                hopeless.add(starts.pop())
                if tokens:
                    tokens.pop()
            elif at not in hopeless:
                tokens.append(number)
                starts.append(at)
                choices.append(self._at(text, at))
        if not starts:
            raise _cannot_write(text, max(hopeless))
        return tokens

    def _at(self, text: bytes, at: int) -> Iterator[tuple[int, int]]:
        """The tokens that match at a position, as (length, token), the longest first."""
        start = text[at : at + 2]
        for length in self._lengths.get(start, ()):
            number = self._number.get(text[at : at + length])
            if number is not None and at + length <= len(text):
                yield length, number
        if len(start) == 2 and (number := self._number.get(start[:1])) is not None:
            yield 1, number


def _cannot_write(text: bytes, at: int) -> ControllerError:
    return ControllerError(
        Code.CONTROLLER_FAILED,
        f"the model's vocabulary does not have a token for {text[at : at + _SHOWN_BYTES]!r}, at "
        f"byte {at} of {text[:80]!r}",
    )
