"""Converts the answers of a guest process to the worker's types, and checks their values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....protocol.errors import TokenbusError
from .. import biases
from ..biases import Bias
from ..interface import CONTINUE, STOP, Action, Answer
from ..queries import checked_override, checked_query
from ..scoring import checked_texts
from .messages import Outcome, unpacked


def answers_of(outcome: Outcome, size: int) -> Iterator[Answer | TokenbusError]:
    """Yields the answers in ``outcome`` and, if a call failed, the error of this call. ``size``:
    number of tokens of the vocabulary. Raises ValueError or TokenbusError if an answer is not
    valid."""
    if outcome.post is not None:
        yield CONTINUE if outcome.post == Action.CONTINUE else STOP
    if outcome.pre is not None:
        pre = outcome.pre
        yield Answer(Action(pre.action), pre.count, tokens=unpacked(pre.tokens))
    if outcome.mid is not None:
        mid = outcome.mid
        yield Answer(
            Action(mid.action),
            1,
            mid.backtrack,
            unpacked(mid.tokens),
            mid.masked,
            None if mid.pairs is None else _bias(mid.pairs, mid.bias, size),
            None if mid.query is None else checked_query(mid.query, size),
            None if mid.override is None else checked_override(mid.override),
            mid.complete,
            mid.generate,
            checked_texts([unpacked(text) for text in mid.texts], size)
            if mid.action == Action.SCORE
            else (),
            mid.name,
            mid.pin_s,
            logprobs=mid.logprobs,
        )
    if outcome.fault is not None:
        yield outcome.fault.error()


def _bias(pairs: int, data: bytes, size: int) -> Bias | None:
    if not pairs:
        return biases.dense(np.frombuffer(data, "<f4"), size)
    found = np.frombuffer(data, "<u4", 2 * pairs)
    return biases.sparse(found[::2], found[1::2].view("<f4"), size)
