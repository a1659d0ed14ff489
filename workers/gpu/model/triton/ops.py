"""The Triton kernels as operations of torch, so that they support fake tensors and CUDA graphs.

Triton is imported when an operation first runs on real tensors. If ``TRITON_INTERPRET=1`` is set
before this import, the operations run on a CPU. Operations on fake tensors do not need Triton.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability. GPUs before Ampere have no bfloat16 products."""
MAX_SPLITS = 16
"""Maximum number of parts into which the keys of a tile are split."""
MIN_SPLIT = 256
"""Minimum number of keys of a part. Only the last part may have fewer keys."""
SHORT_ROWS = 16
"""Number of rows of a short chunk's tile, which is the smallest number that ``tl.dot`` supports."""
LONG_ROWS = 128
"""Number of rows of a long chunk's tile."""
DEEP, SHALLOW = 5, 2
"""Numbers of stages of the loop over keys. The first stages load the block table. With DEEP stages,
the keys and values of two iterations are loaded at the same time. With SHALLOW stages, those of one
iteration are loaded."""
DEEP_BYTES = 160 * 2**10
"""Shared memory that a program with DEEP stages needs, in bytes. A100 and later data centre GPUs
have this memory."""
ROTARY_HEADS = 8
"""Number of heads that a program of the rotary kernel computes."""

_LIBRARY: Any = torch.library.Library("tokenbus_triton", "DEF")  # type: ignore[no-untyped-call]


