"""The attention backends that ``gpu_check.py`` compares, with one interface."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenbus.workers.gpu.engine.packing import Packed, PackedGroup
from tokenbus.workers.gpu.model.cuda import flash3, varlen
from tokenbus.workers.gpu.model.cuda.kernels import writing
from tokenbus.workers.gpu.model.device_queue import on_device
from tokenbus.workers.gpu.model.fused.decoder import Attend
from tokenbus.workers.gpu.model.kv_cache import (
    BLOCK_SIZE,
    FLASH3_BLOCK_SIZE,
    FLASH_BLOCK_SIZE,
    KVCache,
)
from tokenbus.workers.gpu.model.transformers import attention
from tokenbus.workers.gpu.model.transformers.attention import Group, PackedBatch

TRITON = "tokenbus.workers.gpu.model.triton.attention"


@dataclass(slots=True, frozen=True)
class Backend:
    """An attention backend that reads the blocks of a KV cache."""

    name: str
    why_not: str
    """The reason why the backend is not available; empty if it is available."""
    attend: Attend
    context: Callable[[Packed, KVCache], Any]
    """Returns the metadata of a step for ``attend``."""
    in_place: bool
    """Whether the backend reads blocks in place; it then uses the metadata in ``Packed.spans``. If
    not, it gathers the blocks of each group in ``Packed.groups``."""
    block_sizes: tuple[int, ...]
    soft_cap: bool
    """Whether the backend can cap the attention scores (``softcap``)."""
    row_invariant: bool
    """Whether the result for a row has the same bits in every batch."""


def backends(device: torch.device) -> list[Backend]:
    """All attention backends."""
    on_cpu = "" if device.type == "cuda" else f"the device is {device.type}"
    return [
        _triton(device),
        Backend("sdpa", "", attention.attend, _gathered, False, (BLOCK_SIZE, 32), True, False),
        Backend(
            "varlen",
            varlen.why_no_kernel() or on_cpu,
            writing(varlen.attend_stored),
            _spans,
            True,
            (FLASH_BLOCK_SIZE,),
            False,
            True,
        ),
        Backend(
            "fa3",
            flash3.why_no_kernel() or on_cpu,
            writing(flash3.attend_stored),
            _spans,
            True,
            (16, FLASH3_BLOCK_SIZE),
            True,
            # A row's result may depend on the batch: FlashAttention 3 may choose its tiles by the
            # longest chunk.
            False,
        ),
    ]


def _triton(device: torch.device) -> Backend:
    """The Triton kernels. On a CPU, Triton's interpreter runs them."""
    why, attend = "", attention.attend
    if importlib.util.find_spec("triton") is None:
        why = "Triton is not installed"
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        why = f"the device is {device.type}, and TRITON_INTERPRET is not 1"
    else:
        try:
            attend = writing(importlib.import_module(TRITON).attend_stored)
        except ModuleNotFoundError as error:
            why = str(error)
    return Backend("triton", why, attend, _spans, True, (16, 64, 256), True, True)


def _spans(packed: Packed, cache: KVCache) -> Any:
    assert packed.spans is not None
    device = cache.layers[0][0].device
    return varlen.batch_of(packed.spans, cache, on_device(packed.slot_mapping, device))


def _gathered(packed: Packed, cache: KVCache) -> PackedBatch:
    device = cache.layers[0][0].device
    groups = [_group(group, device) for group in packed.groups]
    return PackedBatch(cache, on_device(packed.slot_mapping, device), groups)


def _group(group: PackedGroup, device: torch.device) -> Group:
    shape = (group.batch, group.width)
    rows, places = group.rows, group.places
    return Group(
        start=group.start,
        end=group.end,
        width=group.width,
        blocks=on_device(group.blocks, device),
        length=group.length,
        positions=on_device(group.positions, device).view(shape),
        rows=None if rows is None else on_device(rows, device).view(shape),
        places=None if places is None else on_device(places, device),
        fresh=group.fresh,
    )
