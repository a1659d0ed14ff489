"""Computes the size of the KV cache on a GPU. The cache gets the memory that remains after the
weights and the largest step.

As in vLLM, the largest step runs before the cache is allocated, and its peak is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import cycle

import numpy as np
import torch

from ....protocol.sampling import Sampling
from ..engine.scheduler import MAX_ADMITTED, SCORE_ROWS, Batch, Chunk
from ..engine.sequence import Sequence
from ..sampling.row_parameters import Row, Rows
from ..sampling.sampler import draw, score
from .kv_cache import Layout, token_bytes
from .loader import LoadedModel, ModelLoadError
from .quantization import stored_bytes
from .runner import Runner

log = logging.getLogger(__name__)

DEVICE_PART = 0.9
"""The part of a device's memory that models may take. The rest is for memory that torch does not
count: the CUDA context, libraries, fragmentation."""
MIN_BLOCKS = 2
STEPS_UNTIL_AHEAD = 3
"""Number of steps that ``_sample`` runs for a batch. The second step also computes random numbers
for many later steps (``races.Ahead``). ``_sample`` skips these later steps. So the third step has
to compute further random numbers."""
_LARGEST = Sampling(temperature=1.0, top_p=0.9, presence_penalty=0.5, top_logprobs=1)
"""The sampling parameters that take the most memory: ``top_p`` needs the vocabulary sorted."""


def cache_bytes(
    loaded: LoadedModel, layout: Layout, step_bytes: int, part: float, others: Items[LoadedModel]
) -> int:
    """The size of the KV cache of a model on a GPU, in bytes.

    The usable memory is ``DEVICE_PART`` of the device's memory. ``part``: the fraction of the
    usable memory that the model may take, for its weights, the weights of ``others`` (its draft
    model), ``step_bytes`` and the cache. If other processes and models leave less memory, the cache
    is smaller. Raises ModelLoadError if fewer than ``MIN_BLOCKS`` blocks fit.
    """
    free, total = torch.cuda.mem_get_info(loaded.device)
    unused = torch.cuda.memory_reserved(loaded.device) - torch.cuda.memory_allocated(loaded.device)
    weights = sum(_weight_bytes(model) for model in (loaded, *others))
    own = int(total * DEVICE_PART * part) - weights - step_bytes
    left = free + unused - int(total * (1 - DEVICE_PART)) - step_bytes
    found = min(own, left)
    if not layout.in_place:
        # A step gathers the keys and values of one layer, and SDPA may copy them once more. So
        # memory is reserved for the keys and values of two more layers.
        found = found * len(loaded.layers) // (len(loaded.layers) + 2)
    least = MIN_BLOCKS * layout.block_size * token_bytes(loaded.layers, loaded.dtype)
    if found < least:
        raise ModelLoadError(
            f"{loaded.name} leaves {_mib(found)} for its KV cache; at least {_mib(least)} are "
            f"needed. The model may use {part:.0%} of a device of {_mib(total)} with {_mib(free)} "
            f"free; its weights take {_mib(weights)}, its largest step {_mib(step_bytes)}. Use a "
            "smaller max_models or max_running, a larger device, or set kv_cache_bytes"
        )
    log.info(
        "%s: weights %s, largest step %s, KV cache %s of a device of %s with %s free",
        loaded.name,
        *(_mib(size) for size in (weights, step_bytes, found, total, free)),
    )
    return found


def largest_step_bytes(
    loaded: LoadedModel, layout: Layout, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """The most memory that steps need, without the weights and the cache, in bytes.

    The result is the sum of three parts: the peak of the largest step, the memory pool of the CUDA
    graphs, and the kept logits of deferred sequences. The pool is counted only if the attention
    reads blocks in place. All graphs share the pool, so it takes at most the peak of one forward.
    """
    count = min(max_num_seqs, max_num_batched_tokens)
    longest = min(max(SCORE_ROWS, -(-max_num_batched_tokens // count)), loaded.context_length)
    # All prompts share these blocks, because the measured memory does not depend on the content of
    # the cache.
    runner = Runner(loaded, max(MIN_BLOCKS, -(-longest // layout.block_size)), layout)
    sampled = _prompts(max_num_batched_tokens, count, longest, layout.block_size)
    scored = _scored(max_num_batched_tokens, longest, layout.block_size)
    device = loaded.device
    of_forward = _peak(device, lambda: _logits(runner, sampled))
    of_steps = []
    # Measures three kinds of steps: no sequence has an adapter, each sequence has one, or every
    # second sequence has one.
    for adapters in ((0,), (1,), (0, 1)) if loaded.adapters is not None else ((0,),):
        for chunk, adapter in zip((*sampled, *scored), cycle(adapters), strict=False):
            chunk.sequence.block_table.adapter = adapter
        of_steps += [
            _peak(device, lambda: _sample(_logits(runner, sampled), loaded.vocab_size)),
            _peak(device, lambda: _score(_logits(runner, scored), scored)),
        ]
    kept = MAX_ADMITTED * max_num_seqs * loaded.vocab_size * torch.float32.itemsize
    return max(of_steps) + kept + (of_forward if layout.in_place else 0)


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """The peak memory of a call, in bytes."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _logits(runner: Runner, chunks: list[Chunk]) -> torch.Tensor:
    return runner.launch(runner.pack(Batch(chunks))[1]).work.result()


