"""Logit biases of requests and controllers: float32 numbers that are added to a row of logits.

A controller's bias has the format of ``StepResult.bias_row``. A sparse bias consists of the number
of its pairs, followed by the pairs. A pair is a token and its value, and pairs are ordered by
token. A dense bias consists of 0, followed by a value for each token of the vocabulary. A value of
minus infinity forbids its token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ....protocol.errors import Code, ControllerError

MAX_BIAS = 1e20
"""If the bias of a request is larger, it is reduced to this number. Sums of biases and penalties
then stay finite in float32, even after a division by the lowest temperature. An infinite logit
would make the probabilities of its row NaN."""


@dataclass(slots=True, eq=False)
class Bias:
    """Biases for the logits of a sequence's next token. All sequences of a request share the object
    of the request's ``logit_bias``."""

    values: np.ndarray
    """The bias of each token, float32 ``[num_tokens]``, or ``[vocab]`` if ``tokens`` is None."""
    tokens: np.ndarray | None = None
    """The tokens that have a bias, int64, ascending; None if all tokens of the vocabulary have a
    bias."""

    def of(self, token: int) -> float:
        """The bias of one token; 0 if the token does not have a bias."""
        if self.tokens is None:
            return float(self.values[token])
        place = int(np.searchsorted(self.tokens, token))
        here = place < len(self.tokens) and self.tokens[place] == token
        return float(self.values[place]) if here else 0.0

    def forbidden(self, vocab: int) -> np.ndarray:
        """Whether the bias forbids each token, ``[vocab]``."""
        found = np.zeros(vocab, dtype=np.bool_)
        found[slice(None) if self.tokens is None else self.tokens] = self.values == -np.inf
        return found


@np.errstate(over="ignore")
def bias_of_request(logit_bias: Mapping[int, float]) -> Bias | None:
    """The ``logit_bias`` of a request; None if it is empty."""
    if not logit_bias:
        return None
    tokens = np.array([*logit_bias], dtype=np.int64)
    values = np.array([*logit_bias.values()]).clip(max=MAX_BIAS).astype(np.float32)
    order = np.argsort(tokens)
    return Bias(values[order], tokens[order])


def bias_words(vocab: int) -> int:
    """The greatest size of an encoded bias, in u32 words."""
    return 1 + vocab


def read_bias(words: np.ndarray, vocab: int) -> Bias:
    """Decodes a bias from u32 words. A dense bias is a view of the words.

    Raises ControllerError if the bias is malformed or has a token outside the vocabulary. The
    values are not checked here, because the controller worker checks them. A NaN would only end the
    sequence of this bias with an error.
    """
    pairs = int(words[0]) if len(words) else 0
    if not pairs:
        values = words[1 : 1 + vocab].view(np.float32)
        if len(values) != vocab:
            raise _wrong(f"has {len(values)} values; the model has {vocab} tokens")
        tokens = None
    else:
        flat = words[1 : 1 + 2 * pairs]
        if len(flat) != 2 * pairs:
            raise _wrong(f"has {pairs} pairs in {4 * len(words)} bytes")
        tokens = flat[::2].astype(np.int64)
        values = flat[1::2].copy().view(np.float32)
        if tokens[-1] >= vocab or not (tokens[1:] > tokens[:-1]).all():
            raise _wrong(
                f"has token ids up to {tokens.max()} or out of order; expected ascending ids "
                f"from 0 to {vocab - 1}"
            )
    return Bias(values, tokens)


def _wrong(fault: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, f"the controller's bias {fault}")
