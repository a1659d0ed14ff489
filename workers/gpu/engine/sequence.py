"""A sequence and its outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import torch

from ....protocol.columns import kept_of
from ....protocol.messages import FinishReason, Token
from ....protocol.sampling import Sampling
from ..sampling.biases import Bias
from ..sampling.candidates import Candidate
from ..sampling.distributions import TokenOptions
from ..sampling.min_tokens import Least
from ..sampling.token_counts import TokenCounts
from ..sampling.under import Under
from ..speculation.drafting import Drafting
from .block_manager import BlockTable
from .seeds import derived_seed
from .text import TextStream

MAX_SEQ = 2**32 - 1
"""The highest sequence number: sequence numbers are sent as u32."""


class TokenOutput(Token, kw_only=True, omit_defaults=True):
    """One result for a sequence. A result can be a token, the end of the sequence, another event
    such as a fork, or several of these.

    ``LiveStreams`` sends the output to the client as an entry. It first sets ``stream_id``, because
    the engine does not have a table of streams. It also clears the fields that clients do not
    receive.
    """

    request: int = 0
    """The number of the request. Clients do not receive this number."""
    shortened: bool = False
    """In the last output: whether the text ends before the last token that the controller has
    processed. This happens if a stop string was found, or if the sequence ended within the tokens
    that the controller appended. Clients do not receive this field."""

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        token: int | None = None,
        logprob: float | None = None,
        reason: FinishReason | None = None,
    ) -> Self:
        """An output for a token that is about to be appended to a sequence, or for another event of
        the sequence."""
        return cls(
            token=token,
            stream_id=0,
            logprob=logprob,
            finish_reason=reason,
            pos=sequence.num_generated,
            seq=sequence.seq,
            request=sequence.request,
        )

    def report(self, candidate: Candidate | None) -> None:
        """Adds the distribution from which the token was drawn. ``candidate``: None if the request
        does not ask for the distribution."""
        if candidate is None:
            return
        if candidate.processed is not None:
            self.processed = candidate.processed
        if candidate.kept is not None:
            self.kept = kept_of(candidate.kept)


@dataclass(slots=True)
class PromptUsage:
    """The token counts of a request's prompt, for the usage that the client receives; all sequences
    of the request share one object."""

    tokens: int = 0
    cached: int | None = None
    """When the request was first admitted, the KV cache contained this number of the first
    sequence's tokens. None before the admission."""
    admitted_at: float | None = None
    """Time of the first admission, by ``time.monotonic``."""


class Continued(NamedTuple):
    """The live sequences of a request that began at another worker."""

    generated: Mapping[int, Tokens[int]]
    """For each sequence number: the tokens after the prompt. Contains at least one sequence."""
    made: int
    """Number of sequences that the request has had, including ended ones."""
    num_drops: Mapping[int, int] = MappingProxyType({})
    """For each sequence that has dropped tokens: ``Sequence.num_drops``."""
    prompts: Mapping[int, Tokens[int]] = MappingProxyType({})
    """For each sequence whose prompt was replaced (``Engine.begin_anew``): the new prompt."""


@dataclass(slots=True)
class KeptRow:
    """The logits of a deferred sequence. Forks of the sequence share this object."""

    logits: torch.Tensor | None = None
    """``[vocab]``; None until the device has copied them."""


