"""The special tokens that controllers can look up, by number and by name."""

from __future__ import annotations

from enum import IntEnum


class SpecialToken(IntEnum):
    """A role that a token of a vocabulary may have.

    The first five have the numbers of AICI's ``SpecialToken`` (``aici_abi/src/toktree.rs`` of
    January 2024). In ``VocabularyName.special`` and in Python controllers, the name of a role is
    written in lower case.
    """

    UNK = 0
    PAD = 1
    SEP = 2
    BOS = 3
    EOS = 4
    CLS = 5
    MASK = 6
    TURN_START = 7
    """The first special token of an assistant's turn, in the model's chat template."""
    TURN_END = 8
    """The special token that ends an assistant's turn."""

    @property
    def role(self) -> str:
        """The name of the role in lower case, as in ``VocabularyName.special``."""
        return self.name.lower()
