"""Biases of controllers: float32 numbers that are added to a row of logits, as they arrive.

The form is that of ``StepResult.bias_row``: a number of pairs, then pairs of a token and its value
by ascending tokens, or, after 0, a value for each token. Minus infinity forbids a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....protocol.errors import Code, ControllerError


@dataclass(slots=True, eq=False)
class Bias:
    """The numbers that a controller adds to the logits of a sequence's next token."""

    values: np.ndarray
    """float32 ``[tokens]``, or ``[vocab]`` where ``tokens`` is None."""
    tokens: np.ndarray | None = None
    """int64, ascending; None: there is a value for each token."""

    def of(self, token: int) -> float:
        """The value of a token."""
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


def bias_words(vocab: int) -> int:
    """The most words of u32 that a bias takes."""
    return 1 + vocab


def read_bias(words: np.ndarray, vocab: int) -> Bias:
    """The bias in these words of u32, which a dense one refers to.

    Raises ControllerError where it is malformed or has a token outside the vocabulary, which would
    harm other sequences. The controller worker has checked the values: a NaN that is sent all the
    same harms its own sequence only.
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
                f"has tokens up to {tokens.max()} or out of order; the model has {vocab} tokens, "
                "and each has one value, by ascending ids"
            )
    return Bias(values, tokens)


def _wrong(what: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, f"its bias {what}")
