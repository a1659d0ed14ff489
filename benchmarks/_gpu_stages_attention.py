"""Stage 2 of ``gpu_check.py``: compares each attention backend with float32 attention."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import torch
from _gpu_backends import Backend, backends
from _gpu_world import World
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.packing import pack
from tokenbus.workers.gpu.engine.scheduler import Batch, Chunk
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.model.kv_cache import KVCache, LayerShape

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Maximum absolute difference between the outputs of a backend and of float32 attention. The inputs
have a standard normal distribution."""
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 1000, 2048, 4095, 4096)
DRY_LENGTHS = (1, 2, 15, 16, 17, 65, 257)
HEADS = ((8, 8), (8, 2), (16, 1))
"""Each pair is the number of query heads and the number of key heads."""
DIMS = (64, 96, 128, 256)
WINDOWS = (None, 100)
SOFT_CAPS = (None, 30.0)


@dataclass(slots=True, frozen=True)
class Case:
    """A combination of sizes and options with which a backend is checked."""

    block_size: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None
    soft_cap: float | None
    chunks: str
    """``decode``: each chunk has one token. ``prefill``: each chunk has a whole prompt, or the last
    2,048 tokens of a longer prompt. ``mixed``: chunks of these two kinds, and chunks that continue
    a prefix."""


def run(world: World) -> None:
    """Runs all cases with each available backend."""
    for backend in backends(world.device):
        if backend.why_not:
            world.record(f"{backend.name}_not_available", backend.why_not)
            continue
        worst, count = 0.0, 0
        for case in _cases(world, backend):
            if world.left_s < 0.1 * world.limit_s:
                world.fault(f"{backend.name}: the time limit ended the stage after {count} cases")
                break
            try:
                worst = max(worst, _check(world, backend, case))
            except Exception as error:
                world.fault(f"{backend.name}, {case}: {type(error).__name__}: {error}")
            count += 1
        world.record(f"{backend.name}_worst_difference", worst, cases=count)


def _cases(world: World, backend: Backend) -> list[Case]:
    """All cases. A dry run has only 12 cases, chosen with a fixed seed."""
    table = [
        Case(size, heads, kv_heads, dim, window, cap, chunks)
        for size in backend.block_sizes
        for heads, kv_heads in HEADS
        for dim in DIMS
        for window in WINDOWS
        for cap in (SOFT_CAPS if backend.soft_cap else (None,))
        for chunks in ("decode", "prefill", "mixed")
    ]
    random.Random(0).shuffle(table)
    return table[:12] if world.dry else table


def _check(world: World, backend: Backend, case: Case) -> float:
    """Returns the largest difference from float32 attention in a case. Records a fault if the
    difference exceeds ``TOLERANCE``. Also records a fault if the backend is row-invariant, and a
    row depends on its batch."""
    inputs = _Inputs(world, case)
    found = inputs.attend(backend, inputs.chunks)
    difference = (found.float() - inputs.wanted()).abs().max().item()
    world.expect(
        difference <= TOLERANCE[world.dtype],
        f"{backend.name}, {case}: the outputs differ by {difference:.3g}",
    )
    if backend.row_invariant:
        for i in (0, len(inputs.chunks) - 1):
            alone = inputs.attend(backend, inputs.chunks[i : i + 1], first=inputs.starts[i])
            same = torch.equal(alone, found[inputs.starts[i] : inputs.starts[i + 1]])
            world.expect(same, f"{backend.name}, {case}: chunk {i} depends on its batch")
    return difference