def why_missing(device: torch.device) -> str:
    """The reason why a CUDA device cannot run the kernels; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the GPU has the compute capability {capability}; {MIN_CAPABILITY} is required"
    return ""


def tile_rows(group: int, long: bool) -> int:
    """Number of rows of a tile for ``group`` query heads that share a key head."""
    return max(LONG_ROWS if long else SHORT_ROWS, _power(group))


def split_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: list[torch.Tensor],
    chunks: list[torch.Tensor],
    partials: list[torch.Tensor],
    max_programs: int,
    scale: float,
    window: int,
    cap: float,
) -> None:
    """Attention of short chunks.

    ``out`` and ``query`` are ``[num_tokens, heads, dim]``. ``cache`` has the keys and values of a
    layer. ``chunks`` has the tiles ``[n, 3]``, the starts, the lengths and the block table.
    ``partials`` has the arguments ``partials``, ``sums`` and ``done`` of ``split_kernel``. Without
    a sliding window, ``window`` is 0; without a cap of the scores, ``cap`` is 0.
    """
    from .attention_kernels import split_kernel

    if len(chunks[0]) == 0:
        return
    given = _attention(query, cache, chunks, scale, window, cap)
    kv_heads, dim = cache[0].shape[2], query.shape[2]
    split_kernel[(len(chunks[0]), kv_heads, max_programs)](
        out,
        query,
        *cache,
        *chunks,
        *partials,
        partials[0].shape[3],
        max_programs,
        *given.values,
        BLOCK_M=tile_rows(query.shape[1] // kv_heads, long=False),
        BLOCK_N=_block_n(dim, query.dtype),
        MAX_SPLITS=MAX_SPLITS,
        MIN_SPLIT=MIN_SPLIT,
        num_warps=4,
        num_stages=_stages(query.device),
        **given.constants,
    )


def prefill_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: list[torch.Tensor],
    chunks: list[torch.Tensor],
    scale: float,
    window: int,
    cap: float,
) -> None:
    """Attention of long chunks, with the arguments of ``split_attention``."""
    from .attention_kernels import prefill_kernel

    if len(chunks[0]) == 0:
        return
    given = _attention(query, cache, chunks, scale, window, cap)
    group, kv_heads = query.shape[1] // cache[0].shape[2], cache[0].shape[2]
    dim = query.shape[2]
    prefill_kernel[(len(chunks[0]), kv_heads)](
        out,
        query,
        *cache,
        *chunks,
        *given.values,
        BLOCK_M=tile_rows(group, long=True),
        BLOCK_N=_block_n(dim, query.dtype),
        num_warps=8 if dim > 64 else 4,
        num_stages=_stages(query.device),
        **given.constants,
    )


def norm(
    normed: torch.Tensor,
    hidden: torch.Tensor,
    update: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    scale: float,
    post_gain: torch.Tensor | None,
    post_eps: float,
) -> None:
    """Adds ``scale * update`` to ``hidden`` in place, and writes the RMS norm of ``hidden`` to
    ``normed``; all ``[num_tokens, width]``. If ``post_gain`` is given, it is the gain of a norm
    that is applied to ``update`` first. Without ``update``, ``hidden`` stays as it is."""
    from .layer_kernels import norm_kernel

    rows, width = hidden.shape
    if rows == 0:
        return
    block = _power(width)
    norm_kernel[(rows,)](
        normed,
        hidden,
        hidden if update is None else update,
        gain,
        gain if post_gain is None else post_gain,
        scale,
        eps,
        post_eps,
        WIDTH=width,
        BLOCK=block,
        HAS_UPDATE=update is not None,
        HAS_POST=post_gain is not None,
        num_warps=min(16, max(1, block // 512)),
    )


def gated(out: torch.Tensor, gate_up: torch.Tensor, gelu: bool) -> None:
    """Writes ``silu(gate) * up`` to ``out`` ``[num_tokens, width]``. ``gate_up`` is ``[num_tokens,
    2 * width]``. With ``gelu``, the tanh form of GELU replaces ``silu``."""
    from .layer_kernels import gated_kernel

    if out.numel() == 0:
        return
    block = 1024
    gated_kernel[(-(-out.numel() // block),)](
        out, gate_up, out.numel(), WIDTH=out.shape[1], BLOCK=block, GELU=gelu, num_warps=4
    )


def rotary_store(
    heads: torch.Tensor,
    rotation: list[torch.Tensor],
    slots: torch.Tensor,
    cache: list[torch.Tensor],
    gains: list[torch.Tensor],
    eps: list[float],
) -> None:
    """Rotates the queries of ``heads`` ``[num_tokens, heads + 2 * kv_heads, dim]`` in place, and
    stores the rotated keys and the values to their slots of the KV cache.

    ``rotation`` has cosines and sines (``fused.Rotation``), or nothing; ``gains`` and ``eps`` have
    the gains and epsilons of the norms of queries and keys, or nothing.
    """
    from .layer_kernels import rotary_kernel

    num_tokens, num_heads, dim = heads.shape
    if num_tokens == 0:
        return
    kv_heads = cache[0].shape[2]
    rotated = rotation[0].shape[-1] if rotation else dim
    rotary_kernel[(num_tokens, -(-num_heads // ROTARY_HEADS))](
        heads,
        *(rotation or (heads, heads)),
        slots,
        *cache,
        *(gains or (heads, heads)),
        *(eps or (0.0, 0.0)),
        NUM_HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=rotated // 2,
        BLOCK_HEADS=ROTARY_HEADS,
        BLOCK_HALF=_power(rotated // 2),
        BLOCK_REST=_power(dim - rotated),
        HAS_NORMS=bool(gains),
        HAS_ROTATION=bool(rotation),
        num_warps=2,
    )


class _Arguments:
    """The arguments that both attention kernels take."""

    def __init__(self, values: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.values = values
        self.constants = constants


def _attention(
    query: torch.Tensor,
    cache: list[torch.Tensor],
    chunks: list[torch.Tensor],
    scale: float,
    window: int,
    cap: float,
) -> _Arguments:
    _, heads, dim = query.shape
    _, block_size, kv_heads, _ = cache[0].shape
    log2e = 1.4426950408889634
    # Exponentials have base 2, so scores are multiplied by log2(e). If scores are capped, this
    # factor is applied after the cap.
    factor = scale if cap else scale * log2e
    values = (chunks[3].shape[1], query.stride(0), heads, window, factor, cap)
    constants = {
        "GROUP": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        # The dimensions of a product of tiles must be at least 16.
        "BLOCK_D": max(16, _power(dim)),
        "BLOCK_SIZE": block_size,
        "HAS_WINDOW": window > 0,
        "HAS_CAP": cap > 0,
        # TF32 is not used, because the results for float32 models are compared with plain
        # attention.
        "PRECISION": "ieee",
    }
    return _Arguments(values, constants)


@cache
def _stages(device: torch.device) -> int:
    """Number of stages of the loop over keys: ``DEEP`` if the device has enough shared memory,
    ``SHALLOW`` if it does not."""
    if device.type != "cuda":
        return DEEP
    properties = torch.cuda.get_device_properties(device)
    found = getattr(properties, "shared_memory_per_block_optin", 0)
    return DEEP if found >= DEEP_BYTES else SHALLOW


def _block_n(dim: int, dtype: torch.dtype) -> int:
    """Number of keys that one iteration of the loop over keys reads. Shared memory has room for the
    keys of two or three iterations."""
    keys = 64 if dim <= 128 else 32
    return keys // 2 if dtype == torch.float32 else keys


def _power(number: int) -> int:
    """The smallest power of 2 that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _define(schema: str, function: Any) -> Any:
    """Defines an operation that writes to its arguments and returns nothing."""
    _LIBRARY.define(schema)
    name = schema.split("(", 1)[0]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"tokenbus_triton::{name}", lambda *_, **__: None)
    return getattr(torch.ops.tokenbus_triton, name)


SPLIT_ATTENTION = _define(
    "split_attention(Tensor(a!) out, Tensor query, Tensor[] cache, Tensor[] chunks, "
    "Tensor(b!)[] partials, int max_programs, float scale, int window, float cap) -> ()",
    split_attention,
)
PREFILL_ATTENTION = _define(
    "prefill_attention(Tensor(a!) out, Tensor query, Tensor[] cache, Tensor[] chunks, "
    "float scale, int window, float cap) -> ()",
    prefill_attention,
)
NORM = _define(
    "norm(Tensor(a!) normed, Tensor(b!) hidden, Tensor? update, Tensor gain, float eps, "
    "float scale, Tensor? post_gain, float post_eps) -> ()",
    norm,
)
GATED = _define("gated(Tensor(a!) out, Tensor gate_up, bool gelu) -> ()", gated)
ROTARY_STORE = _define(
    "rotary_store(Tensor(a!) heads, Tensor[] rotation, Tensor slots, Tensor(b!)[] cache, "
    "Tensor[] gains, float[] eps) -> ()",
    rotary_store,
)
