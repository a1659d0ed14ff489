"""The engine of one model: requests in, tokens out, one step at a time.

engine = Engine(load_model("embedded"))
engine.add(1, prompt=[12, 7], sampling=Sampling(max_tokens=5))
while engine.has_work:
    for output in engine.step():
        print(output.token, output.finish_reason)

A step has two halves. ``begin`` launches the forward, if the previous ``finish`` has not launched
it already. ``finish`` samples. Between the two calls, the caller can steer the sequences in
``PendingStep.ready`` with ``fork``, ``splice``, ``suspend``, ``defer`` and ``set_mask``. These
methods may also be called at any other time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from ....protocol.errors import Code, RequestError
from ....protocol.messages import FinishReason, ForwardPath
from ....protocol.metrics import Histogram
from ....protocol.sampling import MAX_SCORED_TEXTS, MAX_SCORED_TOKENS, Query, Sampling
from ..model.backends import ForwardOptions
from ..model.cpu_native.allocator import keep_freed_memory
from ..model.cuda.choice import choose_layout
from ..model.device_queue import device_queue
from ..model.device_traits import traits_of
from ..model.kv_cache import Layout, cpu_bytes, token_bytes
from ..model.loader import LoadedModel, ModelLoadError, OnProgress
from ..model.memory import cache_bytes, largest_step_bytes
from ..model.new_weights import NewWeights
from ..model.runner import Runner
from ..sampling.biases import Bias
from ..sampling.distributions import TokenOptions
from ..sampling.under import Under
from ..speculation.draft_model import DraftModel, check_draft_model
from ..speculation.drafts import Speculation
from .block_manager import BlockManager
from .intake import Intake
from .pages import PageLog
from .pending_step import PendingStep
from .scheduler import Scheduler
from .sequence import Continued, PromptUsage, StepOutputs, TokenOutput
from .sequences import LiveSequences
from .step import Stepper

__all__ = ["Continued", "Engine", "EngineConfig", "PendingStep", "StepOutputs", "TokenOutput"]

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAFT_PART = 8
"""A draft model gets 1 / ``DRAFT_PART`` of the engine's memory for KV caches."""


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """The configuration of an engine."""

    max_num_seqs: int = 256
    """Maximum number of sequences of one forward."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens of one forward: decodes, drafts and prefill chunks together."""
    max_forks: int = 128
    """Maximum number of sequences of a request, including ended sequences. A fork that exceeds this
    number fails. Also the maximum number of texts that a request scores at once; further texts
    wait."""
    kv_cache_bytes: int | None = None
    """Size in bytes of two KV caches together: that of the model and that of its draft model. If
    None, the size depends on the free memory, and on a GPU also on ``memory_part``."""
    memory_part: float = 1.0
    """All models of a GPU together may use the fraction ``memory.DEVICE_PART`` of its memory.
    ``memory_part`` is this model's fraction of that memory, for weights, steps and KV caches.
    Ignored if ``kv_cache_bytes`` is set."""
    require_fast_attention: bool = False
    """Refuse a model if no attention kernel can read the blocks of its KV cache in place."""
    compiled: bool = False
    """Run the model through torch.compile, if this does not change the logits
    (``ForwardOptions``)."""
    overlap: bool = False
    """Launch the forward of the next step before the tokens of this step are processed. Steps with
    drafts do not overlap. Ignored if the model has several ranks."""
    fixed_threads: bool = False
    """On a CPU, use all of torch's threads for every forward, even if fewer threads are faster."""
    exact: Literal["auto", "on", "off"] = "auto"
    """Whether the logits of a sequence must have the same bits in every batch. ``auto``: only if
    the model has kernels that can do this. ``on``: always. A model without such kernels is then
    refused. ``off``: never."""
    speculation: bool = False
    """Speculative decoding: draft tokens are verified, so that a step can yield several tokens of
    a sequence."""


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread makes all calls.

    A sequence is identified by (request, seq): the caller's number of the request, and the number
    of the sequence within the request. By default, the methods raise RequestError for a sequence
    that is not alive, and for a request that ``score`` has begun. If a method does not, its
    docstring says so. A failure of one sequence ends only that sequence, whose last output contains
    the error.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        draft_model: LoadedModel | None = None,
        on_progress: OnProgress = lambda part, stage: None,
    ) -> None:
        """``draft_model``: a small model that drafts tokens if prompt lookup (``ngrams.py``) does
        not find a draft. It is used only with ``config.speculation``. Raises ModelLoadError if
        ``draft_model`` cannot draft for this model, or if the KV cache does not fit into the GPU's
        memory. Also raises it if ``config`` requires fast attention or exactness, and the model
        cannot have it."""
        config = config or EngineConfig()
        traits = traits_of(loaded.device)
        if traits.host_memory:
            keep_freed_memory()
        self.loaded = loaded
        self.mask_words = -(-loaded.vocab_size // 32)
        """Length of a token mask, in u32 words."""
        layout = choose_layout(loaded)
        if config.require_fast_attention and not layout.in_place:
            raise ModelLoadError(
                f"{loaded.name} is not served: require_fast_attention is set, but the blocks of "
                f"its KV cache cannot be read in place: {layout.why}"
            )
        size = config.kv_cache_bytes or _cache_bytes(loaded, layout, config, draft_model)
        draft_size = 0
        if draft_model is not None and config.speculation:
            check_draft_model(loaded, draft_model)
            draft_size = size // DRAFT_PART
            size -= draft_size
        per_token = token_bytes(loaded.layers, loaded.dtype)
        num_blocks = max(2, size // (layout.block_size * per_token))
        self.pages = PageLog(loaded.name, layout.block_size, loaded.adapter_names)
        """The pages (units of 256 tokens) in the KV cache, which the worker reports to the
        broker."""
        self._blocks = BlockManager(num_blocks, layout.block_size, self.pages)
        self._scheduler = Scheduler(
            self._blocks, config.max_num_seqs, config.max_num_batched_tokens
        )
        # With several ranks, steps do not overlap. This process sends the token ids of each forward
        # to the other ranks. So it must first receive the sampled ids from its own device.
        overlap = config.overlap and loaded.ranks is None
        queue = device_queue(loaded.device, overlap)
        options = ForwardOptions(config.compiled, config.fixed_threads, config.exact != "off")
        self._runner = Runner(loaded, num_blocks, layout, queue, options)
        why_not_exact = self._runner.path.why_not_exact
        if config.exact == "on" and why_not_exact:
            raise ModelLoadError(
                f"{loaded.name} is not served: exact is on, but its logits may depend on the "
                f"batch: {why_not_exact}"
            )
        self.max_length = min(loaded.context_length, self._blocks.capacity)
        self._intake = Intake(loaded, self.max_length)
        model: DraftModel | None = None
        if draft_model is not None and draft_size:
            model = DraftModel(draft_model, draft_size, queue, loaded, config.fixed_threads)
        self._speculation = Speculation(traits.draft_costs if config.speculation else None, model)
        self._live = LiveSequences(
            self._intake,
            self._scheduler,
            self._blocks,
            self._runner,
            config.max_forks,
            self._speculation.ended,
        )
        self._overlaps = overlap
        self._stepper = Stepper(
            self._live, self._scheduler, self._blocks, self._runner, overlap, self._speculation
        )
        for graphed in (self._runner, model):
            if graphed is not None:
                graphed.capture_graphs(config.max_num_seqs, on_progress)
        log.info(
            "%s: a KV cache of %d blocks of %d tokens, %.0f MiB; %s; %d CUDA graphs",
            loaded.name,
            num_blocks,
            layout.block_size,
            num_blocks * layout.block_size * per_token / 2**20,
            self.path.attention,
            self.path.graphs,
        )
        for fallback in self.path.fallbacks:
            log.warning("%s does not use a fast path: %s", loaded.name, fallback)

    # --- requests -------------------------------------------------------------------------------

    def add(
        self,
        request: int,
        prompt: Tokens[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        client: int = 0,
        text: bool = False,
        inspect: bool = False,
        speculate: bool = True,
        continued: Continued | None = None,
        healed: int | None = None,
        adapter: str = "",
    ) -> PromptUsage:
        """Begins a generation. It has the sequences of ``continued``, if given, or else
        ``sampling.n`` sequences, numbered from 0. Ends the sequences of an earlier attempt of the
        request.

        ``client``: the number of the client (``arrivals.client_of``). The sequences of a client
        with few running sequences are admitted first. Drafts are copied only from the client's own
        texts. ``text``: outputs contain text. ``inspect``: outputs report the effect of masks and
        of controllers' biases. ``speculate``: whether the sequences may have drafts; pass False if
        a controller decides on each token. ``continued``: the live sequences of a request that
        began at another worker. ``healed``: the token that was removed from the end of the prompt.
        The generated text begins with the text of this token, and outputs leave this text out.
        ``adapter``: the name of a LoRA adapter of the model, or empty. Returns the prompt's usage,
        which is complete when the request has been admitted. Raises RequestError, and changes
        nothing, if the request cannot be run.
        """
        sequence = self._intake.generation(
            request,
            prompt,
            sampling,
            priority=priority,
            client=client,
            text=text,
            inspect=inspect,
            healed=healed,
            adapter=self.loaded.adapter_number(adapter),
        )
        sequences = [sequence]
        if continued is not None:
            sequences = self._intake.continued(sequence, continued)
        for one in sequences if speculate else ():
            self._speculation.begin(one)
        if continued is not None:
            self._live.restore(sequences, continued.made)
        else:
            self._live.begin(sequence)
        return sequence.prompt_usage

    def healed(self, prompt: Tokens[int]) -> int | None:
        """Returns the last token of a prompt if token healing can remove it; None if it cannot. The
        token must have text, which must not end inside a character. It must not be the only token
        of the prompt."""
        if len(prompt) < 2 or not self._intake.text_after(prompt[:-1], prompt[-1]):
            return None
        return prompt[-1]

    def score(
        self,
        request: int,
        prompt: Tokens[int],
        scored: Tokens[int],
        *,
        priority: int = 0,
        client: int = 0,
        text: bool = False,
        top_logprobs: int = 0,
        num_scored: int = 0,
        adapter: str = "",
    ) -> PromptUsage:
        """Begins a score. It computes the log-probability of each token of ``scored`` after all
        tokens before it.

        ``text``: outputs contain text. ``top_logprobs``: number of most likely tokens in each
        output. ``num_scored``: number of tokens at the beginning of ``scored`` that another worker
        has scored. The engine does not make outputs for these tokens. ``adapter``: as in ``add``.
        Returns the prompt's usage, which is complete when the request has been admitted. Raises
        RequestError if the request cannot be run.
        """
        sequence = self._intake.scoring(
            request,
            prompt,
            scored,
            priority=priority,
            client=client,
            text=text,
            top_logprobs=top_logprobs,
            num_scored=num_scored,
            adapter=self.loaded.adapter_number(adapter),
        )
        self._live.begin(sequence)
        return sequence.prompt_usage

    def abort(self, request: int, reason: FinishReason = "cancelled") -> list[TokenOutput]:
        """Ends a request now. Returns all outputs of the request that have not been returned yet.
        The last output of each sequence has ``reason``."""
        return self._live.abort(request, reason)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything. Suspended and deferred sequences do not count.
        Waiting sequences do not count if a deferred sequence must be rescheduled or end before they
        can be admitted."""
        return self._scheduler.has_work or bool(self._live.outputs)

    @property
    def has_requests(self) -> bool:
        """Whether any sequence is alive, including suspended, deferred and waiting sequences."""
        return bool(self._live.requests)

    @property
    def path(self) -> ForwardPath:
        """Describes the attention kernel, the CUDA graphs and the fallbacks of the forward.
        Thread-safe."""
        return self._runner.path

    def path_of(self, adapter: str) -> ForwardPath:
        """Like ``path``, for tokens with a LoRA adapter. Returns ``path`` if ``adapter`` is
        empty."""
        return self._runner.path_of(adapter) if adapter else self.path

    @property
    def overlaps(self) -> bool:
        """Whether steps overlap (``EngineConfig.overlap``)."""
        return self._overlaps

    def stats(self) -> dict[str, float]:
        """The gauges and counters of this model in the worker's heartbeats."""
        return {
            "running": float(len(self._scheduler.running) + len(self._scheduler.deferred)),
            "waiting": float(len(self._scheduler.waiting)),
            "deferred": float(len(self._scheduler.deferred)),
            "suspended": float(len(self._scheduler.suspended)),
            "kv_blocks_used": float(self._blocks.num_used),
            "kv_blocks": float(self._blocks.num_blocks - 1),
            "preemptions": float(self._scheduler.preemptions),
            "prefix_hit_tokens": float(self._scheduler.prefix_hit_tokens),
        }

    def metrics(self) -> dict[str, float | Histogram]:
        """The gauges of this model, and totals since it was loaded. May be called on another
        thread."""
        scheduler, live = self._scheduler, self._live
        sampled, speculation = self._stepper.sampled_tokens, self._speculation
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_deferred": len(scheduler.deferred),
            "num_requests_suspended": len(scheduler.suspended),
            "kv_cache_usage_perc": self._blocks.num_used / max(1, self._blocks.num_blocks - 1),
            "num_preemptions": scheduler.preemptions,
            "prefix_cache_queries": scheduler.prefix_query_tokens,
            "prefix_cache_hits": scheduler.prefix_hit_tokens,
            "generation_tokens": sampled + live.appended_tokens,
            "fast_forward_tokens": live.appended_tokens,
            "backtracked_tokens": live.dropped_tokens,
            "iteration_tokens_total": self._stepper.step_tokens,
            "forks": live.forks,
            "splices": live.splices,
            "deferrals": scheduler.deferrals,
            "spec_decode_num_drafts": speculation.drafts,
            "spec_decode_num_draft_tokens": speculation.draft_tokens,
            "spec_decode_num_accepted_tokens": speculation.accepted_tokens,
        }

    def run(self, work: Callable[[], T]) -> T:
        """Runs other work with the model, such as pooling hidden states, and returns its result.
        The work runs after the forwards that have been launched, and before all later forwards."""
        return self._runner.queue.submit(work).result()

    def replace_weights(self, new: NewWeights, keep: bool) -> set[int]:
        """Replaces the weights between two steps; the live sequences continue with the new weights.

        ``keep``: whether sequences keep the KV cache that was computed with the old weights. If
        False, the cache is computed again. Returns the requests whose sequences keep blocks. If
        this method raises an exception, the engine must not be used any more, because some weights
        may be old and others new.
        """
        self._stepper.cancel_ahead()

        def replace() -> None:
            new.copy_into(self.loaded)
            self._runner.refresh()

        self.run(replace)
        if keep:
            return {sequence.request for sequence in self._scheduler.keep_blocks()}
        self._scheduler.compute_again()
        return set()

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Computes one batch and returns its outputs. The outputs of each sequence are in order."""
        return self.finish(self.begin()).as_outputs()

    def begin(self) -> PendingStep:
        """The first half of a step: schedules a batch and launches its forward. If the previous
        ``finish`` has done this already, only returns the step."""
        self._blocks.expire_pins(time.monotonic())
        return self._stepper.begin()

    def finish(self, step: PendingStep) -> StepOutputs:
        """The second half of a step: samples the next token of each sequence that is ready. If
        steps overlap, ``finish`` launches the next forward before it waits for the tokens."""
        return self._stepper.finish(step)

    # --- steering -------------------------------------------------------------------------------

    def fork(self, request: int, seq: int, n: int, numbers: Tokens[int] | None = None) -> list[int]:
        """Forks a sequence ``n`` times, and returns the numbers of the ``n`` new sequences.

        ``numbers``: the numbers of the new sequences. By default, these are consecutive, beginning
        with the number of sequences that the request has had so far. New sequences share the
        parent's blocks. A shared block is copied before a sequence writes to it. If the parent is
        ready, new sequences sample from its logits, so they do not need a forward. Each new
        sequence draws its own token, because the random numbers depend on the sequence number. If
        the request would exceed ``max_forks`` sequences, including ended sequences, the parent is
        not forked and ends with an error. Raises RequestError if ``n`` or ``numbers`` is not valid.
        """
        parent = self._live.named(request, seq)
        if n < 1:
            raise RequestError(
                Code.INVALID_FIELD,
                f"a fork of {n} sequences was requested; expected at least 1",
            )
        return self._live.fork(parent, n, numbers)

    def splice(self, request: int, seq: int, drop: int, tokens: Tokens[int]) -> None:
        """Removes the last ``drop`` generated tokens and appends ``tokens``, without sampling.

        The next step computes the appended tokens as one chunk. Tokens that do not fit into this
        step are computed later. If the sequence is ready, it is not sampled in the pending step. If
        ``drop`` exceeds the number of generated tokens, or a token is not in the vocabulary, the
        sequence ends with an error. If an appended token ends the sequence, the tokens after it are
        left out. Raises RequestError if the splice neither drops nor appends tokens.
        """
        sequence = self._live.named(request, seq)
        if not drop and not tokens:
            raise RequestError(
                Code.INVALID_FIELD,
                "the splice neither drops nor appends tokens; it must do at least one of the two",
            )
        self._live.splice(sequence, drop, tokens)

    def report(self, request: int, seq: int) -> None:
        """Adds an output without a token. The caller then adds a controller's notes (logs, writes
        and messages) to the output. Does nothing if the sequence has ended."""
        sequence = self._live.find(request, seq)
        if sequence is not None:
            self._live.outputs.append(TokenOutput.of(sequence))

    def suspend(self, request: int, seq: int) -> None:
        """Suspends a sequence until ``resume`` is called, and discards its logits. The sequence
        keeps its blocks until other sequences need them."""
        sequence = self._live.named(request, seq)
        if sequence not in self._scheduler.suspended:
            self._live.discard_logits(sequence)
            self._scheduler.suspend(sequence)

    def resume(self, request: int, seq: int) -> None:
        """Resumes a suspended sequence, which then waits to be admitted. Does nothing if the
        sequence is not suspended."""
        sequence = self._live.named(request, seq)
        if sequence in self._scheduler.suspended:
            self._live.drop_texts(sequence)
            self._scheduler.resume(sequence)

    def pin(self, request: int, seq: int, until: float, owner: int) -> None:
        """Pins the computed blocks of a sequence until the time ``until`` of ``time.monotonic``
        (``BlockManager.pin``)."""
        self._blocks.pin(self._live.named(request, seq).block_table, until, owner)

    def begin_anew(self, request: int, seq: int, prompt: Tokens[int]) -> None:
        """Replaces all tokens of a sequence, including the prompt, by a new prompt. The sequence
        waits to be admitted, as a new request does.

        If the prompt is not valid, the sequence ends with an error.
        """
        self._live.begin_anew(self._live.named(request, seq), prompt)

    def score_texts(self, request: int, seq: int, texts: Tokens[Tokens[int]]) -> None:
        """Computes the log-probability of each token of each text. Each text is scored as if it
        followed the sequence. The texts share the sequence's blocks. At most ``max_forks`` texts of
        a request are computed at once.

        The sequence is suspended until ``resume``. When all texts are scored, the sequence gets one
        output with ``scores``. Raises RequestError if there are no texts, or more than
        ``MAX_SCORED_TEXTS`` or ``MAX_SCORED_TOKENS``, or if a text is empty or too long.
        """
        sequence = self._live.named(request, seq)
        total = sum(map(len, texts))
        if not 0 < len(texts) <= MAX_SCORED_TEXTS or total > MAX_SCORED_TOKENS or not all(texts):
            raise RequestError(
                Code.INVALID_FIELD,
                f"{len(texts)} texts of {total} tokens are to be scored; expected 1 to "
                f"{MAX_SCORED_TEXTS} texts, none of them empty, of at most {MAX_SCORED_TOKENS} "
                "tokens",
            )
        longest = max(map(len, texts))
        if len(sequence.tokens) + longest > self.max_length:
            raise RequestError(
                Code.PROMPT_TOO_LONG,
                f"a text of {longest} tokens cannot be scored after {len(sequence.tokens)} tokens; "
                f"{self.loaded.name} takes at most {self.max_length} tokens",
            )
        for text in texts:
            self._intake.check_tokens(text, "texts")
        self._live.score(sequence, texts)

    def look(self, request: int, seq: int, query: Query) -> None:
        """Answers a query about the distribution of a sequence's next token, without sampling.

        When the sequence has logits, it gets one output with the answer. The sequence is then
        deferred until ``reschedule`` is called, and keeps its logits.
        """
        self._live.look(self._live.named(request, seq), query)

    def alive(self, request: int, seq: int) -> bool:
        """Whether the sequence exists and has not ended."""
        return self._live.find(request, seq) is not None

    def ready(self, request: int, seq: int) -> bool:
        """Whether a sequence has logits to sample from."""
        return self._live.has_logits(self._live.named(request, seq))

    def num_missing(self, request: int, seq: int) -> int:
        """The number of tokens of a sequence that have not been computed."""
        sequence = self._live.named(request, seq)
        return len(sequence.tokens) - sequence.num_computed_tokens

    def defer(self, request: int, seq: int) -> None:
        """Defers a sequence that the pending step would sample. It stays deferred until
        ``reschedule`` is called, keeps its logits, and does not count towards ``max_num_seqs``.
        Does nothing for other sequences."""
        sequence, step = self._live.named(request, seq), self._live.step
        if step is not None and sequence in step.rows:
            sequence.row = step.keep(step.rows.pop(sequence))
            self._scheduler.defer(sequence)

    def reschedule(self, request: int, seq: int) -> None:
        """Reschedules a deferred sequence, so that the pending step or a later step can sample it.
        Does nothing if the sequence is not deferred."""
        self._scheduler.reschedule(self._live.named(request, seq))

    def set_mask(
        self,
        request: int,
        seq: int,
        mask: np.ndarray | None,
        bias: Bias | None = None,
        options: TokenOptions | None = None,
    ) -> None:
        """Sets the token mask, the logit bias and the sampling options of a sequence's next token.

        ``mask``: u32 ``[ceil(vocab / 32)]``; bit i is set if token i is allowed. None allows all
        tokens.
        """
        words = self.mask_words
        if mask is not None and (mask.dtype != np.uint32 or mask.shape != (words,)):
            raise RequestError(
                Code.INVALID_FIELD,
                f"the mask has the shape {mask.shape} and the type {mask.dtype}; expected "
                f"({words},) and uint32",
            )
        sequence = self._live.named(request, seq)
        sequence.mask, sequence.bias, sequence.along = mask, bias, ()
        sequence.options = options

    def take_drafts(self, request: int) -> None:
        """Enables drafts for the sequences of a request. The request's controller must be able to
        compute a mask after each token of a draft (``draft_ahead``)."""
        for sequence in self._live.requests.get(request, {}).values():
            self._speculation.begin(sequence, steered=True)

    def draft_ahead(self, keys: Tokens[tuple[int, int]]) -> dict[tuple[int, int], Tokens[int]]:
        """Makes drafts for sequences that controllers steer. ``keys``: the sequences as (request,
        seq). Returns, by the same keys, the drafts that the next step can verify. Sequences without
        a draft are left out. The result is empty if the next step has been launched already."""
        if self._stepper.launched_ahead:
            return {}
        found = [sequence for key in keys if (sequence := self._live.find(*key)) is not None]
        self._speculation.propose_ahead(found, len(self._scheduler.running))
        return {(s.request, s.seq): s.draft for s in found if s.draft}

    def sample_along(self, request: int, seq: int, unders: Tokens[Under]) -> None:
        """Sets the masks and biases that apply after each token of a sequence's draft. Must be
        called after ``set_mask``. Does nothing if the sequence has ended or does not have a mask.
        The step verifies one draft token for each element of ``unders``. If the mask of an element
        has the wrong size, this element and all elements after it are ignored."""
        sequence = self._live.find(request, seq)
        if sequence is not None and sequence.mask is not None:
            sizes = [self.mask_words if u.mask is None else len(u.mask) for u in unders]
            usable = next((i for i, n in enumerate(sizes) if n != self.mask_words), len(sizes))
            sequence.along = unders[:usable]

    def allows(self, request: int, seq: int, token: int) -> bool | None:
        """Whether the mask of a sequence's next token allows ``token``. None if a mask is not set,
        or if the sequence has ended."""
        sequence = self._live.find(request, seq)
        if sequence is None or sequence.mask is None:
            return None
        return bool(sequence.mask[token >> 5] >> (token & 31) & 1)

    def sequences(self, request: int) -> list[int]:
        """The numbers of a request's live sequences."""
        return [seq for seq in self._live.requests.get(request, ()) if seq >= 0]

    def sample_under(
        self,
        request: int,
        seq: int,
        mask: np.ndarray | None,
        bias: Bias | None = None,
        options: TokenOptions | None = None,
    ) -> bool:
        """Does the work of ``set_mask`` and ``reschedule`` in one call. Does nothing and returns
        False if the sequence has ended or is suspended, or if the mask has the wrong size."""
        sequence = self._live.find(request, seq)
        if sequence is None or (mask is not None and len(mask) != self.mask_words):
            return False
        if self._scheduler.suspended and sequence in self._scheduler.suspended:
            return False
        sequence.mask, sequence.bias, sequence.along = mask, bias, ()
        sequence.options = options
        if self._scheduler.deferred:
            self._scheduler.reschedule(sequence)
        return True

    def end(
        self,
        request: int,
        seq: int,
        reason: FinishReason = "controller",
        error: str = "",
        code: str | None = None,
    ) -> None:
        """Ends one sequence. If ``reason`` is "error", the last output of the sequence has
        ``error`` and ``code``."""
        ended = self._live.end(self._live.named(request, seq), reason, error, code)
        self._live.outputs.append(ended)


def _cache_bytes(
    loaded: LoadedModel, layout: Layout, config: EngineConfig, draft_model: LoadedModel | None
) -> int:
    """The default size in bytes of two KV caches together: that of the model and that of its draft
    model."""
    if loaded.device.type != "cuda":
        return cpu_bytes()
    # With several ranks, the largest step is not measured, because the other ranks cannot run a
    # step before their caches are allocated.
    step = 0
    if loaded.ranks is None:
        step = largest_step_bytes(
            loaded, layout, config.max_num_seqs, config.max_num_batched_tokens
        )
    others = [draft_model] if draft_model is not None else []
    return cache_bytes(loaded, layout, step, config.memory_part, others)
