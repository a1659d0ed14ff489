"""``usage``: the cost of a request, in tokens."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, Struct

from ....protocol.messages import Token


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


class Counter:
    """Counts the tokens of all streams of a request."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = 0
        self.alternatives = 0
        """Number of log-probabilities of alternatives to tokens."""

    def add(self, entries: Iterable[Token]) -> None:
        """Adds the numbers of ``entries``. Tokens that an entry removes are subtracted."""
        for entry in entries:
            if entry.prompt_tokens:
                self.prompt += entry.prompt_tokens
                self.cached += entry.cached_tokens
            if entry.top_logprobs is not UNSET:
                self.alternatives += len(entry.top_logprobs)
            if isinstance(entry.kept, list):
                self.add_ids(len(entry.kept))
            self.completion += (entry.token is not None) - entry.backtrack

    def add_ids(self, count: int) -> None:
        """Adds ``count`` token ids of the answer to ``alternatives``. Eight ids count as one
        alternative, because an id without a text takes less time and memory than an alternative."""
        self.alternatives += count // 8

    def usage(self) -> Usage:
        """The counted tokens."""
        total = self.prompt + self.completion
        return Usage(self.prompt, self.completion, total, PromptDetails(self.cached))
