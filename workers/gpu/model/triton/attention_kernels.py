"""Paged attention in Triton. A *chunk* is the tokens of one sequence in a step. One kernel computes
short chunks, and splits their keys among programs. Another kernel computes long chunks.

A tile has ``BLOCK_M`` rows: up to ``BLOCK_M // GROUP`` tokens of one chunk, each with the ``GROUP``
query heads of one key head. Each key and value is therefore read once for all heads of its group. A
loop iteration covers ``BLOCK_N`` keys. Rows of a tile do not affect each other, and the split of
the keys depends only on the tile's positions. So a row's result does not depend on the batch.

The online softmax is from FlashAttention (Dao et al., 2022), and the split from Flash-Decoding.
Exponentials have base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUNTIME = (
    "tiles",
    "starts",
    "lengths",
    "block_table",
    "table_width",
    "window",
    "scale",
    "cap",
)
"""Arguments whose values and alignment do not lead to separate variants of a kernel."""


@triton.jit
def _attend_keys(
    q,
    highest,
    total,
    acc,
    positions,
    keys,
    values,
    table,
    head,
    first,
    last,
    window,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the keys of the positions ``[first, last)`` to the online softmax of a tile.

    ``first`` is a multiple of BLOCK_N. ``highest`` and ``total`` are ``[BLOCK_M]``, ``acc`` is
    ``[BLOCK_M, BLOCK_D]``. ``scale`` includes the factor log2(e), unless scores are capped.
    """
    dims = tl.arange(0, BLOCK_D)
    within = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        at = start + within
        exists = at < last
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slots = block * BLOCK_SIZE + start % BLOCK_SIZE + within
        else:
            blocks = tl.load(table + at // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
            slots = blocks * BLOCK_SIZE + at % BLOCK_SIZE
        offsets = (slots * KV_HEADS + head) * DIM
        present = exists[:, None] & (dims < DIM)[None, :]
        k = tl.load(keys + offsets[:, None] + dims[None, :], mask=present, other=0.0)
        v = tl.load(values + offsets[:, None] + dims[None, :], mask=present, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact where exp overflows.
            scores = cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / cap)) + 1.0)) * 1.4426950408889634
        seen = (at[None, :] <= positions[:, None]) & exists[None, :]
        if HAS_WINDOW:
            seen = seen & (at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        # A row that has not attended to a key yet has -inf here, and -inf minus -inf is NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        highest = new
    return highest, total, acc


@triton.jit
def _tile_of(
    tiles,
    starts,
    lengths,
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The tile of a program. Returns the chunk, three arrays with an entry for each row, and the
    positions ``[lowest, limit)`` of the tile's keys. The arrays are the index of the row's token
    among all tokens, the token's position, and whether the row has a token.
    """
    tile = tl.program_id(0)
    chunk = tl.load(tiles + 3 * tile)
    first_token = tl.load(tiles + 3 * tile + 1)
    begin = tl.load(starts + chunk)
    count = tl.load(starts + chunk + 1) - begin
    length = tl.load(lengths + chunk)

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    real = (rows < BLOCK_M // GROUP * GROUP) & (token < count)
    first = length - count + first_token
    lowest = tl.cast(0, tl.int32)
    if HAS_WINDOW:
        lowest = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    limit = tl.minimum(first + BLOCK_M // GROUP, length)
    return chunk, (begin + token).to(tl.int64), length - count + token, real, lowest, limit


@triton.jit
def _combined(
    partials,
    sums,
    parts,
    splits,
    part_rows,
    kept,
    dims,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sums the weights, and the weighted values, over all splits of a tile, in the order of the
    splits.

    ``parts``: for each row, the place of the first split's partial results. ``kept``: whether a row
    has partial results.
    """
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kept_dims = kept[:, None] & (dims < DIM)[None, :]
    for split in range(splits):
        part = parts + split * part_rows
        # Loads from L2, because L1 does not have the stores of other multiprocessors.
        one = tl.load(
            partials + part[:, None] * DIM + dims[None, :],
            mask=kept_dims,
            other=0.0,
            cache_modifier=".cg",
        )
        its = tl.load(sums + 2 * part, mask=kept, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(sums + 2 * part + 1, mask=kept, other=0.0, cache_modifier=".cg")
        new = tl.maximum(highest, its)
        base = tl.where(new == float("-inf"), 0.0, new)
        decay, factor = tl.exp2(highest - base), tl.exp2(its - base)
        total = total * decay + its_total * factor
        acc = acc * decay[:, None] + one * factor[:, None]
        highest = new
    return total, acc


@triton.jit
def _store_result(out, acc, total, at, stored):
    """Stores the rows of a tile; ``at`` are the places of their values in ``out``."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=("part_rows", "max_programs", *RUNTIME))
def split_kernel(
    out,
    query,
    keys,
    values,
    tiles,
    starts,
    lengths,
    block_table,
    partials,
    sums,
    done,
    part_rows,
    max_programs,
    table_width,
    query_stride,
    num_heads,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of short chunks. The grid is ``[tiles, KV_HEADS, max_programs]``.

    ``tiles`` ``[tiles, 3]``: for each tile, its chunk, the index of its first token in the chunk,
    and its place among the partial results. The keys of a tile are divided into at most MAX_SPLITS
    splits; a program computes every ``max_programs``-th split. The last program of a tile to finish
    combines all splits of the tile in order. ``partials`` ``[places, KV_HEADS, MAX_SPLITS,
    part_rows, DIM]`` and ``sums`` ``[..., part_rows, 2]`` have room for the partial results,
    float32. ``done`` ``[tiles * KV_HEADS]`` is 0 before the kernel and after it.
    """
    tile, head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, tokens, positions, real, lowest, limit = _tile_of(
        tiles, starts, lengths, window, GROUP, BLOCK_M, BLOCK_N, HAS_WINDOW
    )
    place = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    size = tl.maximum(tl.cdiv(tl.cdiv(limit - lowest, MAX_SPLITS), BLOCK_N) * BLOCK_N, MIN_SPLIT)
    splits = tl.cdiv(limit - lowest, size)
    programs = tl.minimum(max_programs, splits)
    if program >= programs:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + rows % GROUP
    stored = real[:, None] & (dims < DIM)[None, :]
    q = tl.load(
        query + (tokens * query_stride + heads * DIM)[:, None] + dims[None, :],
        mask=stored,
        other=0.0,
    )
    parts = (place * KV_HEADS + head) * MAX_SPLITS * part_rows + rows
    kept = real & (rows < part_rows)
    kept_dims = kept[:, None] & (dims < DIM)[None, :]
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(program, splits, max_programs):
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        highest, total, acc = _attend_keys(
            q,
            highest,
            total,
            acc,
            positions,
            keys,
            values,
            block_table + chunk.to(tl.int64) * table_width,
            head,
            lowest + split * size,
            tl.minimum(lowest + (split + 1) * size, limit),
            window,
            scale,
            cap,
            KV_HEADS,
            DIM,
            BLOCK_D,
            BLOCK_N,
            BLOCK_SIZE,
            HAS_WINDOW,
            HAS_CAP,
            PRECISION,
        )
        if splits > 1:
            part = parts + split * part_rows
            tl.store(partials + part[:, None] * DIM + dims[None, :], acc, mask=kept_dims)
            tl.store(sums + 2 * part, highest, mask=kept)
            tl.store(sums + 2 * part + 1, total, mask=kept)

    if splits > 1:
        # All threads must have stored their parts before one of them counts the program as done.
        tl.debug_barrier()
        before = tl.atomic_add(done + tile * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
        if before + 1 < programs:
            return
        tl.store(done + tile * KV_HEADS + head, 0)
        total, acc = _combined(
            partials, sums, parts, splits, part_rows, kept, dims, DIM, BLOCK_M, BLOCK_D
        )
    at = (tokens * num_heads + heads)[:, None] * DIM + dims[None, :]
    _store_result(out, acc, total, at, stored)


@triton.jit(do_not_specialize=RUNTIME)
def prefill_kernel(
    out,
    query,
    keys,
    values,
    tiles,
    starts,
    lengths,
    block_table,
    table_width,
    query_stride,
    num_heads,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of long chunks: a program computes a tile over all keys of the tile. The grid is
    ``[tiles, KV_HEADS]``. ``tiles``: as in ``split_kernel``, without places."""
    head = tl.program_id(1)
    chunk, tokens, positions, real, lowest, limit = _tile_of(
        tiles, starts, lengths, window, GROUP, BLOCK_M, BLOCK_N, HAS_WINDOW
    )
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + rows % GROUP
    stored = real[:, None] & (dims < DIM)[None, :]
    q = tl.load(
        query + (tokens * query_stride + heads * DIM)[:, None] + dims[None, :],
        mask=stored,
        other=0.0,
    )
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    highest, total, acc = _attend_keys(
        q,
        highest,
        total,
        acc,
        positions,
        keys,
        values,
        block_table + chunk.to(tl.int64) * table_width,
        head,
        lowest,
        limit,
        window,
        scale,
        cap,
        KV_HEADS,
        DIM,
        BLOCK_D,
        BLOCK_N,
        BLOCK_SIZE,
        HAS_WINDOW,
        HAS_CAP,
        PRECISION,
    )
    at = (tokens * num_heads + heads)[:, None] * DIM + dims[None, :]
    _store_result(out, acc, total, at, stored)
