"""The engine of one model: requests in, tokens out, one step at a time.

engine = Engine(load_model("embedded"))
engine.add(1, prompt=[12, 7], sampling=Sampling(max_tokens=5))
while engine.has_work:
    for output in engine.step():
        print(output.token, output.finish_reason)
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import count

import torch

from ...protocol.errors import Code, RequestError
from ...protocol.messages import FinishReason
from ...protocol.sampling import Sampling
from .block_manager import BlockManager, BlockTable
from .kv_cache import PAGE_SIZE, default_bytes, page_bytes
from .loader import LoadedModel
from .runner import Runner
from .sampler import NAN, Row, Sampled, sample, scores
from .scheduler import Batch, Chunk, Scheduler
from .sequence import Sequence, TokenOutput
from .text import Detokenizer, TextStream, detokenizers

__all__ = ["Engine", "EngineConfig", "TokenOutput"]

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Sizes of an engine."""

    max_running: int = 256
    """Sequences in one batch."""
    max_step_tokens: int = 2048
    """Tokens of one forward: decodes and chunks of prompts together."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache, in bytes; None: by what the device has."""


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.loaded = loaded
        size = config.kv_cache_bytes or default_bytes(loaded.device)
        num_pages = max(2, size // page_bytes(loaded.layers, loaded.dtype))
        self._blocks = BlockManager(num_pages, PAGE_SIZE)
        self._scheduler = Scheduler(self._blocks, config.max_running, config.max_step_tokens)
        self._runner = Runner(loaded, num_pages)
        self._requests: dict[int, list[Sequence]] = {}
        self._arrivals = count()
        self._detokenizer: Callable[[Tokens[int]], Detokenizer] | None = None
        if loaded.tokenizer is not None:
            self._detokenizer = detokenizers(loaded.tokenizer)
        self.max_length = min(loaded.context_length, self._blocks.capacity)
        log.info(
            "%s: a KV cache of %d pages of %d tokens, %.0f MiB",
            loaded.name,
            num_pages,
            PAGE_SIZE,
            num_pages * page_bytes(loaded.layers, loaded.dtype) / 2**20,
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
            text=self._text(prompt, strings) if text or strings else None,
            says_text=text,
            pending=sampling.n - 1,
        )
        self._requests[request] = [sequence]
        self._scheduler.add(sequence)

    def score(
        self,
        request: int,
        prompt: Tokens[int],
        scored: Tokens[int],
        *,
        priority: int = 0,
        client: int = 0,
    ) -> None:
        """Asks for the log-probability of each token of ``scored``, given all before it.

        Raises RequestError where the request cannot be run.
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
        self._requests[request] = [sequence]
        self._scheduler.add(sequence)

    def abort(self, request: int, reason: FinishReason = "cancelled") -> list[TokenOutput]:
        """Ends a request now; the last output of each of its sequences says ``reason``."""
        ended = []
        for sequence in list(self._requests.get(request, ())):
            ended.append(self._end(sequence, reason))
            ended += [
                TokenOutput(request, sequence.seq + 1 + i, None, None, 0, reason)
                for i in range(sequence.pending)
            ]
        return ended

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self._scheduler.has_work

    def stats(self) -> dict[str, float]:
        """Gauges and counters, for heartbeats and for people."""
        return {
            "running": float(len(self._scheduler.running)),
            "waiting": float(len(self._scheduler.waiting)),
            "kv_pages_used": float(self._blocks.num_held),
            "kv_pages": float(self._blocks.num_pages - 1),
            "preemptions": float(self._scheduler.preemptions),
            "prefix_hit_tokens": float(self._scheduler.prefix_hit_tokens),
        }

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Computes one batch and returns what it gave, in order within each sequence."""
        batch = self._scheduler.schedule()
        if not batch.chunks:
            return []
        try:
            chunks, logits = self._runner.run(batch)
        except Exception as error:
            return self._apart(batch, error)
        return self._results(chunks, logits)

    def _apart(self, batch: Batch, error: Exception) -> list[TokenOutput]:
        """After a failed forward: each chunk on its own, so that only the guilty one ends."""
        if len(batch.chunks) == 1:
            log.exception("the forward of request %d failed", batch.chunks[0].sequence.request)
            return self._fail(batch.chunks[0].sequence, f"the model failed: {error}")
        outputs = []
        copies = batch.copies
        for chunk in batch.chunks:
            alone = Batch([chunk], copies)
            copies = []
            try:
                outputs += self._results(*self._runner.run(alone))
            except Exception as again:
                outputs += self._apart(alone, again)
        return outputs

    def _results(self, chunks: list[Chunk], logits: torch.Tensor) -> list[TokenOutput]:
        """Takes in what was computed: scores, forks, and the sampled tokens."""
        outputs: list[TokenOutput] = []
        sampling: list[Sequence] = []
        which: list[int] = []
        row = 0
        for chunk in chunks:
            sequence, rows = chunk.sequence, chunk.end - chunk.first_row
            sequence.computed = chunk.end
            if sequence.scored:
                if rows:
                    outputs += self._scores(chunk, logits[row : row + rows])
            elif rows:
                for fork in [sequence, *self._fork_pending(sequence)]:
                    sampling.append(fork)
                    which.append(row)
            if sequence.request in self._requests:
                self._blocks.commit(sequence.table, sequence.tokens, sequence.computed)
            row += rows
        if sampling:
            sampled = sample(logits, which, [_row(s) for s in sampling])
            for i, sequence in enumerate(sampling):
                outputs += self._token(sequence, sampled, i)
        return outputs

    def _fork_pending(self, sequence: Sequence) -> list[Sequence]:
        """The other sequences of a request with ``n``: they share the prompt's pages and logits."""
        children = []
        for number in range(1, sequence.pending + 1):
            strings = [s for s in sequence.sampling.stop if isinstance(s, str)]
            child = Sequence(
                request=sequence.request,
                seq=number,
                tokens=list(sequence.tokens),
                num_prompt=sequence.num_prompt,
                sampling=sequence.sampling,
                max_length=sequence.max_length,
                seed=sequence.seed,
                priority=sequence.priority,
                client=sequence.client,
                arrival=sequence.arrival,
                stop_ids=sequence.stop_ids,
                text=self._text(sequence.tokens, strings) if sequence.text else None,
                says_text=sequence.says_text,
                table=self._blocks.fork(sequence.table, sequence.computed),
                computed=sequence.computed,
            )
            children.append(child)
        sequence.pending = 0
        self._scheduler.forked(children)
        self._requests[sequence.request] += children
        return children

    def _token(self, sequence: Sequence, sampled: Sampled, i: int) -> list[TokenOutput]:
        """Appends a sampled token to its sequence, and ends it where that is due."""
        if i in sampled.errors:
            return self._fail(sequence, sampled.errors[i])
        token = sampled.tokens[i]
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
        output = TokenOutput(
            sequence.request,
            sequence.seq,
            token,
            sampled.logprobs[i],
            pos,
            reason,
            sampled.top[i],
            text if sequence.says_text else None,
        )
        if reason is not None:
            self._remove(sequence)
        return [output]

    def _scores(self, chunk: Chunk, logits: torch.Tensor) -> list[TokenOutput]:
        """The log-probabilities of the tokens that follow a chunk's rows."""
        sequence = chunk.sequence
        tokens = sequence.tokens[chunk.first_row + 1 : chunk.end + 1]
        first = chunk.first_row + 1 - sequence.num_prompt
        found = scores(logits, tokens)
        if any(value != value for value in found):
            return self._fail(sequence, NAN)
        outputs = [
            TokenOutput(sequence.request, sequence.seq, token, value, first + i)
            for i, (token, value) in enumerate(zip(tokens, found, strict=True))
        ]
        if chunk.completes:
            outputs[-1] = outputs[-1]._replace(finish_reason="length")
            self._remove(sequence)
        return outputs

    # --- ends -----------------------------------------------------------------------------------

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
        self._runner.cache.clear_pages(self._blocks.discard(sequence.table))
        sequence.table = BlockTable()
        missing = [
            TokenOutput(sequence.request, 1 + i, None, None, 0, "error", error=error)
            for i in range(sequence.pending)
        ]
        return [self._end(sequence, "error", error), *missing]

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        left = self._requests[sequence.request]
        left.remove(sequence)
        if not left:
            del self._requests[sequence.request]

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

    def _text(self, prompt: Tokens[int], strings: Tokens[str]) -> TextStream:
        assert self._detokenizer is not None
        return TextStream(self._detokenizer(prompt), strings)


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
