"""The part of a controller's decision that applies to the next sampled token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .biases import Bias
from .distributions import TokenOptions


class Under(NamedTuple):
    """The mask, bias and options under which the next token of a sequence is sampled."""

    mask: np.ndarray | None = None
    """The token mask, u32 ``[words]``; None allows every token."""
    bias: Bias | None = None
    options: TokenOptions | None = None
