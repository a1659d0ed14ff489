"""A draft model: a small model writes draft tokens, which the large model verifies.

The draft model has its own KV cache. For each sequence, the draft model first computes the new
accepted tokens, and then writes one draft token after another. If the large model samples, the
draft model samples too, with the same counter-based random numbers. If the two distributions are
similar, both models then sample the same token most of the time, almost as in a maximal coupling.
The idea of verified drafts is from Leviathan, Kalman and Matias (2023).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from msgspec import structs

from ..engine.block_manager import BlockManager
from ..engine.scheduler import Batch, Chunk
from ..engine.sequence import Sequence
from ..model.backends import ForwardOptions
from ..model.cuda.choice import choose_layout
from ..model.device_queue import DeviceQueue, Work
from ..model.kv_cache import token_bytes
from ..model.loader import LoadedModel, ModelLoadError, OnProgress
from ..model.runner import Runner
from ..sampling.row_parameters import Row, Rows
from ..sampling.sampler import guess
from ..sampling.token_counts import has_penalties

log = logging.getLogger(__name__)

CATCH_UP = 1024
"""Maximum number of tokens of the sequences' texts that the draft model computes in one step. So it
computes a long prompt in several steps."""
OVERHEAD = 0.05
"""The fixed part of the cost of a draft model's forward, relative to a forward of the large model.
The other part is proportional to the draft model's number of weights."""


def check_draft_model(loaded: LoadedModel, draft: LoadedModel) -> None:
    """Raises ModelLoadError if the draft model does not have the same tokens as the model, or if
    the model is spread over several devices."""
    name = f"the draft model {draft.name!r}"
    if loaded.ranks is not None:
        raise ModelLoadError(
            f"{name} cannot be used with a model over several devices (tp); remove one of the two "
            "settings"
        )
    if loaded.fingerprint != draft.fingerprint:
        raise ModelLoadError(
            f"{name} has another tokenizer than {loaded.name!r}; a draft model needs the same one"
        )
    if not loaded.fingerprint and loaded.vocab_size != draft.vocab_size:
        raise ModelLoadError(
            f"{name} has {draft.vocab_size} tokens and {loaded.name!r} has {loaded.vocab_size}; a "
            "draft model needs the same vocabulary"
        )


@dataclass(slots=True)
class Guessed:
    """The draft tokens at one position: one token for each sequence."""

    tokens: torch.Tensor
    """The draft token of each sequence, int64 ``[num_texts]``, on the device."""
    on_host: torch.Tensor
    """``tokens`` on the host; valid when the device has finished the copy."""

    def fetch(self) -> list[int]:
        """``tokens`` as Python numbers. The device must have finished the copy."""
        found: list[int] = self.on_host.tolist()
        return found


