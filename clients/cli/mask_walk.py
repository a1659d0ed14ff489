"""Runs the grammar backend in this process, and computes the mask before each token of a text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from ...protocol.errors import Code, ServiceError
from ...workers.controller.backends.grammar.grammar_instance import (
    COMPLETE,
    FORCED,
    GrammarInstance,
    GrammarModule,
)
from ...workers.controller.limits import Limits
from ...workers.controller.tokens.vocabulary import TokenizerVocabulary
from ...workers.controller.wasm.sandbox import make_engine


class Mask(NamedTuple):
    """The token mask at one place of a text."""

    bits: bytes
    """The mask. Bit i is set if token i is allowed."""
    flags: int
    """The flags ``ANY``, ``FORCED`` and ``COMPLETE`` of ``grammar_instance.py``."""
    seconds: float
    """Time in which the grammar backend computed and copied the mask, in seconds."""

    def allows(self, token: int) -> bool:
        """Whether a token is allowed."""
        return bool(self.bits[token >> 3] >> (token & 7) & 1)

    @property
    def allowed_count(self) -> int:
        """Number of allowed tokens, including an end-of-sequence token if it is allowed."""
        return int.from_bytes(self.bits, "little").bit_count()

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self.flags & COMPLETE)


class MaskStep(NamedTuple):
    """A token of a text, and the mask at its place. If ``token`` is None, the step is the end of
    the text."""

    offset: int
    """Place of the token in the text, in bytes."""
    token: int | None
    choices: int
    """Number of tokens that the mask allowed."""
    seconds: float
    """Time in which the grammar backend computed and copied the mask, in seconds."""
    allowed: bool
    """Whether the mask allows the token; at the end of the text, whether the text may end."""
    forced: bool
    """Whether the token is forced: the grammar allows only one continuation here."""


class Guest:
    """A sandbox instance for one grammar. Its mask cache is empty at first."""

    def __init__(self, tables: bytes, vocabulary: TokenizerVocabulary) -> None:
        self.vocabulary = vocabulary
        started = time.perf_counter()
        module = GrammarModule(make_engine(Limits()))
        self._guest = GrammarInstance(module, vocabulary, tables)
        self.seconds = time.perf_counter() - started
        """Time to create the instance with its code, vocabulary and tables, in seconds."""
        self._words = memoryview(bytearray(4 * -(-vocabulary.size // 32)))

    @property
    def size(self) -> int:
        """Size of the instance's memory, in bytes."""
        return self._guest.size

    def walk(self, tokens: Sequence[int]) -> Iterator[MaskStep]:
        """Yields a step for each token and a step for the end. Stops after the first token that is
        not allowed. Raises ServiceError if a mask allows a token that cannot be appended, or
        forbids a token that can be appended."""
        guest, place = self._guest, self._guest.start()
        at = forced_to = 0
        try:
            for token in tokens:
                mask = self._mask(place)
                if mask.flags & FORCED and at >= forced_to:
                    forced_to = at + len(self.vocabulary.bytes_of(guest.forced(place)))
                allowed = mask.allows(token)
                if bool(guest.append(place, [token])) != allowed:
                    raise ServiceError(
                        Code.INTERNAL,
                        f"the mask {'allows' if allowed else 'forbids'} the token {token} at byte "
                        f"{at}, but the append of that token {'fails' if allowed else 'succeeds'}",
                    )
                end = at + len(self.vocabulary.token(token))
                forced = allowed and end <= forced_to
                yield MaskStep(at, token, mask.allowed_count, mask.seconds, allowed, forced)
                if not allowed:
                    return
                at = end
            mask = self._mask(place)
            yield MaskStep(at, None, mask.allowed_count, mask.seconds, mask.complete, False)
        finally:
            guest.end(place)

    def after(self, tokens: Sequence[int]) -> tuple[Mask, list[int]] | None:
        """The mask and the forced tokens after ``tokens``; None if ``tokens`` are not allowed."""
        guest, place = self._guest, self._guest.start()
        try:
            if guest.append(place, tokens) < len(tokens):
                return None
            mask = self._mask(place)
            return mask, guest.forced(place) if mask.flags & FORCED else []
        finally:
            guest.end(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._guest.close()

    def _mask(self, place: int) -> Mask:
        started = time.perf_counter()
        flags = self._guest.mask(place, self._words)
        seconds = time.perf_counter() - started
        return Mask(bytes(self._words), flags, seconds)
