"""``usage``: the cost of a request, in tokens."""

from __future__ import annotations

from msgspec import Struct

from ..generation.counter import Counter


class PromptDetails(Struct):
    """The field ``prompt_tokens_details``."""

    cached_tokens: int
    """Number of tokens of the prompt that were in the GPU worker's KV cache."""


class Usage(Struct):
    """``usage`` of completions and chat."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, counter: Counter) -> Usage:
        """The tokens that ``counter`` has counted."""
        total = counter.prompt + counter.completion
        return cls(counter.prompt, counter.completion, total, PromptDetails(counter.cached))
