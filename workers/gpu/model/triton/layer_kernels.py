"""The small operations of a decoder layer in Triton.

The kernels compute in float32. They round the values that they store. They round an intermediate
value only where the model rounds it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("scale", "eps", "post_eps"))
def norm_kernel(
    normed,
    hidden,
    update,
    gain,
    post_gain,
    scale,
    eps,
    post_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    HAS_POST: tl.constexpr,
):
    """Computes ``hidden += post_norm(update) * scale``, and writes the RMS norm of
    ``hidden`` to ``normed``.

    A program computes one row. All rows are ``[WIDTH]`` and contiguous. Without HAS_UPDATE
    ``hidden`` stays as it is.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    real = at < WIDTH
    x = tl.load(hidden + row + at, mask=real, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        u = tl.load(update + row + at, mask=real, other=0.0).to(tl.float32)
        if HAS_POST:
            mean = tl.sum(u * u, 0) / WIDTH
            u = u * tl.rsqrt(mean + post_eps)
            u = u * tl.load(post_gain + at, mask=real, other=0.0).to(tl.float32)
        summed = (x + u * scale).to(hidden.dtype.element_ty)
        tl.store(hidden + row + at, summed, mask=real)
        x = summed.to(tl.float32)
    mean = tl.sum(x * x, 0) / WIDTH
    x = x * tl.rsqrt(mean + eps) * tl.load(gain + at, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + row + at, x.to(normed.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=("num_values",))
def gated_kernel(
    out,
    gate_up,
    num_values,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """Computes ``silu(gate) * up`` for rows ``[2 * WIDTH]`` of gate and up. With GELU, the tanh
    form of GELU replaces ``silu``.

    ``out`` is ``[num_values / WIDTH, WIDTH]``; a program computes BLOCK of its values.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < num_values
    source = gate_up + at // WIDTH * (2 * WIDTH) + at % WIDTH
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=real, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        # The tanh form: 0.5 * (1 + tanh(x)) is the sigmoid of 2x.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    found = gate * tl.sigmoid(slope)
    # The model rounds the activation before it multiplies the activation with ``up``.
    found = found.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + at, found.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=("slots", "eps", "key_eps"))
def rotary_kernel(
    heads,
    cosines,
    sines,
    slots,
    keys,
    values,
    query_gain,
    key_gain,
    eps,
    key_eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
):
    """Rotates queries in place, and stores the rotated keys and the values to their slots of the KV
    cache.

    ``heads`` is ``[num_tokens, NUM_HEADS + 2 * KV_HEADS, DIM]``: queries, keys, values. A program
    computes BLOCK_HEADS heads. The first 2 * HALF entries of a head are rotated. Entries i and i +
    HALF are rotated together. ``cosines`` and ``sines`` are ``[num_tokens, 2 * HALF]``. The first
    half of the sines is negated. With HAS_NORMS each query and key is normalized first. Without
    HAS_ROTATION nothing is rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + KV_HEADS)
    is_value = (head >= NUM_HEADS + KV_HEADS) & (head < NUM_HEADS + 2 * KV_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    in_half, in_rest = (half < HALF)[None, :], (rest < DIM)[None, :]
    exists = (is_query | is_key | is_value)[:, None]
    source = heads + ((token * (NUM_HEADS + 2 * KV_HEADS) + head) * DIM)[:, None]
    low = tl.load(source + half[None, :], mask=exists & in_half, other=0.0)
    high = tl.load(source + HALF + half[None, :], mask=exists & in_half, other=0.0)
    other = tl.load(source + rest[None, :], mask=exists & in_rest, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    target = values + ((slot * KV_HEADS + head - NUM_HEADS - KV_HEADS) * DIM)[:, None]
    _store(target, low, high, other, half, rest, is_value, in_half, in_rest, HALF)

    a, b, c = low.to(tl.float32), high.to(tl.float32), other.to(tl.float32)
    if HAS_NORMS:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / DIM
        factor = tl.rsqrt(mean + tl.where(is_key, key_eps, eps))[:, None]
        a = a * factor * _gains(query_gain, key_gain, is_key, half, half < HALF)
        b = b * factor * _gains(query_gain, key_gain, is_key, HALF + half, half < HALF)
        c = c * factor * _gains(query_gain, key_gain, is_key, rest, rest < DIM)
    if HAS_ROTATION:
        turn = token * (2 * HALF) + half
        cos_low = tl.load(cosines + turn, mask=half < HALF, other=0.0).to(tl.float32)
        cos_high = tl.load(cosines + turn + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        sin_low = tl.load(sines + turn, mask=half < HALF, other=0.0).to(tl.float32)
        sin_high = tl.load(sines + turn + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        turned = a * cos_low[None, :] + b * sin_low[None, :]
        b = b * cos_high[None, :] + a * sin_high[None, :]
        a = turned
    x, y, z = a.to(low.dtype), b.to(low.dtype), c.to(low.dtype)
    target = keys + ((slot * KV_HEADS + head - NUM_HEADS) * DIM)[:, None]
    _store(target, x, y, z, half, rest, is_key, in_half, in_rest, HALF)
    _store(source, x, y, z, half, rest, is_query, in_half, in_rest, HALF)


@triton.jit
def _store(target, low, high, other, half, rest, chosen, in_half, in_rest, HALF: tl.constexpr):
    """Stores the three parts of the chosen heads."""
    mask = chosen[:, None]
    tl.store(target + half[None, :], low, mask=mask & in_half)
    tl.store(target + HALF + half[None, :], high, mask=mask & in_half)
    tl.store(target + rest[None, :], other, mask=mask & in_rest)


@triton.jit
def _gains(query_gain, key_gain, is_key, at, real):
    """The gain of each head's norm: that of keys or of queries."""
    of_key = tl.load(key_gain + at, mask=real, other=0.0).to(tl.float32)
    of_query = tl.load(query_gain + at, mask=real, other=0.0).to(tl.float32)
    return tl.where(is_key[:, None], of_key[None, :], of_query[None, :])
