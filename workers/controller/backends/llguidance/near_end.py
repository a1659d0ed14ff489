"""Which tokens may come where few are left beyond those that complete a text of JSON.

There a mask has only tokens after which the text can surely be completed: the beginnings of the
completion that is known, what a string of any text goes on with, and, of the others, those for
which another completion is found that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .completion import Completion
from .token_sets import TokenSets, Words, allowed, has, put

MAX_OTHERS = 8
"""Tokens of one mask that are tried beside the beginnings of the completion."""
REWRITTEN = 4
"""Tokens that a completion may take in addition, where another than its first token begins it."""
FEW = 64
"""Where a mask has more tokens, only those of one byte are tried."""
MAX_STEPS = 60
"""States that searches for other completions visit in one sequence."""
AT_ONCE = 2
"""Searches for one mask."""
NAMED = 3
"""Tokens by which a name of one's choice may grow, where it could be mistaken for one of the
schema's."""
PATTERN = 8
"""Tokens by which a string may grow that has any text, where it could have a pattern."""
MANY = 256
"""Where a mask has more tokens in a string, they are not names or values that are listed."""

Tokenize = Callable[[bytes], Sequence[int] | None]


class NearEnd:
    """Restricts masks; the caller holds the grammar's lock."""

    def __init__(self, sets: TokenSets, string: int, ends: Sequence[int]) -> None:
        """``string``: tokens by which one string may grow that has to match a pattern; 0 where the
        schema has no patterns. ``ends``: the end-of-sequence tokens."""
        self._sets = sets
        self._string = string
        self._ends = list(ends)
        self._steps = MAX_STEPS
        self._begun: tuple[bytes, list[int]] = (b"", [])
        """The last completion, and the tokens that are beginnings of it."""
        self._set = sets.whole
        self._kept: list[int] = []
        """The set that restricted the last mask of a string, beside ``_set``."""
        self.rests: dict[int, bytes] = {}
        """The completion of the text after some tokens of the last mask."""

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
        """Restricts a mask before which ``found`` completes the text, in ``tokens``, with ``spare``
        more than these left. ``ending``: what may end is to end soon.

        None unless the text is in a string of any text, behind which ``found`` is: then how many
        tokens more may complete the text behind any tokens of ``TokenSets.whole``.
        """
        sets = self._sets
        self.rests = {}
        room = len(tokens) + spare
        kept = [token for token in self._ends if has(words, token)]
        # Behind another beginning than its first token, the rest may take more tokens.
        if found != self._begun[0]:
            self._begun = found, sets.prefixes(found)
        first = list(tokens[:1]) if spare <= REWRITTEN else self._begun[1]
        kept += [token for token in first if has(words, token)]
        if completion.in_string:
            name = found.startswith(b'":')
            more: int | None
            if sets.is_free(words) and (not self._string or found.startswith(b'"')):
                # A pattern that any text may follow hardly needs much more behind it.
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
        """Restricts a mask as the last one, in the same string of any text, for which ``restrict``
        returned a number; whether it still is one."""
        if not self.is_free(words, found):
            return False
        words &= self._set
        put(words, self._kept)
        return True

    def is_free(self, words: Words, found: bytes) -> bool:
        """Whether a mask is that of a string of any text, which ``found`` still completes."""
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
        """Those of other tokens behind which a completion was found that fits in ``room`` tokens,
        of which ``found`` leaves more than one."""
        text = self._sets.text
        fitting: list[int] = []
        digits = self._sets.digits
        number = digits and digits[0] not in kept and set(digits).issubset(others)
        if number and all(completion.fits(text(digits[at]) + found) for at in (0, -1)):
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
                # In its place, as in a date, or before it, as in a number.
                for one in (found[len(written) :], found):
                    if completion.fits(written + one):
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
        """A completion behind a token, if it surely fits also behind a longer one with the same
        text."""
        after = completion.copy()
        rest = after.find() if after.append(written) else None
        self._steps -= after.steps
        tokens = None if rest is None else tokenize(rest)
        return rest if tokens is not None and len(tokens) + 1 + REWRITTEN <= room else None


def _is_searched(completion: Completion, found: bytes) -> bool:
    """Whether other completions are searched for: not in a string that is a value."""
    if not completion.in_string:
        return True
    _, quote, behind = found.partition(b'"')
    return bool(quote) and behind.startswith(b":")
