"""A controller's decision that applies to the next sampled token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .biases import Bias
from .distributions import TokenOptions


class Under(NamedTuple):
    """The mask, bias and options of a sequence's next token."""

    mask: np.ndarray | None = None
    """The token mask, u32 ``[words]``; None allows every token."""
    bias: Bias | None = None
    options: TokenOptions | None = None
