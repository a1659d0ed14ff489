"""The engine of one model: requests in, tokens out, one step at a time.

engine = Engine(load_model("embedded"))
engine.add(1, prompt=[12, 7], sampling=Sampling(max_tokens=5))
while engine.has_work:
    for output in engine.step():
        print(output.token, output.finish_reason)

A step has two halves, so that a program can decide between them while it knows that a token is due:
``begin`` runs the forward, ``finish`` samples. ``fork``, ``splice``, ``suspend``, ``hold`` and
``set_mask`` may be called between the two, for the sequences in ``PendingStep.ready``, and at any
other time.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from ...protocol.errors import Code, RequestError
from ...protocol.messages import FinishReason
from ...protocol.sampling import Sampling
from .allocator import keep_freed_memory
from .block_manager import BlockManager, BlockTable
from .kv_cache import default_bytes, token_bytes
from .loader import LoadedModel
from .runner import Runner
from .sampler import NAN, Row, sample, scores
from .scheduler import Batch, Chunk, Scheduler
from .sequence import Sequence, TokenOutput
from .text import Detokenizer, TextStream, detokenizers
from .varlen import choose_layout

__all__ = ["Engine", "EngineConfig", "PendingStep", "TokenOutput"]

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Sizes of an engine."""

    max_running: int = 256
    """Sequences in one batch."""
    max_step_tokens: int = 2048
    """Tokens of one forward: decodes and chunks of prompts together."""
    max_forks: int = 128
    """Sequences that one request may come to have, those that ended included."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache, in bytes; None: by what the device has."""
    compiled: bool = False
    """Run the model through torch.compile."""


