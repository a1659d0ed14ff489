"""The attention of a model on its device: FlashAttention, Triton's kernels, or gathered blocks.

A kernel is tried before it is used: its results are compared with plain attention. If both kernels
work, each is timed on the device, and the faster one is chosen. The choice is kept for later models
of the same shapes.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from ...engine.packing import PackedSpans
from ..fused.decoder import Attend
from ..kv_cache import (
    BLOCK_SIZE,
    FLASH_BLOCK_SIZE,
    TRITON_BLOCK_SIZE,
    KVCache,
    LayerShape,
    Layout,
)
from ..loader import LoadedModel
from ..triton import attention as triton_attention
from . import varlen

log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""GPUs before Ampere have no bfloat16 products."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Greatest difference from plain attention, for unit normal inputs."""
TRIALS = (((1, 1, 1), (5, 300, 4000)), ((3, 1, 40), (700, 257, 300)))
"""The chunks of each trial: their numbers of new tokens, and their numbers of keys."""
TIMED = (((1,) * 32, (1024,) * 32), ((1024,), (1024,)))
"""The chunks of each timed run, as in ``TRIALS``: decodes, and a prompt."""
WARM_UPS, RUNS = 3, 10
WINDOW, CAP = 100, 20.0

_FASTER: dict[tuple[object, ...], Layout] = {}
"""The faster of two kernels that work, by device, dtype and shapes."""


def choose_layout(loaded: LoadedModel) -> Layout:
    """The layout of this model's keys and values on its device, and the attention that reads it."""
    if loaded.device.type != "cuda":
        return Layout(BLOCK_SIZE, False, f"the device is {loaded.device.type}")
    found: list[Layout] = []
    reasons: list[str] = []
    for name, layout, reason in (
        ("FlashAttention", Layout(FLASH_BLOCK_SIZE, True, ""), varlen.why_not(loaded)),
        ("Triton", Layout(TRITON_BLOCK_SIZE, True, "", True), why_no_triton(loaded)),
    ):
        if reason is None:
            found.append(layout)
        else:
            reasons.append(f"{name}: {reason}")
    if not found:
        return Layout(BLOCK_SIZE, False, "; ".join(reasons))
    if len(found) == 1:
        log.info("%s: %s (%s)", loaded.name, found[0].attention, "; ".join(reasons))
        return found[0]
    return _faster(loaded, found)


def why_no_triton(loaded: LoadedModel) -> str | None:
    """Why the Triton kernels cannot read the blocks of this model; None if they can."""
    if missing := missing_triton(loaded.device):
        return missing
    if loaded.dtype not in TOLERANCES:
        return f"the weights are {loaded.dtype}"
    shapes = set(loaded.layers.values())
    if any(s.key_dim != s.value_dim or not 16 <= s.key_dim <= 256 for s in shapes):
        return "its heads have a size that the kernels do not support"
    try:
        for shape in shapes:
            for case in TRIALS:
                for window, cap in ((None, None), (WINDOW, CAP)):
                    layout = Layout(TRITON_BLOCK_SIZE, True, "", True)
                    Case(loaded, shape, layout, case).check(window, cap)
    except Exception as error:
        return f"a trial of the kernels failed: {error}"
    return None


