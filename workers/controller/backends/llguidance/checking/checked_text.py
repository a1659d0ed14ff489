"""Checks the text of one sequence. Removes a token from a mask if the token would end a value that
violates the schema (``walks``). Tokens are *forced* if only their text may follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..token_sets import Words, allowed, clear, words_of
from .budget import Budget, Exhausted
from .walks import Checks, Invalid, Walk

MAX_STEPS = 5_000
"""Maximum steps of the checks for one mask. A step takes up to 10 us. When the steps are used up,
the tokens that have not been checked are removed from the mask if they may end a value."""
MAX_BRACKETS = 3
"""``EndingTokens`` groups tokens by their number of closing brackets, up to this number."""


class EndingTokens:
    """Sets of a vocabulary's tokens that may end values."""

    def __init__(self, size: int, words: int, token: Callable[[int], bytes]) -> None:
        """``words``: number of u32 words of a mask. This constructor takes about 0.1 s for 131,072
        tokens."""
        quoted: list[int] = []
        brackets: list[list[int]] = [[] for _ in range(MAX_BRACKETS + 1)]
        for number in range(size):
            text = token(number)
            if b'"' in text:
                quoted.append(number)
            count = text.count(b"}") + text.count(b"]")
            for least in range(1, min(count, MAX_BRACKETS) + 1):
                brackets[least].append(number)
        self.quoted = words_of(quoted, words)
        """Tokens with a quote."""
        self.brackets = [words_of(some, words) for some in brackets]
        """For each number up to ``MAX_BRACKETS``: the tokens with at least this number of closing
        brackets."""


class CheckedText:
    """The text of a sequence so far. The caller holds the grammar's lock during each call."""

    def __init__(
        self, checks: Checks, ending: EndingTokens, token: Callable[[int], bytes], ends: Words
    ) -> None:
        """``token``: the bytes of a token. ``ends``: the end-of-sequence tokens."""
        self._checks = checks
        self._ending = ending
        self._token = token
        self._ends = ends
        self._text = b""
        self._walk = Walk()

    def copy(self) -> CheckedText:
        """A copy with the same text."""
        other = CheckedText(self._checks, self._ending, self._token, self._ends)
        other._text, other._walk = self._text, self._walk
        return other

    def append(self, tokens: Sequence[int]) -> bool:
        """Appends tokens; returns False if they end an invalid value."""
        added = b"".join(map(self._token, tokens))
        try:
            self._walk = self._checks.after(self._walk, self._text, added, Budget(MAX_STEPS))
        except (Invalid, Exhausted):
            return False
        self._text += added
        return True

    def allowed(self, forced: Sequence[int]) -> list[int]:
        """The forced tokens before the first token that would end an invalid value."""
        walk, text, kept, budget = self._walk, self._text, list[int](), Budget(MAX_STEPS)
        for token in forced:
            added = self._token(token)
            try:
                walk = self._checks.after(walk, text, added, budget)
            except (Invalid, Exhausted):
                break
            text += added
            kept.append(token)
        return kept

    @property
    def may_end(self) -> bool:
        """Whether the checks allow the text to end here."""
        try:
            return self._checks.ends(self._walk, self._text, Budget(MAX_STEPS))
        except Exhausted:
            return False

    def restrict(self, words: Words) -> None:
        """Removes from a mask the tokens that would end an invalid value."""
        ending = self._may_end_values()
        if ending is not None:
            tokens = allowed(words & ending)
            tokens.sort(key=lambda token: len(self._token(token)))
        else:
            tokens = allowed(words & ~self._ends)
        budget = Budget(MAX_STEPS)
        clear(words, [token for token in tokens if not self._allows(token, budget)])
        if (words & self._ends).any() and not self.may_end:
            words &= ~self._ends

    # --- inside ---------------------------------------------------------------------------------

    def _allows(self, token: int, budget: Budget) -> bool:
        try:
            self._checks.after(self._walk, self._text, self._token(token), budget)
        except (Invalid, Exhausted):
            return False
        return True

    def _may_end_values(self) -> Words | None:
        """The tokens that may end a value with obligations; None if any token may."""
        walk = self._walk
        depth, frame = 0, walk.frame
        if not self._checks.parts_of(walk):
            # The innermost ``depth`` arrays and objects have no obligations. Only a token that ends
            # all of them may end a value with obligations.
            while frame is not None and not frame.parts:
                depth, frame = depth + 1, frame.outer
            if depth:
                return self._ending.brackets[min(depth, MAX_BRACKETS)]
        in_string = walk.kind in ("string", "name")
        return self._ending.quoted if in_string and not self._checks.lists_items(walk) else None
