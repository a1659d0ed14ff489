"""A watermark: the text looks as usual, but its tokens show that a model wrote it.

The previous token and a key select half of the vocabulary: the green tokens. Their logits get a
bias. The detector counts green tokens. About half of the tokens of an unmarked text are green, and
more than half of the tokens of a marked text. Source: Kirchenbauer et al., "A Watermark for Large
Language Models" (2023).

    tokenbus controller serve watermark:Watermark
    tokenbus controller run watermark:Watermark --arg '{"key": 42}' --prompt 'def add(a, b):'

The module of a served controller is imported from the current folder, so copy this file there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from tokenbus.workers.controller.python import Controller, Decision, sample

DELTA = 3.0
"""The number that is added to the logits of green tokens."""
SHARE = 0.5
"""The fraction of the vocabulary that is green."""


def green(before: int, key: int, size: int) -> np.ndarray:
    """Whether each token is green after the token ``before``; bool ``[size]``. The result is the
    same on every machine: 64-bit integers are mixed as in SplitMix64."""
    mixed = np.arange(size, dtype=np.uint64) + np.uint64((before << 32) % 2**64)
    mixed += np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    found: np.ndarray = mixed < np.uint64(int(SHARE * 2**64))
    return found


def z_score(tokens: Sequence[int], key: int, size: int) -> float:
    """The number of standard deviations by which a text has more green tokens than the average text
    without the watermark. A score above 4 means that the text is marked. Only one in 30,000 texts
    without the watermark has such a score. Each pair of neighbouring tokens counts once, so that
    repetitions do not distort the count."""
    pairs = set(pairwise(tokens))
    hits = sum(bool(green(before, key, size)[token]) for before, token in pairs)
    count = len(pairs)
    if not count:
        return 0.0
    return (hits - SHARE * count) / math.sqrt(count * SHARE * (1 - SHARE))


class Watermark(Controller):
    """Marks the text of its sequence. The argument: ``{"key": number, "delta": number}``, both
    optional."""

    def __init__(self) -> None:
        arg = self.arg if isinstance(self.arg, dict) else {}
        self.key = int(arg.get("key", 0))
        self.delta = float(arg.get("delta", DELTA))
        self.tokens: list[int] = []

    def init_prompt(self, prompt: list[int]) -> None:
        """Stores the last token of the prompt, because the first sampled token follows it."""
        self.tokens = prompt[-1:]

    def mid_process(self, fork_group: list[int]) -> Decision:
        """Adds ``delta`` to the logits of green tokens. The first token after an empty prompt is
        not marked."""
        if not self.tokens:
            return sample()
        marked = green(self.tokens[-1], self.key, self.host.vocabulary.size)
        return sample(bias=marked * np.float32(self.delta))

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        """Stores all tokens of the sequence, because a later backtrack may remove some of them."""
        del self.tokens[len(self.tokens) - backtrack :]
        self.tokens += tokens
        return super().post_process(tokens, backtrack)