@dataclass(slots=True)
class PendingStep:
    """A step between its forward and its sampling."""

    logits: torch.Tensor | None = None
    """``[rows, vocab]``, float32."""
    rows: dict[Sequence, int] = field(default_factory=dict)
    """The sequences that will be sampled, and at which row of the logits each of them looks."""

    @property
    def ready(self) -> list[tuple[int, int]]:
        """The sequences that ``finish`` will sample, as (request, seq)."""
        return [(s.request, s.seq) for s in self.rows]

    def add(self, logits: torch.Tensor) -> int:
        """Takes further rows in; the number of the first."""
        first = 0 if self.logits is None else len(self.logits)
        self.logits = logits if self.logits is None else torch.cat([self.logits, logits])
        return first


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread makes all calls.

    A sequence is named by (request, seq): the number that the caller gave the request, and 0 or a
    fork's number. What a call names wrongly raises RequestError; what is wrong with a sequence ends
    that sequence, with an output that says why, and nothing else.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        self._config = config = config or EngineConfig()
        if loaded.device.type == "cpu":
            keep_freed_memory()
        self.loaded = loaded
        size = config.kv_cache_bytes or default_bytes(loaded.device)
        layout = choose_layout(loaded)
        per_token = token_bytes(loaded.layers, loaded.dtype)
        num_pages = max(2, size // (layout.page_size * per_token))
        self._blocks = BlockManager(num_pages, layout.page_size)
        self._scheduler = Scheduler(self._blocks, config.max_running, config.max_step_tokens)
        self._runner = Runner(loaded, num_pages, layout, config.compiled)
        self._requests: dict[int, dict[int, Sequence]] = {}
        self._numbers: dict[int, int] = {}
        """Of each request: the number of its next fork."""
        self._arrivals = count()
        self._outputs: list[TokenOutput] = []
        """What is to be told with the next step."""
        self._step: PendingStep | None = None
        self._detokenizer: Callable[[Tokens[int]], Detokenizer] | None = None
        if loaded.tokenizer is not None:
            self._detokenizer = detokenizers(loaded.tokenizer)
        self.max_length = min(loaded.context_length, self._blocks.capacity)
        log.info(
            "%s: a KV cache of %d pages of %d tokens, %.0f MiB; attention: %s",
            loaded.name,
            num_pages,
            layout.page_size,
            num_pages * layout.page_size * per_token / 2**20,
            layout.why,
        )

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
    ) -> None:
        """Begins a generation; ``sampling.n`` sequences come of it, numbered from 0.

        ``client`` is who asks: those that have least running go first. ``text``: outputs carry
        text. Raises RequestError where the request cannot be run, and then nothing has changed.
        """
        self._check(prompt, len(prompt) + 1, "$.prompt")
        _check_ids(sampling.logit_bias, self.loaded.vocab_size, "$.logit_bias")
        strings = [s for s in sampling.stop if isinstance(s, str)]
        ids = frozenset(s for s in sampling.stop if isinstance(s, int))
        _check_ids(ids, self.loaded.vocab_size, "$.stop")
        if self._detokenizer is None and (text or strings):
            raise RequestError(
                Code.UNSUPPORTED,
                "this model has no tokenizer, so it can neither give text nor stop at a string",
                path="$.text" if text else "$.stop",
            )
        if not sampling.ignore_eos:
            ids |= self.loaded.eos_token_ids
        sequence = Sequence(
            request=request,
            seq=0,
            tokens=list(prompt),
            num_prompt=len(prompt),
            sampling=sampling,
            max_length=min(self.max_length, len(prompt) + sampling.max_tokens),
            seed=secrets.randbits(62) if sampling.seed is None else sampling.seed,
            priority=priority,
            client=client,
            arrival=next(self._arrivals),
            stop_ids=ids,
            says_text=text,
            pending=sampling.n - 1,
        )
        if text or strings:
            sequence.text = self._text(sequence)
        self._begin_request(sequence)

    def score(
        self,
        request: int,
        prompt: Tokens[int],
        scored: Tokens[int],
        *,
        priority: int = 0,
        client: int = 0,
        text: bool = False,
    ) -> None:
        """Asks for the log-probability of each token of ``scored``, given all before it.

        ``text``: outputs carry text. Raises RequestError where the request cannot be run.
        """
        length = len(prompt) + len(scored)
        self._check(prompt, length, "$.prompt")
        if not scored:
            raise RequestError(Code.INVALID_FIELD, "there is nothing to score", path="$.scored")
        _check_ids(scored, self.loaded.vocab_size, "$.scored")
        sequence = Sequence(
            request=request,
            seq=0,
            tokens=[*prompt, *scored],
            num_prompt=len(prompt),
            sampling=Sampling(),
            max_length=length,
            scored=True,
            priority=priority,
            client=client,
            arrival=next(self._arrivals),
        )
        if text and self._detokenizer is not None:
            sequence.text = TextStream(self._detokenizer(prompt))
        self._begin_request(sequence)

    def abort(self, request: int, reason: FinishReason = "cancelled") -> list[TokenOutput]:
        """Ends a request now; the last output of each of its sequences says ``reason``."""
        # What is still to be told of it comes first: the fork whose end this may be, for one.
        ended = [o for o in self._outputs if o.request == request]
        self._outputs = [o for o in self._outputs if o.request != request]
        for sequence in list(self._requests.get(request, {}).values()):
            ended.append(self._end(sequence, reason))
            ended += [
                TokenOutput(request, sequence.seq + 1 + i, None, None, 0, reason)
                for i in range(sequence.pending)
            ]
        return ended

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything. Sequences that are suspended or held are no work."""
        return self._scheduler.has_work or bool(self._outputs)

    @property
    def has_requests(self) -> bool:
        """Whether any sequence is alive, working or not."""
        return bool(self._requests)

    @property
    def runs_beside(self) -> bool:
        """Whether a forward goes on, on its device, after ``begin`` has returned."""
        return self.loaded.device.type == "cuda"

    @property
    def mask_words(self) -> int:
        """Words of a mask, u32 each."""
        return -(-self.loaded.vocab_size // 32)

    def stats(self) -> dict[str, float]:
        """Gauges and counters, for heartbeats and for people."""
        return {
            "running": float(len(self._scheduler.running)),
            "waiting": float(len(self._scheduler.waiting)),
            "suspended": float(len(self._scheduler.suspended)),
            "kv_pages_used": float(self._blocks.num_held),
            "kv_pages": float(self._blocks.num_pages - 1),
            "preemptions": float(self._scheduler.preemptions),
            "prefix_hit_tokens": float(self._scheduler.prefix_hit_tokens),
        }

    # --- steering -------------------------------------------------------------------------------

    def fork(self, request: int, seq: int, n: int, numbers: Tokens[int] | None = None) -> list[int]:
        """Forks a sequence into itself and ``n`` more; the numbers of these: the next ones, or
        ``numbers`` where the caller counts them.

        Pages are shared until one of them is written to. Forks of a sequence that is ready sample
        from the same logits as it does, so that no forward is spent on them; each draws for itself,
        as its number is part of what decides. Beyond ``max_forks`` the sequence ends with an error,
        and there are none.
        """
        parent = self._named(request, seq)
        if n < 1:
            raise RequestError(Code.INVALID_FIELD, f"a fork makes at least one more, not {n}")
        first = self._numbers[request]
        numbers = range(first, first + n) if numbers is None else numbers
        after = max(first, max(numbers) + 1)
        if after > self._config.max_forks:
            self._outputs += self._fail(
                parent,
                f"{n} more forks would make {after} sequences of this request; "
                f"{self._config.max_forks} are allowed",
            )
            return []
        self._numbers[request] = after
        children = [self._forked(parent, number) for number in numbers]
        for child in children:
            self._outputs.append(
                TokenOutput(request, child.seq, None, None, child.num_generated, parent=seq)
            )
            step = self._step
            if step is not None and parent in step.rows:
                step.rows[child] = step.rows[parent]
            elif parent.row is not None:
                child.row = parent.row
        self._scheduler.forked(children)
        return [child.seq for child in children]

    def splice(self, request: int, seq: int, drop: int, tokens: Tokens[int]) -> None:
        """Takes the last ``drop`` generated tokens back and appends ``tokens``, without sampling.

        They are computed as one chunk beside the decodes. Where the sequence was ready, it is not
        sampled in this step. A splice past the first generated token ends the sequence with an
        error; tokens beyond its ``max_tokens`` are left out.
        """
        sequence = self._named(request, seq)
        if not drop and not tokens:
            raise RequestError(Code.INVALID_FIELD, "a splice drops tokens or appends some")
        try:
            if not 0 <= drop <= sequence.num_generated:
                raise RequestError(
                    Code.INVALID_FIELD,
                    f"a splice that drops {drop} tokens, of {sequence.num_generated} generated",
                )
            _check_ids(tokens, self.loaded.vocab_size, "ff_tokens")
        except RequestError as error:
            self._outputs += self._fail(sequence, error.message)
            return
        self._not_now(sequence)
        if drop:
            self._drop(sequence, drop)
        if not tokens:
            pos = sequence.num_generated
            self._outputs.append(TokenOutput(request, seq, None, None, pos, backtrack=drop))
            return
        for token in tokens:
            output = self._append(sequence, token, None, None)
            self._outputs.append(output._replace(backtrack=drop))
            drop = 0
            if output.finish_reason is not None:
                return

    def suspend(self, request: int, seq: int) -> None:
        """Lets a sequence sit out until ``resume``. It keeps its pages while there are enough."""
        sequence = self._named(request, seq)
        if sequence not in self._scheduler.suspended:
            self._not_now(sequence)
            self._scheduler.suspend(sequence)

    def resume(self, request: int, seq: int) -> None:
        """Lets a suspended sequence go on."""
        sequence = self._named(request, seq)
        if sequence in self._scheduler.suspended:
            self._scheduler.resume(sequence)

    def alive(self, request: int, seq: int) -> bool:
        """Whether there is such a sequence and it has not ended."""
        return seq in self._requests.get(request, {})

    def ready(self, request: int, seq: int) -> bool:
        """Whether a sequence has logits to sample from."""
        sequence = self._named(request, seq)
        return sequence.row is not None or (self._step is not None and sequence in self._step.rows)

    def hold(self, request: int, seq: int) -> None:
        """Lets a sequence that is ready sit out until ``release``; its logits are kept."""
        sequence = self._named(request, seq)
        step = self._step
        if step is not None and step.logits is not None and sequence in step.rows:
            sequence.row = step.logits[step.rows.pop(sequence)].clone()
            sequence.held = True

    def release(self, request: int, seq: int) -> None:
        """Lets a sequence that is held be sampled in the next step."""
        self._named(request, seq).held = False

    def set_mask(self, request: int, seq: int, mask: np.ndarray | None) -> None:
        """Allows only some tokens for the next one that is sampled.

        ``mask``: u32 ``[ceil(vocab / 32)]``, bit i set where token i is allowed; None: all.
        """
        words = self.mask_words
        if mask is not None and (mask.dtype != np.uint32 or mask.shape != (words,)):
            raise RequestError(
                Code.INVALID_FIELD,
                f"a mask is {words} words of u32, this one is {mask.shape} of {mask.dtype}",
            )
        self._named(request, seq).mask = mask

    def go_on(self, request: int, seq: int, mask: np.ndarray | None) -> bool:
        """``set_mask`` and ``release`` at once, for the usual case: a sequence that is alive and
        not suspended, and a mask of the right size. False, and nothing done, in any other."""
        sequence = self._requests.get(request, {}).get(seq)
        if sequence is None or (mask is not None and len(mask) != self.mask_words):
            return False
        if self._scheduler.suspended and sequence in self._scheduler.suspended:
            return False
        sequence.mask = mask
        sequence.held = False
        return True

    def end(
        self,
        request: int,
        seq: int,
        reason: FinishReason = "controller",
        error: str = "",
        code: str | None = None,
    ) -> None:
        """Ends one sequence; with ``error`` and its code, where ``reason`` is that."""
        ended = self._end(self._named(request, seq), reason, error)
        self._outputs.append(ended._replace(code=code))

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Computes one batch and returns what it gave, in order within each sequence."""
        return self.finish(self.begin())

    def begin(self) -> PendingStep:
        """The first half: the forward of what is scheduled."""
        batch = self._scheduler.schedule()
        self._step = step = PendingStep()
        if batch.chunks:
            for chunks, logits in self._run(batch):
                self._computed(step, chunks, logits)
        kept = [s for s in self._scheduler.running if s.row is not None and not s.held]
        if kept:
            at = step.add(torch.stack([s.row for s in kept if s.row is not None]))
            step.rows.update(zip(kept, range(at, at + len(kept)), strict=True))
        return step

    def wait_for_forward(self) -> None:
        """Returns when the forward that ``begin`` has started is over on its device."""
        if self.runs_beside:
            torch.cuda.current_stream(self.loaded.device).synchronize()

    def finish(self, step: PendingStep) -> list[TokenOutput]:
        """The second half: samples the next token of each sequence that is ready."""
        self._step = None
        outputs, self._outputs = self._outputs, []
        if step.logits is None or not step.rows:
            return outputs
        sequences = list(step.rows)
        sampled = sample(step.logits, list(step.rows.values()), [_row(s) for s in sequences])
        for i, sequence in enumerate(sequences):
            sequence.mask = sequence.row = None
            if i in sampled.errors:
                outputs += self._fail(sequence, sampled.errors[i])
            else:
                token, logprob, top = sampled.tokens[i], sampled.logprobs[i], sampled.top[i]
                outputs.append(self._append(sequence, token, logprob, top))
        return outputs

    def _run(self, batch: Batch) -> list[tuple[list[Chunk], torch.Tensor]]:
        """The forward; where it fails, each chunk on its own, so that only the guilty ones end."""
        try:
            return [self._runner.run(batch)]
        except Exception as error:
            if len(batch.chunks) == 1:
                sequence = batch.chunks[0].sequence
                log.exception("the forward of request %d failed", sequence.request)
                self._outputs += self._fail(sequence, f"the model failed: {error}")
                return []
        computed = []
        copies = batch.copies
        for chunk in batch.chunks:
            computed += self._run(Batch([chunk], copies))
            copies = []
        return computed

    def _computed(self, step: PendingStep, chunks: list[Chunk], logits: torch.Tensor) -> None:
        """Takes in what was computed: scores, the forks that wait for it, and who is ready."""
        row = step.add(logits)
        for chunk in chunks:
            sequence, rows = chunk.sequence, chunk.end - chunk.first_row
            sequence.computed = chunk.end
            if sequence.scored and rows:
                assert step.logits is not None
                self._outputs += self._scores(chunk, step.logits[row : row + rows])
            elif rows:
                for ready in (sequence, *self._fork_pending(sequence)):
                    step.rows[ready] = row
            if sequence.request in self._requests:
                self._blocks.commit(sequence.table, sequence.tokens, sequence.computed)
            row += rows

    def _scores(self, chunk: Chunk, logits: torch.Tensor) -> list[TokenOutput]:
        """The log-probabilities of the tokens that follow a chunk's rows."""
        sequence = chunk.sequence
        tokens = sequence.tokens[chunk.first_row + 1 : chunk.end + 1]
        first = chunk.first_row + 1 - sequence.num_prompt
        found = scores(logits, tokens)
        if any(value != value for value in found):
            return self._fail(sequence, NAN)
        said = sequence.text
        outputs = [
            TokenOutput(
                sequence.request,
                sequence.seq,
                token,
                value,
                first + i,
                text=said.push(token).certain if said is not None else None,
            )
            for i, (token, value) in enumerate(zip(tokens, found, strict=True))
        ]
        if chunk.completes:
            rest = said.finish().certain if said is not None else ""
            last = outputs[-1]
            text = last.text + rest if last.text is not None else None
            outputs[-1] = last._replace(finish_reason="length", text=text)
            self._remove(sequence)
        return outputs

    # --- sequences ------------------------------------------------------------------------------

    def _begin_request(self, sequence: Sequence) -> None:
        self._requests[sequence.request] = {sequence.seq: sequence}
        self._numbers[sequence.request] = 1 + sequence.pending
        self._scheduler.add(sequence)

    def _named(self, request: int, seq: int) -> Sequence:
        sequence = self._requests.get(request, {}).get(seq)
        if sequence is None or sequence.scored:
            raise RequestError(
                Code.UNKNOWN_STREAM, f"request {request} has no live sequence {seq} to steer"
            )
        return sequence

    def _fork_pending(self, sequence: Sequence) -> list[Sequence]:
        """The other sequences of a request with ``n``: they share the prompt's pages and logits."""
        children = [self._forked(sequence, number) for number in range(1, sequence.pending + 1)]
        sequence.pending = 0
        self._scheduler.forked(children)
        return children

    def _forked(self, parent: Sequence, number: int) -> Sequence:
        child = Sequence(
            request=parent.request,
            seq=number,
            tokens=list(parent.tokens),
            num_prompt=parent.num_prompt,
            sampling=parent.sampling,
            max_length=parent.max_length,
            seed=parent.seed,
            priority=parent.priority,
            client=parent.client,
            arrival=parent.arrival,
            stop_ids=parent.stop_ids,
            text=parent.text.fork() if parent.text is not None else None,
            says_text=parent.says_text,
            table=self._blocks.fork(parent.table, parent.computed),
            computed=parent.computed,
        )
        self._requests[parent.request][number] = child
        return child

    def _not_now(self, sequence: Sequence) -> None:
        """A sequence that was ready is not sampled: its last token is to be computed again."""
        if self._step is not None:
            self._step.rows.pop(sequence, None)
        sequence.row = sequence.mask = None
        sequence.held = False
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)

    def _drop(self, sequence: Sequence, drop: int) -> None:
        del sequence.tokens[len(sequence.tokens) - drop :]
        # The last token is computed again, for its logits.
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
        self._blocks.truncate(sequence.table, sequence.computed)
        if sequence.text is not None:
            sequence.text = self._text(sequence)

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: float | None,
        top: dict[int, float] | None,
    ) -> TokenOutput:
        """Appends a token to its sequence, and ends it where that is due."""
        pos = sequence.num_generated
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        if token in sequence.stop_ids:
            reason = "stop"
        elif len(sequence.tokens) >= sequence.max_length:
            reason = "length"
        text = None
        if sequence.text is not None:
            said = sequence.text.push(token)
            text = said.certain
            if said.stopped:
                reason = "stop"
            elif reason is not None:
                rest = sequence.text.finish()
                text += rest.certain
                reason = "stop" if rest.stopped else reason
        if reason is not None:
            self._remove(sequence)
        text = text if sequence.says_text else None
        request, seq = sequence.request, sequence.seq
        return TokenOutput(request, seq, token, logprob, pos, reason, top, text)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> TokenOutput:
        """Ends a sequence without a further token."""
        text = None
        if sequence.says_text and sequence.text is not None:
            text = sequence.text.finish().certain
        self._remove(sequence)
        return TokenOutput(
            sequence.request,
            sequence.seq,
            None,
            None,
            sequence.num_generated,
            reason,
            text=text,
            error=error or None,
        )

    def _fail(self, sequence: Sequence, error: str) -> list[TokenOutput]:
        """Ends a sequence with an error; its pages come back, cleared."""
        self._runner.clear_pages(self._blocks.discard(sequence.table))
        sequence.table = BlockTable()
        missing = [
            TokenOutput(sequence.request, 1 + i, None, None, 0, "error", error=error)
            for i in range(sequence.pending)
        ]
        return [self._end(sequence, "error", error), *missing]

    def _remove(self, sequence: Sequence) -> None:
        if self._step is not None:
            self._step.rows.pop(sequence, None)
        self._scheduler.remove(sequence)
        left = self._requests[sequence.request]
        del left[sequence.seq]
        if not left:
            del self._requests[sequence.request]
            del self._numbers[sequence.request]

    def _text(self, sequence: Sequence) -> TextStream:
        """The text of a sequence's tokens so far, ready for the next."""
        assert self._detokenizer is not None
        strings = [s for s in sequence.sampling.stop if isinstance(s, str)]
        prompt = sequence.tokens[: sequence.num_prompt]
        text = TextStream(self._detokenizer(prompt), strings)
        for token in sequence.generated:
            text.push(token)
        return text

    # --- checks ---------------------------------------------------------------------------------

    def _check(self, prompt: Tokens[int], length: int, path: str) -> None:
        """Refuses an empty prompt, one that is too long, and tokens that are none."""
        if not prompt:
            raise RequestError(
                Code.EMPTY_PROMPT, "the prompt is empty; it needs at least one token", path=path
            )
        if length > self.max_length:
            raise RequestError(
                Code.PROMPT_TOO_LONG,
                f"{length} tokens are asked for; {self.loaded.name} takes {self.max_length}, with "
                "at least one generated",
                path=path,
            )
        _check_ids(prompt, self.loaded.vocab_size, path)


def _row(sequence: Sequence) -> Row:
    sampling = sequence.sampling
    looks_back = (
        sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )
    return Row(
        sampling,
        sequence.seed,
        sequence.seq,
        sequence.num_generated,
        prompt=sequence.tokens[: sequence.num_prompt] if looks_back else (),
        generated=sequence.generated if looks_back else (),
        mask=sequence.mask,
    )


def _check_ids(tokens: Iterable[int], vocab_size: int, path: str) -> None:
    """Refuses the first token id that the model does not have."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(
                Code.TOKEN_OUT_OF_RANGE,
                f"token id {token} is outside the vocabulary, which is 0 to {vocab_size - 1}",
                path=f"{path}[{i}]",
            )
