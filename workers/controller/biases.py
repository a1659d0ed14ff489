"""Biases: numbers that a controller adds to the logits of the next token.

A dense bias has a float32 for each token of the vocabulary. A sparse bias has pairs of a token id
(u32) and a float32, in ascending order of the ids. An encoded bias begins with the number of pairs
as u32, which is 0 for a dense bias. All numbers are little-endian. Minus infinity forbids a token.
Source: AICI's ``SampleWithBias { bias: Vec<f32> }``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...protocol.errors import Code, ControllerError

HEAD = 4
"""Size of the number of pairs at the beginning of an encoded bias, in bytes."""
_PAIR = np.dtype([("token", "<u4"), ("value", "<f4")])


class Bias(NamedTuple):
    """A bias that has been checked. ``data`` is valid until the controller's next call."""

    pairs: int
    """Number of pairs in ``data``; 0 if ``data`` has a float32 for each token."""
    data: memoryview

    @property
    def head(self) -> bytes:
        """The bytes of the encoded bias before ``data``."""
        return self.pairs.to_bytes(HEAD, "little")

    def write(self, into: memoryview) -> None:
        """Writes the bias to the beginning of ``into``, which must have room for any bias of the
        vocabulary (``bias_bytes``)."""
        into[:HEAD] = self.head
        into[HEAD : HEAD + len(self.data)] = self.data

    def encoded(self) -> bytes:
        """The bytes of the bias in a message."""
        return b"".join((self.head, self.data))


def dense(values: np.ndarray, size: int) -> Bias:
    """The bias of an array of floats. Raises ControllerError if the array does not have ``size``
    values, or if a value is NaN or plus infinity."""
    if values.shape != (size,):
        shape = " x ".join(map(str, values.shape)) or "no"
        raise _wrong(f"the bias has {shape} values; the vocabulary has {size} tokens")
    values = np.ascontiguousarray(values, dtype="<f4")
    # If a value is NaN, the maximum is NaN, and the comparison is false.
    if size and not values.max() < np.inf:
        _refuse_value(np.arange(size), values)
    return Bias(0, values.data.cast("B"))


def sparse(tokens: np.ndarray, values: np.ndarray, size: int) -> Bias | None:
    """The bias that adds ``values[i]`` to the logit of ``tokens[i]``; None if the arrays are empty.
    The tokens may have any order. Raises ControllerError for an id outside the vocabulary, for a
    repeated id, and for a value that is NaN or plus infinity."""
    if not len(tokens):
        return None
    steps = tokens[1:] > tokens[:-1]
    if not steps.all():
        order = np.argsort(tokens, kind="stable")
        tokens, values = tokens[order], values[order]
        twice = tokens[1:] == tokens[:-1]
        if twice.any():
            token = int(tokens[1:][twice][0])
            raise _wrong(f"the bias has token {token} twice; a token has one value")
    if int(tokens[0]) < 0 or int(tokens[-1]) >= size:
        token = int(tokens[0] if tokens[0] < 0 else tokens[-1])
        raise _wrong(f"the bias has token {token}; token ids of this model are 0 to {size - 1}")
    if not values.max() < np.inf:
        _refuse_value(tokens, values)
    if 2 * len(tokens) > size:
        every = np.zeros(size, dtype="<f4")
        every[tokens] = values
        return Bias(0, every.data.cast("B"))
    pairs = np.empty(len(tokens), dtype=_PAIR)
    pairs["token"], pairs["value"] = tokens, values
    return Bias(len(pairs), pairs.view("u1").data)


def bias_bytes(size: int) -> int:
    """Maximum bytes of an encoded bias, for a vocabulary of ``size`` tokens."""
    return HEAD + 4 * size


def forbids(encoded: bytes, token: int) -> bool:
    """Whether an encoded bias forbids a token with minus infinity."""
    pairs = int.from_bytes(encoded[:HEAD], "little")
    if not pairs:
        return bool(np.frombuffer(encoded, "<f4", offset=HEAD)[token] == -np.inf)
    found = np.frombuffer(encoded, _PAIR, offset=HEAD)
    return bool((found["value"][found["token"] == token] == -np.inf).any())


def _refuse_value(tokens: np.ndarray, values: np.ndarray) -> None:
    """Raises ControllerError for the first value that is not allowed."""
    first = int(np.flatnonzero(~(values < np.inf))[0])
    raise _wrong(
        f"the bias of token {int(tokens[first])} is {float(values[first])}; a bias is a finite "
        "number, or minus infinity to forbid the token"
    )


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
