"""Converts the biases that a controller returns, such as ``sample(mask, bias={id: value})``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index

import numpy as np

from ....protocol.errors import Code, ControllerError
from .. import biases
from ..biases import Bias

BiasValues = Mapping[int, float] | Sequence[float] | np.ndarray | None
"""The values of a bias: a mapping from token ids to values, or one value for each token of the
vocabulary. None if there is no bias."""

_RIGHT = "expected {token id: value}, or a value for each token of the vocabulary"


def bias_of(
    values: BiasValues, size: int, call: str = "mid_process: sample(mask, bias)"
) -> Bias | None:
    """Converts a controller's values to a bias. Raises ControllerError if they are not valid; the
    message shows the values. ``call``: the call that returned the values, for the message."""
    if values is None:
        return None
    try:
        if isinstance(values, Mapping):
            return biases.sparse(_ids(values), _floats(list(values.values())), size)
        if isinstance(values, str | bytes):
            raise TypeError("text is not a list of numbers")
        return biases.dense(_floats(values), size)
    except (TypeError, ValueError, OverflowError) as error:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"{call} with {_short(values)}: {error}; {_RIGHT}",
        ) from None


def _ids(values: Mapping[int, float]) -> np.ndarray:
    return np.fromiter(map(index, values), dtype=np.int64, count=len(values))


def _floats(values: object) -> np.ndarray:
    """The values as float32. A number outside the range of float32 becomes an infinity. ``biases``
    refuses plus infinity."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def _short(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 80 else text[:77] + "…"
