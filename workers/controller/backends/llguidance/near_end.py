"""Restricts the masks of a JSON text when few spare tokens are left.

A *completion* is a text that completes the text so far. Tokens are *spare* if ``max_tokens`` allows
them in addition to the completion. A *string of any text* is a string that may contain every
character.

A restricted mask allows only tokens after which the text can certainly be completed. Such a token
is a prefix of the known completion, or continues a string of any text. Or a search finds another
completion that fits after the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from .checking.budget import Budget
from .completion import Completion
from .token_sets import TokenSets, Words, allowed, has, put

MAX_OTHERS = 8
"""Maximum tokens of one mask that are tried in addition to the prefixes of the completion."""
REWRITTEN = 4
"""The text may continue with a token that is a prefix of the completion, but not the completion's
first token. The rest of the completion is then tokenized differently, and the completion may become
longer by at most this number of tokens."""
FEW = 64
"""If a mask has more tokens than this, only its tokens of one byte are tried."""
MAX_STEPS = 30
"""Maximum ``Completion.steps`` of the searches for other completions in one sequence."""
MAX_CHECKS = 500
"""Maximum steps of the checks of other completions in one sequence (``checking.budget.Budget``)."""
AT_ONCE = 2
"""Maximum searches for one mask."""
NAMED = 3
"""Number of tokens that are reserved while a property's name is written, if the name may be any
text. The name may need these tokens in order to differ from the names in the schema."""
PATTERN = 8
"""Maximum number of tokens that are reserved in a string of any text if the schema has patterns or
formats. A pattern that may match anywhere in a string allows every character before its match."""
MANY = 256
"""If a mask inside a string has more tokens than this, the string is assumed not to be limited to a
list of names or values."""

Tokenize = Callable[[bytes], Sequence[int] | None]


class NearEnd:
    """Restricts the masks of one sequence. The caller holds the grammar's lock during each call."""

    def __init__(self, sets: TokenSets, string: int, ends: Sequence[int]) -> None:
        """``string``: number of tokens by which a string that has to match a pattern may grow; 0 if
        the schema has no patterns. ``ends``: the end-of-sequence tokens."""
        self._sets = sets
        self._string = string
        self._ends = list(ends)
        self._steps = MAX_STEPS
        self._budget = Budget(MAX_CHECKS)
        self._begun: tuple[bytes, list[int]] = (b"", [])
        """The last completion, and the tokens that are prefixes of it."""
        self._set = sets.whole
        self._kept: list[int] = []
        """The tokens that the last mask of a string allowed in addition to ``_set``."""
        self.rests: dict[int, bytes] = {}
        """Maps some tokens of the last mask to the bytes that complete the text after the token."""

    def copy(self) -> NearEnd:
        """A copy for a fork of the sequence."""
        other = copy(self)
        other._budget = Budget(self._budget.left)
        return other

    def restrict(
        self,
        words: Words,
        completion: Completion,
        found: bytes,
        tokens: Sequence[int],
        spare: int,
        ending: bool,
        tokenize: Tokenize,
    ) -> int | None:
        """Restricts a mask. ``found`` is a completion of the text, ``tokens`` are its tokens, and
        ``spare`` is the number of tokens that are left in addition to them. ``ending``: whether
        open values should end soon.

        Inside a string of any text, tokens of ``TokenSets.whole`` make the completion longer by at
        most a fixed number of tokens, even if many of them follow. If ``spare`` is larger than this
        number, the mask keeps only these tokens and prefixes of the completion, and the number is
        returned. In all other cases, returns None.
        """
        sets = self._sets
        self.rests = {}
        room = len(tokens) + spare
        kept = [token for token in self._ends if has(words, token)]
        # If the text continues with a prefix of ``found`` other than its first token, the rest may
        # take more tokens.
        if found != self._begun[0]:
            self._begun = found, sets.prefixes(found)
        first = list(tokens[:1]) if spare <= REWRITTEN else self._begun[1]
        kept += [token for token in first if has(words, token)]
        if completion.in_string:
            name = found.startswith(b'":')
            more: int | None
            if sets.is_free(words) and (not self._string or found.startswith(b'"')):
                # In a string of any text, a match of a pattern needs only a few more tokens.
                more = NAMED if name else min(self._string, PATTERN)
                whole = spare > more
            else:
                more = None
                whole = spare > self._string > 0 and np.bitwise_count(words).sum() > MANY
            if whole:
                self._set = sets.ending if ending else sets.whole
                self._kept = kept
                words &= self._set
                put(words, kept)
                return more
        others: list[int] = []
        if spare > REWRITTEN and not ending:
            few = np.bitwise_count(words).sum() <= FEW
            tried = allowed(words if few else words & sets.single)
            others = self._others(tried, kept, completion, found, room, tokenize)
        if kept or others:
            words[:] = 0
            put(words, kept)
            put(words, others)
        return None

    def restrict_again(self, words: Words, found: bytes) -> bool:
        """If the text is still in a string of any text, restricts a mask in the same way as
        ``restrict`` restricted the last mask. Returns whether the text is in such a string."""
        if not self.is_free(words, found):
            return False
        words &= self._set
        put(words, self._kept)
        return True

    def is_free(self, words: Words, found: bytes) -> bool:
        """Whether a mask belongs to a string of any text that ``found`` still completes."""
        first = self._sets.bytes.get(found[:1])
        return first is not None and has(words, first) and self._sets.is_free(words)

    def _others(
        self,
        others: list[int],
        kept: list[int],
        completion: Completion,
        found: bytes,
        room: int,
        tokenize: Tokenize,
    ) -> list[int]:
        """The tokens of ``others`` after which a known or newly found completion fits in ``room``
        tokens. ``found`` must have at least two tokens fewer than ``room``."""
        text = self._sets.text
        fitting: list[int] = []
        digits = self._sets.digits
        number = digits and digits[0] not in kept and set(digits).issubset(others)
        if number and all(
            completion.fits(text(digits[at]) + found, self._budget) for at in (0, -1)
        ):
            kept, fitting = [*kept, *digits], list(digits)
        left = AT_ONCE if _is_searched(completion, found) else 0
        known: list[bytes] = []
        untried = sorted(set(others).difference(kept), key=lambda token: len(text(token)))
        for token in untried[:MAX_OTHERS]:
            written = text(token)
            if not written:
                continue
            rest = next((one[len(written) :] for one in known if one.startswith(written)), None)
            if rest is None:
                # The token replaces the first bytes of the completion, as in a date, or precedes
                # the completion, as in a number.
                for one in (found[len(written) :], found):
                    if completion.fits(written + one, self._budget):
                        fitting.append(token)
                        self.rests[token] = one
                        break
                else:
                    if left and self._steps > 0:
                        left -= 1
                        rest = self._search(completion, written, room, tokenize)
                        if rest is not None:
                            known.append(written + rest)
            if rest is not None:
                fitting.append(token)
                self.rests[token] = rest
        return fitting

    def _search(
        self, completion: Completion, written: bytes, room: int, tokenize: Tokenize
    ) -> bytes | None:
        """A completion of the text after a token; None if the search does not find a completion
        that certainly fits in ``room`` tokens."""
        after = completion.copy()
        rest = after.find(budget=self._budget) if after.append(written) else None
        self._steps -= after.steps
        tokens = None if rest is None else tokenize(rest)
        return rest if tokens is not None and len(tokens) + 1 + REWRITTEN <= room else None


def _is_searched(completion: Completion, found: bytes) -> bool:
    """Whether to search for other completions. In a string that is a value, no search is made."""
    if not completion.in_string:
        return True
    _, quote, after = found.partition(b'"')
    return bool(quote) and after.startswith(b":")
