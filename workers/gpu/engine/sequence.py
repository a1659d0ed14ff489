"""A sequence and its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ....protocol.messages import ConstraintEnd, FinishReason
from ....protocol.sampling import Distribution, Sampling
from ..sampling.biases import Bias
from ..sampling.distributions import TokenOptions
from ..speculation.drafting import Drafting
from .block_manager import BlockTable
from .text import TextStream

MAX_SEQ = 2**32 - 1
"""The highest number of a sequence: they are sent as u32."""


class Inspected(NamedTuple):
    """The facts that a request with ``inspect`` receives about a token."""

    allowed: int | None = None
    """How many tokens its mask and its bias allowed; None without either."""
    cut: Tokens[int] = ()
    """The likeliest tokens that these forbade, in that order."""
    bias: Mapping[int, float] = {}
    """The values that its bias added to others of the likeliest tokens, and to the token itself."""
    round_us: int = 0
    """The time of the controller's round before it, in microseconds."""


class TokenOutput(NamedTuple):
    """The result of a step for one sequence: a token, its end, or both."""

    request: int
    seq: int
    token: int | None
    logprob: float | None
    pos: int
    """Position of the token, counted from the first that was generated or scored."""
    finish_reason: FinishReason | None = None
    top_logprobs: Mapping[int, float] | None = None
    """None for a scored token, unless its SCORE asks for them."""
    text: str | None = None
    """Text mode: the text that became certain."""
    error: str | None = None
    backtrack: int = 0
    """Tokens of the sequence that were taken back before this one."""
    parent: int | None = None
    """In a fork's first output: the sequence that it was forked from."""
    code: str | None = None
    """The error code of ``error``."""
    logs: str = ""
    """The output of its controller."""
    storage: Tokens[Any] = ()
    """The writes of its controller to variables."""
    constraint: ConstraintEnd | None = None
    """In its last output, under a built-in constraint: how its text ended."""
    shortened: bool = False
    """In its last output: its text ends before what its controller has seen, at a stop string or
    between appended tokens."""
    stop: str | int | None = None
    """In the last output: which of the request's stops ended the sequence."""
    inspected: Inspected | None = None
    distribution: Distribution | None = None
    """The answer to the query of its controller."""
    wakes: int = 0
    """With a sampled token: how often its controller was woken since the last one."""


@dataclass(slots=True)
class PromptUsage:
    """The cost of a request's prompt; all of its sequences share it."""

    tokens: int = 0
    cached: int | None = None
    """How many of them were in the KV cache when the request was first admitted; None before."""
    admitted_at: float | None = None
    """When that was, by ``time.monotonic``."""


class Continued(NamedTuple):
    """The live sequences of a request that began at another worker."""

    generated: Mapping[int, Tokens[int]]
    """By number, at least one: the tokens after the prompt."""
    made: int
    """How many sequences there have been of it."""