@dataclass(slots=True, eq=False)
class ScoredTexts:
    """The texts that are scored as continuations of a sequence. For each text, the request has an
    additional sequence, which shares the blocks of the continued sequence. These additional
    sequences have negative numbers and no outputs. A request has at most ``max_forks`` additional
    sequences at once."""

    sequence: Sequence
    """The sequence that the texts continue. It is suspended while the texts are scored."""
    scores: list[list[float]]
    """For each text: the log-probabilities of the tokens that have been scored, rounded to
    float32."""
    waiting: deque[tuple[int, Tokens[int]]]
    """The texts that do not have a sequence yet, each with its index."""
    left: dict[Sequence, int] = field(default_factory=dict)
    """The additional sequences whose texts have not been scored completely. The value is the index
    of the text."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request, from its arrival to its end."""

    request: int
    seq: int
    tokens: list[int]
    """The prompt and all tokens after it."""
    num_prompt: int
    sampling: Sampling
    """The sampling parameters; a score uses only ``top_logprobs``."""
    max_length: int
    """Number of tokens, including the prompt, at which the sequence ends."""
    seed: int = 0
    num_drops: int = 0
    """Number of splices that have dropped tokens."""
    scored: bool = False
    """Whether the sequence is a SCORE. The tokens of a SCORE are known, and their log-probabilities
    are computed."""
    scored_from: int = 0
    """For a score: the index of the first token whose log-probability is computed. Earlier tokens
    belong to the prompt, or another worker has scored them."""
    num_reported: int = 0
    """For a score: number of tokens after the prompt whose outputs have been made."""
    scoring: ScoredTexts | None = None
    """The scored texts that continue this sequence. If this sequence itself computes a scored text:
    all texts that are scored together with this text. None for all other sequences."""
    priority: int = 0
    client: int = 0
    arrival: int = 0
    stop_ids: frozenset[int] = frozenset()
    least: Least | None = None
    """The minimum length that ``min_tokens`` requires; None if the sequence may end at once."""
    logit_bias: Bias | None = None
    """The request's ``logit_bias``; all sequences of the request share one object."""
    counts: TokenCounts | None = None
    """How often each token occurs; ``count_tokens`` updates these counts. None before the first
    update."""
    text: TextStream | None = None
    healed: int = 0
    """With token healing: the text begins with this number of characters that belong to the
    prompt."""
    with_text: bool = False
    inspect: bool = False
    """Whether outputs report the effect of the masks."""
    prompt_usage: PromptUsage = field(default_factory=PromptUsage)
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed_tokens: int = 0
    """Number of tokens whose keys and values are in the cache. Tokens that a launched forward
    computes count already."""
    continued: bool = False
    """Whether the sequence shares the prompt with other sequences of a request that began at
    another worker, or with other scored texts. Only one of these sequences computes the prompt
    (``waits_for_blocks``)."""
    pending_forks: int = 0
    """Number of sequences that will be forked when the prompt has been computed."""
    overtaken: int = 0
    """Number of later arrivals that were admitted before this sequence, when it last left the
    waiting queue. Only ``WaitingQueue.remove`` sets this number."""
    displaced: bool = False
    """Whether the sequence was preempted for another client, and has not been admitted again."""
    mask: np.ndarray | None = None
    """The allowed next tokens, as u32 words: the bit of token i is ``1 << i % 32`` in word
    ``i // 32``. None allows all tokens."""
    bias: Bias | None = None
    """The controller's logit bias for the next token."""
    options: TokenOptions | None = None
    """The controller's other sampling options for the next token."""
    along: Tokens[Under] = ()
    """Masks and biases from the controller: element i applies after token i of ``draft``. The list
    may be shorter than ``draft``."""
    row: KeptRow | None = None
    """The stored logits from which a deferred sequence is sampled when it is rescheduled. Forks of
    the sequence share this object."""
    drawn: int = -1
    """If the next token is only on the device: its row in the tensor of sampled tokens. If not,
    -1."""
    drafting: Drafting | None = None
    """The state of speculative decoding; None if the sequence gets no drafts."""
    draft: Tokens[int] = ()
    """Draft tokens that the next step verifies, if the step has room for them."""

    @property
    def target(self) -> int:
        """Number of tokens that must be in the cache before the next token can be sampled. For a
        score: before the score is complete. A score does not need its last token in the cache."""
        return len(self.tokens) + (self.drawn >= 0) - self.scored

    @property
    def waits_for_blocks(self) -> bool:
        """Whether the sequence has to wait while another sequence of its request computes the
        prompt that both share."""
        complete = self.scored and self.num_computed_tokens >= self.scored_from - 1
        return self.continued and not complete

    @property
    def gives_columns(self) -> bool:
        """Whether the options of the request allow its tokens to be reported in
        ``TokenColumns``."""
        return not (self.inspect or self.sampling.top_logprobs)

    @property
    def reports_candidates(self) -> bool:
        """Whether outputs report ``Token.processed`` or ``Token.kept``."""
        return self.sampling.processed_logprobs or self.sampling.kept

    @property
    def ends_with_next(self) -> bool:
        """Whether the sequence reaches ``max_length`` with the token that is still on the
        device."""
        return self.drawn >= 0 and len(self.tokens) + 1 >= self.max_length

    @property
    def decodes(self) -> bool:
        """Whether the next step is a plain decode of this sequence: it computes one token, and the
        sequence has neither a kept row nor a decision of a controller."""
        decided = self.mask is not None or self.bias is not None or self.options is not None
        ready = self.row is not None or decided
        return len(self.tokens) - self.num_computed_tokens == 1 and not (ready or self.scored)

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def prompt(self) -> Tokens[int]:
        """The tokens of the prompt."""
        return self.tokens[: self.num_prompt]

    @property
    def generated(self) -> Tokens[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    def count_tokens(self) -> TokenCounts:
        """The counts of all tokens, for penalties. Each call adds only the tokens that were
        appended after the previous call."""
        if self.counts is None:
            self.counts = TokenCounts.of(self.sampling, self.prompt)
        self.counts = self.counts.plus(self.tokens[self.num_prompt + self.counts.total :])
        return self.counts

    @property
    def draw_seed(self) -> int:
        """The seed of the next tokens. The seed changes when the sequence drops tokens. If it did
        not, the sequence would draw the dropped tokens again."""
        if not self.num_drops:
            return self.seed
        return derived_seed(self.seed ^ derived_seed(self.num_drops))

    def drop(self, count: int) -> None:
        """Removes the last ``count`` generated tokens."""
        self.num_drops += 1
        left = len(self.tokens) - count
        if self.counts is not None:
            self.counts = self.counts.minus(self.tokens[left : self.num_prompt + self.counts.total])
        del self.tokens[left:]


@dataclass(slots=True)
class TokenColumns:
    """The plain tokens of one step: row i is the token of ``sequences[i]``.

    A plain token is neither the first nor the last token of its sequence, and has only the fields
    that columns contain. If a request has another output in the step, none of its tokens is in the
    columns. All columns have the same length.
    """

    sequences: list[Sequence]
    """Consecutive steps share this list object if they sample the same sequences and all their
    tokens are plain."""
    tokens: np.ndarray
    """The token ids, int64."""
    logprobs: np.ndarray
    """The log-probabilities of the tokens, float64."""
    positions: np.ndarray
    """The positions of the tokens, counted from the end of the prompt (``Token.pos``), int64."""
    texts: list[str | None] | None = None
    """The texts of the tokens (``Token.text``); None if no row has text."""
    candidates: list[Candidate | None] | None = None
    """The values of ``Token.processed`` and ``Token.kept``; None if no row has these fields."""

    @property
    def requests(self) -> set[int]:
        """The requests of the sequences."""
        return {sequence.request for sequence in self.sequences}

    def without(self, requests: set[int]) -> tuple[TokenColumns | None, list[TokenOutput]]:
        """Splits the rows into two results. The second result has the rows of ``requests``, as
        outputs. The first result has all other rows, as columns; None if there are none."""
        outputs = [output for output in self if output.request in requests]
        rows = [i for i, s in enumerate(self.sequences) if s.request not in requests]
        return (self.of(rows) if rows else None), outputs

    def of(self, rows: list[int]) -> TokenColumns:
        """The columns of a subset of the rows."""
        return TokenColumns(
            [self.sequences[i] for i in rows],
            self.tokens[rows],
            self.logprobs[rows],
            self.positions[rows],
            [self.texts[i] for i in rows] if self.texts is not None else None,
            [self.candidates[i] for i in rows] if self.candidates is not None else None,
        )

    def __iter__(self) -> Iterator[TokenOutput]:
        """The rows as outputs."""
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.positions.tolist())
        texts = self.texts or [None] * len(self.sequences)
        found = self.candidates or [None] * len(self.sequences)
        rows = zip(self.sequences, *columns, texts, found, strict=True)
        for s, token, logprob, pos, text, candidate in rows:
            output = TokenOutput.of(s, token, logprob)
            output.pos, output.top_logprobs = pos, {token: logprob}
            if text is not None:
                output.text = text
            output.report(candidate)
            yield output


@dataclass(slots=True)
class StepOutputs:
    """The outputs of a step. The outputs of a request are all in ``columns`` or all in
    ``others``."""

    others: list[TokenOutput] = field(default_factory=list)
    """All outputs that are not plain tokens, in order within each sequence."""
    columns: TokenColumns | None = None
    """The plain tokens; None if the step has no plain tokens."""

    def __len__(self) -> int:
        return len(self.others) + (len(self.columns.sequences) if self.columns is not None else 0)

    def __iter__(self) -> Iterator[TokenOutput]:
        """All outputs of the step, one by one."""
        yield from self.others
        if self.columns is not None:
            yield from self.columns

    def as_outputs(self) -> list[TokenOutput]:
        """All outputs of the step, as a list."""
        return list(self)
