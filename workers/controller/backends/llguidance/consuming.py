"""Appends many tokens to a matcher in several calls, because a call keeps Python's lock.

With an ambiguous grammar, parsing one token can take up to 60 ms, and all other threads of the
worker wait for Python's lock during a call. So a call consumes several tokens only if the tokens
before them were parsed quickly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from llguidance import LLMatcher

AT_ONCE = 32
"""Maximum number of tokens of a call."""
SHORT_S = 0.001
"""If a call takes more CPU time than this, in seconds, the next call consumes a single token.
Otherwise the next call may consume twice as many tokens."""


def consume(
    matcher: LLMatcher,
    tokens: Sequence[int],
    most_s: float = math.inf,
    lock: AbstractContextManager[object] | None = None,
) -> float | None:
    """Appends tokens to a matcher, and holds ``lock`` during each call. Returns the CPU time in
    seconds; None if the grammar does not allow the tokens. If the CPU time exceeds ``most_s``, the
    remaining tokens are not appended."""
    held = nullcontext() if lock is None else lock
    took, at, number = 0.0, 0, 1
    while at < len(tokens) and took <= most_s:
        with held:
            began = time.thread_time()
            followed = matcher.consume_tokens(list(tokens[at : at + number]))
            seconds = time.thread_time() - began
        if not followed:
            return None
        took, at = took + seconds, at + number
        number = min(2 * number, AT_ONCE) if seconds <= SHORT_S else 1
    return took