class DraftModel:
    """Writes drafts with a small model for a larger model, ``large``.

    ``cache_bytes``: the size of the draft model's KV cache. ``queue``: the device queue, which both
    models share.
    """

    def __init__(
        self,
        draft: LoadedModel,
        cache_bytes: int,
        queue: DeviceQueue,
        large: LoadedModel,
        fixed_threads: bool = False,
    ) -> None:
        layout = choose_layout(draft)
        size = layout.block_size * token_bytes(draft.layers, draft.dtype)
        num_blocks = max(2, cache_bytes // size)
        self._blocks = BlockManager(num_blocks, layout.block_size)
        self._queue = queue
        # The draft model need not be exact, because the tokens of a stream do not depend on its
        # drafts.
        options = ForwardOptions(fixed_threads=fixed_threads, exact=False)
        self._runner = Runner(draft, num_blocks, layout, queue, options)
        self._device = draft.device
        self._vocab_size = min(large.vocab_size, draft.vocab_size)
        self._same_vocabulary = large.vocab_size == draft.vocab_size
        self._max_length = min(draft.context_length, self._blocks.capacity)
        self.forward_cost = OVERHEAD + _multiplied(draft) / max(1, _multiplied(large))
        """The assumed cost of the draft model's forward, relative to a forward of the large
        model."""
        self._texts: dict[Sequence, Sequence] = {}
        """For each sequence of the large model: its *text*. A text is the draft model's own
        sequence with the same tokens. Its blocks are in the draft model's cache. The least recently
        used text is first."""

    def draft(self, sequences: Items[Sequence], count: int) -> list[list[int]]:
        """Writes ``count`` draft tokens for each of these sequences. If the draft model writes a
        token that the large model does not have, the draft ends before this token. A draft is empty
        if the draft model has not computed the whole sequence yet, if the sequence is too long, if
        no blocks are free, or if drafting fails."""
        try:
            return self._draft(sequences, count)
        except Exception:
            # Drafts are optional: the sequences continue without them.
            log.exception("drafting failed; the step continues without drafts")
            for sequence in list(self._texts):
                self.forget(sequence)
            self._runner.forget_mirrors()
            return [[] for _ in sequences]

    def capture_graphs(self, max_batch: int, on_progress: OnProgress) -> None:
        """Captures the CUDA graphs of the draft model's forwards, if the draft model can have
        graphs."""
        self._runner.capture_graphs(max_batch, on_progress)

    def forget(self, sequence: Sequence) -> None:
        """Frees the draft model's state of a sequence."""
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._blocks.free(text.block_table)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks of the draft model's cache that are in use."""
        return self._blocks.num_used

    # --- inside ---------------------------------------------------------------------------------

    def _draft(self, sequences: Items[Sequence], count: int) -> list[list[int]]:
        batch, room = Batch(), CATCH_UP
        for sequence in sequences:
            if room and len(sequence.tokens) + count <= self._max_length:
                chunk = self._catch_up(sequence, sequences, count, room, batch.copies)
                if chunk is not None:
                    batch.chunks.append(chunk)
                    room -= chunk.end - chunk.start
        drafts: dict[Sequence, list[int]] = {}
        if batch.chunks:
            owners = {self._texts[s]: s for s in sequences if s in self._texts}
            texts, drawn = self._write(batch, owners, count)
            for text, tokens in zip(texts, zip(*drawn, strict=True), strict=True):
                # The last token was drawn, but its keys and values have not been computed.
                text.tokens[len(owners[text].tokens) :] = tokens[:-1]
                known = next((i for i, t in enumerate(tokens) if t >= self._vocab_size), count)
                drafts[owners[text]] = list(tokens[:known])
        return [drafts.get(sequence, []) for sequence in sequences]

    def _catch_up(
        self,
        sequence: Sequence,
        among: Items[Sequence],
        count: int,
        room: int,
        copies: list[tuple[int, int]],
    ) -> Chunk | None:
        """The next chunk of a sequence's text, which must be computed before the sequence's draft.
        It has at most ``room`` tokens. None if no blocks are free. ``among``: the sequences whose
        texts must keep their blocks."""
        text = self._texts.pop(sequence, None) or _empty(sequence)
        self._texts[sequence] = text
        tokens, table = sequence.tokens, text.block_table
        same = _agreement(text.tokens, tokens)
        del text.tokens[same:]
        text.tokens += tokens[same:]
        computed = min(text.num_computed_tokens, same, len(tokens) - 1)
        if not table.blocks:
            computed = self._blocks.match(table, tokens, len(tokens) - 1)
        self._blocks.truncate(table, computed)
        end = min(len(tokens), computed + room)
        until = end + count - 1 if end == len(tokens) else end
        while (found := self._blocks.reserve(table, computed, until)) is None:
            idle = next((s for s in self._texts if s not in among), None)
            if idle is None:
                self.forget(sequence)
                return None
            self.forget(idle)
        copies += found
        text.num_computed_tokens = end
        return Chunk(text, computed, end)

    def _write(
        self, batch: Batch, owners: dict[Sequence, Sequence], count: int
    ) -> tuple[list[Sequence], list[list[int]]]:
        """Computes the chunks, and then ``count`` draft tokens for each text that has been computed
        completely. Returns these texts and, for each position of the drafts, a list of their
        tokens. On a GPU, all forwards are launched at once: each forward reads the tokens of the
        previous forward on the device."""
        chunks, packed = self._runner.pack(batch)
        forward = self._runner.launch(packed)
        for chunk in chunks:
            text = chunk.sequence
            self._blocks.commit(text.block_table, text.tokens, chunk.end)
        texts = [chunk.sequence for chunk in chunks if chunk.completes]
        if not texts:
            forward.work.result()
            return [], []
        rows = Rows.of([self._row(owners[text]) for text in texts])
        works: list[Work[Guessed]] = []
        for place in range(count):
            if place:
                chunks, packed = self._runner.pack(self._next(texts, place))
                forward = self._runner.launch(packed, _tokens(works[-1]))
                texts_now = [chunk.sequence for chunk in chunks]
                order = [texts_now.index(text) for text in texts]
            else:
                order = list(range(len(texts)))
            works.append(self._queue.submit(_guesses(forward.work, order, rows, place)))
        for text in texts:
            text.drawn = -1
        found = [work.result().fetch() for work in works]
        return texts, found

    def _next(self, texts: Items[Sequence], place: int) -> Batch:
        """The batch that computes the last drawn token of each text. ``place``: number of tokens
        that have been drawn for each text."""
        batch = Batch()
        for row, text in enumerate(texts):
            if place > 1:
                # ``text.tokens`` has the tokens before the last drawn token. The last element is
                # still on the device, and is 0 here.
                text.tokens.append(0)
            text.drawn = row
            at = len(text.tokens)
            batch.chunks.append(Chunk(text, at, at + 1))
            text.num_computed_tokens = at + 1
        return batch

    def _row(self, sequence: Sequence) -> Row:
        """The sampling inputs of the large model's next token. Masks and other decisions of a
        controller are left out. If the vocabularies have different sizes, biases, penalties and the
        minimum length are left out too."""
        sampling = structs.replace(sequence.sampling, top_logprobs=0)
        if not self._same_vocabulary:
            sampling = structs.replace(sampling, logit_bias={}, repetition_penalty=1.0)
            sampling = structs.replace(sampling, presence_penalty=0.0, frequency_penalty=0.0)
        return Row(
            sampling,
            sequence.draw_seed,
            sequence.seq,
            sequence.num_generated,
            least=sequence.least if self._same_vocabulary else None,
            logit_bias=sequence.logit_bias if self._same_vocabulary else None,
            counts=sequence.count_tokens() if has_penalties(sampling) else None,
        )


def _multiplied(loaded: LoadedModel) -> int:
    """Number of weights that a forward multiplies. If the output layer does not share the
    embeddings, they are only looked up and do not count."""
    embeddings = loaded.model.get_input_embeddings().weight
    head = loaded.model.get_output_embeddings()
    tied = head is None or head.weight is embeddings
    return loaded.num_parameters - (0 if tied else embeddings.numel())


def _empty(sequence: Sequence) -> Sequence:
    """A new sequence for the draft model, without tokens."""
    return Sequence(
        sequence.request, sequence.seq, [], sequence.num_prompt, sequence.sampling, 2**62
    )


def _agreement(one: list[int], other: list[int]) -> int:
    """Length of the common prefix of two token lists."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _tokens(work: Work[Guessed]) -> Callable[[], torch.Tensor]:
    return lambda: work.value.tokens


def _guesses(
    forward: Work[torch.Tensor], order: Items[int], rows: Rows, place: int
) -> Callable[[], Guessed]:
    """Returns a function for the device queue. It samples the token after each row of a forward."""
    at = Rows(rows.parameters, rows.positions + place, counts=rows.counts)

    def run() -> Guessed:
        tokens = guess(forward.value, order, at)
        # A plain copy to the host would wait for all work of the device.
        return Guessed(tokens, tokens.to("cpu", non_blocking=True))

    return run