def _sample(logits: torch.Tensor, vocab_size: int) -> object:
    """Samples two batches, because the steps of two batches may overlap. Each batch also computes
    the random numbers of later steps."""
    words = np.full(-(-vocab_size // 32), 2**32 - 1, dtype=np.uint32)
    batches = []
    for _ in range(2):
        rows = Rows.of([Row(_LARGEST, i, 0, 0, (1,), (1,), words) for i in range(len(logits))])
        batches.append(rows)
        for _ in range(STEPS_UNTIL_AHEAD):
            draw(logits, None, rows)
            ahead = rows.parameters.draws.ahead
            steps = len(ahead.logs) if ahead is not None else 1
            rows = replace(rows, positions=rows.positions + steps)
    return batches


def _score(logits: torch.Tensor, chunks: list[Chunk]) -> object:
    scores, at = [], 0
    for chunk in chunks:
        count = chunk.end - chunk.first_row
        scores.append(score(logits[at : at + count], chunk.scored_tokens, 1))
        at += count
    return scores


def _prompts(num_tokens: int, count: int, longest: int, block_size: int) -> list[Chunk]:
    """The chunks of ``count`` prompts that fill a step. One token is sampled for each prompt."""
    sizes = [len(part) for part in np.array_split(np.arange(num_tokens), count)]
    return [_chunk(min(size, longest), block_size, scored=False) for size in sizes]


def _scored(num_tokens: int, longest: int, block_size: int) -> list[Chunk]:
    """The chunks of scored texts that fill a step. Each scored token takes a row of logits."""
    size = min(SCORE_ROWS, longest, num_tokens)
    return [_chunk(size, block_size, scored=True) for _ in range(num_tokens // size)]


def _chunk(length: int, block_size: int, scored: bool) -> Chunk:
    tokens = [0] * (length + scored)
    sequence = Sequence(0, 0, tokens, len(tokens), Sampling(), len(tokens), scored=scored)
    sequence.scored_from = 1
    sequence.block_table.blocks += range(-(-length // block_size))
    return Chunk(sequence, 0, length)


def _weight_bytes(loaded: LoadedModel) -> int:
    model = loaded.model
    tensors = (*model.parameters(), *model.buffers())
    adapters = loaded.adapters.num_bytes if loaded.adapters is not None else 0
    return adapters + sum(stored_bytes(one) for one in tensors if one.device == loaded.device)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