def missing_triton(device: torch.device) -> str:
    """Why a CUDA device cannot run the Triton kernels; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the GPU has the compute capability {capability}; {MIN_CAPABILITY} is required"
    return ""


class Case:
    """Attention of some chunks over scattered blocks of random keys.

    ``case``: the numbers of new tokens and of keys of each chunk.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        shape: LayerShape,
        layout: Layout,
        case: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        self._queries, self._lengths = case
        self._group = _group(loaded)
        self._attend: Attend = triton_attention.attend if layout.triton else varlen.attend
        size, device = layout.block_size, loaded.device
        counts = [-(-length // size) for length in self._lengths]
        blocks = np.random.default_rng(0).permutation(sum(counts)) + 1
        width = max(counts)
        table = np.zeros((len(counts), width), dtype=np.int64)
        slots = []
        for row, end in enumerate(np.cumsum(counts)):
            table[row, : counts[row]] = blocks[end - counts[row] : end]
            at = np.arange(self._lengths[row] - self._queries[row], self._lengths[row])
            slots.append(table[row, at // size] * size + at % size)
        self._table = table
        self._cache = KVCache({0: shape}, 1 + sum(counts), size, loaded.dtype, device)
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, loaded.dtype)

        total, (kv_heads, dim, _) = sum(self._queries), shape
        self._new = normal(total, kv_heads, dim), normal(total, kv_heads, dim)
        for tensor in self._cache.layers[0]:
            tensor.copy_(normal(*tensor.shape))
        self._query = normal(total, self._group * kv_heads, dim)
        spans = PackedSpans(np.array(self._queries), np.array(self._lengths), table.ravel(), width)
        slot_mapping = torch.from_numpy(np.concatenate(slots)).to(device)
        self._batch = varlen.batch_of(spans, self._cache, slot_mapping)

    def run(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        """The attention ``[num_tokens, heads, dim]``."""
        return self._attend(
            0,
            self._query,
            *self._new,
            self._batch,
            scaling=None,
            sliding_window=window,
            softcap=cap,
        )

    def check(self, window: int | None, cap: float | None) -> None:
        """Raises ValueError if the result differs from that of plain attention."""
        found, at = self.run(window, cap), 0
        for row, (count, length) in enumerate(zip(self._queries, self._lengths, strict=True)):
            wanted = self._plain(row, self._query[at : at + count], length, window, cap)
            away = (found[at : at + count].float() - wanted).abs().max().item()
            if not away <= TOLERANCES[found.dtype]:
                raise ValueError(f"the result differs by {away:.3g} from plain attention")
            at += count

    def seconds(self) -> float:
        """The time of one run on the device."""
        for _ in range(WARM_UPS):
            self.run()
        torch.cuda.synchronize(self._query.device)
        began = time.perf_counter()
        for _ in range(RUNS):
            self.run()
        torch.cuda.synchronize(self._query.device)
        return (time.perf_counter() - began) / RUNS

    def _plain(
        self, row: int, query: torch.Tensor, length: int, window: int | None, cap: float | None
    ) -> torch.Tensor:
        """The attention of one chunk in float32: ``[tokens, heads, dim]``."""
        device = query.device
        table = torch.from_numpy(self._table[row]).to(device)
        k, v = (
            paged.index_select(0, table).flatten(0, 1)[:length].float().transpose(0, 1)
            for paged in self._cache.layers[0]
        )
        k, v = k.repeat_interleave(self._group, 0), v.repeat_interleave(self._group, 0)
        scores = query.float().transpose(0, 1) @ k.transpose(1, 2) * query.shape[-1] ** -0.5
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        keys = torch.arange(length, device=device)
        positions = torch.arange(length - len(query), length, device=device).unsqueeze(-1)
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return (weights @ v).transpose(0, 1)


def _group(loaded: LoadedModel) -> int:
    """Query heads that share a key head; 1 if the configuration does not name them."""
    config = loaded.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads // kv_heads if heads and kv_heads else 1


def _faster(loaded: LoadedModel, layouts: Sequence[Layout]) -> Layout:
    """The layout whose attention is fastest on the device, summed over all layer shapes."""
    shapes = sorted(set(loaded.layers.values()))
    name = torch.cuda.get_device_name(loaded.device)
    key = (name, loaded.dtype, _group(loaded), *shapes)
    found = _FASTER.get(key)
    if found is None:
        try:
            times = [
                sum(Case(loaded, shape, layout, at).seconds() for shape in shapes for at in TIMED)
                for layout in layouts
            ]
        except RuntimeError as error:
            # For example out of memory. Each of these kernels has given right results.
            log.warning("%s: its kernels cannot be timed: %s", loaded.name, error)
            return layouts[0]
        found = _FASTER[key] = layouts[times.index(min(times))]
        log.info(
            "%s: %s is used, by time on the %s: %s",
            loaded.name,
            found.attention,
            name,
            ", ".join(
                f"{layout.attention} {1e6 * seconds:.0f} µs"
                for layout, seconds in zip(layouts, times, strict=True)
            ),
        )
    return found
