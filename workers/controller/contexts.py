"""Saves and opens contexts. A *context* has the tokens of a sequence that a program has saved under
a name. Programs of the same tenant can open the context, at each worker with the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from msgspec import MsgspecError, Struct, msgpack

from ...protocol.decoders import msgpack_decoder
from .host import Vocabulary
from .variable_calls import SequenceVariables

MAX_NAME_BYTES = 256
MAX_PIN_S = 3600.0
"""Maximum time in seconds for which the GPU worker keeps (pins) the blocks of a context in its KV
cache."""


class SavedTokens(Struct, array_like=True):
    """The content of a context."""

    fingerprint: str
    """The fingerprint of the model's tokenizer."""
    size: int
    """The number of tokens of the vocabulary."""
    tokens: bytes
    """Token ids as little-endian u32."""


class Refusal(Exception):
    """A context cannot be saved or opened. The message is the reason, which the program
    receives."""


_encode = msgpack.Encoder().encode
_decode = msgpack_decoder(SavedTokens).decode


def save(
    variables: SequenceVariables,
    words: Vocabulary,
    name: str,
    tokens: Sequence[int],
    pin_s: float,
    most: int,
) -> None:
    """Saves tokens as the context ``name``. Raises Refusal if an argument is not valid, or if there
    are more than ``most`` tokens."""
    _check(name)
    if not 0 <= pin_s <= MAX_PIN_S:
        raise Refusal(f"save(pin_s={pin_s!r}); expected 0 to {MAX_PIN_S:g} seconds")
    if not 0 < len(tokens) <= most or not all(0 <= token < words.size for token in tokens):
        raise Refusal(
            f"a context of {len(tokens)} tokens cannot be saved; expected 1 to {most} tokens"
        )
    data = np.array(tokens, "<u4").tobytes()
    variables.context("save", name, _encode(SavedTokens(words.fingerprint, words.size, data)))


def opened(variables: SequenceVariables, words: Vocabulary, name: str) -> list[int]:
    """The tokens of the context ``name``. Raises Refusal if the tenant does not have this context,
    or if it belongs to another model."""
    _check(name)
    content = variables.context("open", name)
    if content is None:
        raise Refusal(
            f"the context {name!r} does not exist; save it first, with await ctx.save({name!r})"
        )
    try:
        saved = _decode(content)
    except MsgspecError as error:
        raise Refusal(f"the context {name!r} cannot be read: {error}") from None
    if (saved.fingerprint, saved.size) != (words.fingerprint, words.size):
        raise Refusal(
            f"the context {name!r} was saved with another model, whose tokens differ from those of "
            "this model; open it with the model that saved it"
        )
    return [int(token) for token in np.frombuffer(saved.tokens, "<u4")]


def owner_number(tenant: str) -> int:
    """The number that represents a tenant in ``Pin.owner``: a hash of the tenant's name."""
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "little") >> 1


def _check(name: str) -> None:
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_NAME_BYTES:
        raise Refusal(f"the name of a context has {size} bytes; expected 1 to {MAX_NAME_BYTES}")
