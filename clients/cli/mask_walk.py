"""Walks a text through the grammar backend, mask by mask, in this process."""

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
    """The mask at one place of the text."""

    bits: bytes
    """Bit i set: token i is allowed."""
    flags: int
    """``ANY``, ``FORCED`` and ``COMPLETE``."""
    seconds: float
    """How long the grammar backend took, including the copy."""

    def allows(self, token: int) -> bool:
        """Whether a token is allowed."""
        return bool(self.bits[token >> 3] >> (token & 7) & 1)

    @property
    def allowed_count(self) -> int:
        """Number of allowed tokens, including the end of the sequence if it is allowed."""
        return int.from_bytes(self.bits, "little").bit_count()

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self.flags & COMPLETE)


class MaskStep(NamedTuple):
    """A token of the text, or its end (None), with the mask before it."""

    offset: int
    """In bytes."""
    token: int | None
    choices: int
    """Number of tokens that the mask allowed."""
    seconds: float
    """How long the mask took."""
    allowed: bool
    """Whether the token is allowed, or the text may end."""
    forced: bool
    """Whether the token is forced: the grammar allows no other text here."""


class Guest:
    """A new instance of one grammar, with an empty cache of masks."""

    def __init__(self, tables: bytes, vocabulary: TokenizerVocabulary) -> None:
        self.vocabulary = vocabulary
        started = time.perf_counter()
        module = GrammarModule(make_engine(Limits()))
        self._guest = GrammarInstance(module, vocabulary, tables)
        self.seconds = time.perf_counter() - started
        """How long the instance took to create: code, vocabulary and tables."""
        self._words = memoryview(bytearray(4 * -(-vocabulary.size // 32)))

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return self._guest.size

    def walk(self, tokens: Sequence[int]) -> Iterator[MaskStep]:
        """Walks through the text of some tokens: one step for each token and one for the end. The
        last step is the first that is not allowed. Raises ServiceError if a mask and an append
        disagree."""
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
                        f"{at}, but to append it {'fails' if allowed else 'succeeds'}",
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
        """The mask after some tokens, and the forced tokens there; None if these tokens are not
        allowed."""
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
