"""What the worker gives the controller of one sequence: tokens, variables, a log, its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .limits import Limits
from .logs import Log


class Vocabulary(Protocol):
    """The tokens of a model, as ``vocabulary.TokenizerVocabulary`` makes them of its tokenizer."""

    size: int
    """Token ids are below this; a mask has ceil(size / 32) words."""
    eos: int
    """The token that ends a sequence; -1 where the model has none."""
    eos_ids: tuple[int, ...]
    """All tokens that do."""
    fingerprint: str

    def token(self, number: int) -> bytes:
        """The bytes of a token; empty for a special one and for an id that is none."""

    def tokenize(self, text: bytes) -> list[int]:
        """The tokens of UTF-8 text, without special ones; bytes that are no UTF-8 go byte by byte.

        Raises ControllerError where the tokenizer cannot write them."""

    @property
    def trie(self) -> bytes:
        """The token trie, in the binary form that AICI's guests read."""


class Stored(NamedTuple):
    """A variable: its value, and how often it was written."""

    version: int
    value: bytes


class Written(NamedTuple):
    """The answer to a write: the new version, or what is there where the version did not fit."""

    ok: bool
    version: int
    """The variable's version now; 0: there is no such variable."""
    value: bytes = b""
    """Where it did not fit: the value that is there."""


class Variables(Protocol):
    """The variables of a request, as one of its sequences reaches them. Calls wait for the answer.

    Each raises ControllerError where a name, a value or the quota is wrong, and where the state
    worker does not answer.
    """

    def get(self, name: str) -> Stored | None:
        """A variable; None where there is none."""

    def set(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Writes a variable, or only where its version is this one (0: none yet)."""

    def append(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Appends to a variable; one that is not there is made."""


@dataclass(slots=True, eq=False)
class Host:
    """Everything around one sequence's controller."""

    request: int
    seq: int
    arg: bytes
    """What the user gave as ``controller_arg``: text as UTF-8, anything else as JSON."""
    vocabulary: Vocabulary
    variables: Variables
    log: Log
    limits: Limits
    max_tokens: int = 0
    """Tokens that the sequence may have beyond its prompt."""
    ignore_eos: bool = False
    """A sequence goes on after an end-of-sequence token, whatever its controller does."""


def allowed(mask: memoryview | bytes, size: int) -> Sequence[int]:
    """The tokens that a mask allows, for people and tests."""
    data = bytes(mask)
    return [i for i in range(size) if data[i >> 3] >> (i & 7) & 1]