class _Inputs:
    """Chunks with random queries, keys and values. The blocks of a sequence are scattered over the
    cache, and some sequences share blocks."""

    def __init__(self, world: World, case: Case) -> None:
        self._case, self._device, self._dtype = case, world.device, world.dtype
        rng = random.Random(repr(case))
        lengths = DRY_LENGTHS if world.dry else LENGTHS
        self.chunks = _chunks(rng, lengths, case)
        sizes = [chunk.end - chunk.start for chunk in self.chunks]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        num_blocks = 1 + max(max(c.sequence.block_table.blocks) for c in self.chunks)
        shape = LayerShape(case.kv_heads, case.dim, case.dim)
        self._cache = KVCache({0: shape}, num_blocks, case.block_size, self._dtype, self._device)
        self._generator = torch.Generator(self._device).manual_seed(rng.randrange(2**31))
        for tensor in self._cache.layers[0]:
            tensor.copy_(self._normal(*tensor.shape))
        total = self.starts[-1]
        self.query = self._normal(total, case.heads, case.dim)
        self.key, self.value = (self._normal(total, case.kv_heads, case.dim) for _ in range(2))

    def attend(self, backend: Backend, chunks: Items[Chunk], first: int = 0) -> torch.Tensor:
        """The output of a backend for ``chunks``. The first chunk's queries begin at row ``first``
        of ``query``."""
        case = self._case
        order, packed = pack(Batch(list(chunks)), case.block_size, spans=backend.in_place)
        at = {id(c): i for i, c in enumerate(chunks)}
        sizes = [c.end - c.start for c in chunks]
        begins = [first + sum(sizes[:i]) for i in range(len(sizes))]
        rows = [begins[at[id(c)]] + i for c in order for i in range(c.end - c.start)]
        index = torch.tensor(rows, device=self._device)
        found = backend.attend(
            0,
            self.query[index],
            self.key[index],
            self.value[index],
            backend.context(packed, self._cache),
            scaling=None,
            sliding_window=case.window,
            softcap=case.soft_cap,
        )
        result = torch.empty_like(found)
        result[index - first] = found
        return result

    def wanted(self) -> torch.Tensor:
        """The output of float32 attention for all chunks. The cache must already contain the
        chunks' keys and values."""
        case, found = self._case, []
        for chunk, (first, last) in zip(self.chunks, pairwise(self.starts), strict=True):
            size = case.block_size
            blocks = chunk.sequence.block_table.blocks[: -(-chunk.end // size)]
            k, v = (t[blocks].flatten(0, 1)[: chunk.end].float() for t in self._cache.layers[0])
            repeat = case.heads // case.kv_heads
            k, v = (t.transpose(0, 1).repeat_interleave(repeat, 0) for t in (k, v))
            q = self.query[first:last].transpose(0, 1).float()
            scores = q @ k.transpose(-1, -2) * case.dim**-0.5
            if case.soft_cap is not None:
                scores = torch.tanh(scores / case.soft_cap) * case.soft_cap
            at = torch.arange(chunk.start, chunk.end, device=self._device).unsqueeze(-1)
            keys = torch.arange(chunk.end, device=self._device)
            hidden = keys > at
            if case.window is not None:
                hidden |= keys <= at - case.window
            scores = scores.masked_fill(hidden, float("-inf"))
            found.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
        return torch.cat(found)

    def _normal(self, *shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self._device)
        return made.to(self._dtype)


def _chunks(rng: random.Random, lengths: Items[int], case: Case) -> list[Chunk]:
    """Chunks that end at these lengths. In the second half of the list, each sequence shares full
    blocks with the sequence before it, like a fork or a prefix hit."""
    used = [len(range(0, n, case.block_size)) for n in lengths]
    pool = list(range(1, 1 + sum(used)))
    rng.shuffle(pool)
    chunks: list[Chunk] = []
    for place, (length, count) in enumerate(zip(lengths, used, strict=True)):
        blocks = [pool.pop() for _ in range(count)]
        start = _start(rng, length, case.chunks, place)
        if chunks and place >= len(lengths) // 2:
            other = chunks[-1]
            # A block that a chunk of this step writes must not be shared.
            shared = min(start, other.start) // case.block_size
            blocks[:shared] = other.sequence.block_table.blocks[:shared]
        tokens = [0] * length
        sequence = Sequence(place, 0, tokens, length, Sampling(), length)
        sequence.block_table.blocks += blocks
        chunks.append(Chunk(sequence, start, length))
    return chunks


def _start(rng: random.Random, length: int, chunks: str, place: int) -> int:
    """The position of the first token of a chunk that ends at ``length``."""
    if chunks == "decode" or (chunks == "mixed" and place % 3 == 0):
        return length - 1
    if chunks == "prefill" or place % 3 == 1:
        return max(0, length - 2048)
    return rng.randrange(length)