@dataclass(slots=True)
class KeptRow:
    """The logits of a deferred sequence; its forks share them."""

    logits: torch.Tensor | None = None
    """``[vocab]``; None until the device has copied them."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request, from its arrival to its end."""

    request: int
    seq: int
    tokens: list[int]
    """The prompt and what follows it."""
    num_prompt: int
    sampling: Sampling
    """For a generation; a score does not use it."""
    max_length: int
    """Tokens at which it ends, the prompt included."""
    seed: int = 0
    scored: bool = False
    """It is a SCORE: all its tokens are known, and their log-probabilities are computed."""
    scored_from: int = 0
    """For a score: the first token whose log-probability is computed; those before it are the
    prompt, and what another worker has scored."""
    priority: int = 0
    client: int = 0
    arrival: int = 0
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    healed: int = 0
    """Characters at the beginning of its text that its prompt ended with."""
    with_text: bool = False
    inspect: bool = False
    """Its outputs say what its masks did."""
    prompt_usage: PromptUsage = field(default_factory=PromptUsage)
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    continued: bool = False
    """It began elsewhere, with others of its request that have much of its text."""
    pending_forks: int = 0
    """Sequences that will be forked from it when its prompt is computed."""
    overtaken: int = 0
    """Later arrivals that were admitted before it."""
    mask: np.ndarray | None = None
    """Allowed next tokens: bit i of u32 words, little-endian; None allows all."""
    bias: Bias | None = None
    """The bias of its controller for the next token."""
    options: TokenOptions | None = None
    """The other options of its controller for the next token."""
    along: Tokens[np.ndarray] = ()
    """Under a controller: the masks after each token of ``draft``, as far as they are known."""
    row: KeptRow | None = None
    """The logits that it is sampled from when it has been deferred."""
    drawn: int = -1
    """While its next token is on the device and not here yet: its row among those drawn with it."""
    drafting: Drafting | None = None
    """The text that its drafts are made from; None: it never has any."""
    draft: Tokens[int] = ()
    """Tokens that are likely to follow: the next step verifies them."""

    @property
    def target(self) -> int:
        """Tokens that must be in the cache before it has a result: for a score, all but the last,
        whose own distribution is not needed."""
        return len(self.tokens) + (self.drawn >= 0) - self.scored

    @property
    def gives_columns(self) -> bool:
        """Whether its tokens are reported in columns, but for the last."""
        return not (self.inspect or self.sampling.top_logprobs)

    @property
    def ends_with_next(self) -> bool:
        """Whether the token that is on the device is its last, by its length."""
        return self.drawn >= 0 and len(self.tokens) + 1 >= self.max_length

    @property
    def decodes(self) -> bool:
        """Whether the next step computes its last token, and nothing else is known of it."""
        decided = self.mask is not None or self.bias is not None or self.options is not None
        ready = self.row is not None or decided
        return len(self.tokens) - self.num_computed_tokens == 1 and not (ready or self.scored)

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def prompt(self) -> Tokens[int]:
        """The tokens of the prompt."""
        return self.tokens[: self.num_prompt]

    @property
    def generated(self) -> Tokens[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]


@dataclass(slots=True)
class TokenColumns:
    """Tokens that are nothing but a token, of one step: row i is the token of ``sequences[i]``.

    None of them has an end, an error or a fork with it, and none asks for ``inspect`` or the most
    likely tokens. All columns have the same length.
    """

    sequences: list[Sequence]
    """The same list object in each step in which the same sequences are sampled."""
    tokens: np.ndarray
    """int64."""
    logprobs: np.ndarray
    """float64."""
    positions: np.ndarray
    """int64: as ``TokenOutput.pos``."""
    texts: list[str | None] | None = None
    """As ``TokenOutput.text``; None where no row has any."""

    @property
    def requests(self) -> set[int]:
        """The requests of its sequences."""
        return {sequence.request for sequence in self.sequences}

    def without(self, requests: set[int]) -> tuple[TokenColumns | None, list[TokenOutput]]:
        """The rows of all other requests, None if there are none; those of these as outputs."""
        outputs = [output for output in self if output.request in requests]
        rows = [i for i, s in enumerate(self.sequences) if s.request not in requests]
        return (self.of(rows) if rows else None), outputs

    def of(self, rows: list[int]) -> TokenColumns:
        """Some of the rows."""
        return TokenColumns(
            [self.sequences[i] for i in rows],
            self.tokens[rows],
            self.logprobs[rows],
            self.positions[rows],
            [self.texts[i] for i in rows] if self.texts is not None else None,
        )

    def __iter__(self) -> Iterator[TokenOutput]:
        """The rows as outputs."""
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.positions.tolist())
        texts = self.texts or [None] * len(self.sequences)
        for s, token, logprob, pos, text in zip(self.sequences, *columns, texts, strict=True):
            top = {token: logprob}
            yield TokenOutput(s.request, s.seq, token, logprob, pos, None, top, text)


@dataclass(slots=True)
class StepOutputs:
    """A step's outputs: those of a request are all in ``columns`` or all in ``others``."""

    others: list[TokenOutput] = field(default_factory=list)
    """In order within each sequence."""
    columns: TokenColumns | None = None
    """The tokens that are nothing but a token; None where there are none."""

    def __len__(self) -> int:
        return len(self.others) + (len(self.columns.sequences) if self.columns is not None else 0)

    def __iter__(self) -> Iterator[TokenOutput]:
        """All of them as outputs."""
        yield from self.others
        if self.columns is not None:
            yield from self.columns

    def as_outputs(self) -> list[TokenOutput]:
        """All of them as a list of outputs."""
        return list(self)
