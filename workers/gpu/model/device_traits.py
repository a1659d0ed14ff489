"""The properties of each kind of device. The engine reads these properties instead of the device's
name."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..speculation import lengths


class DeviceTraits(NamedTuple):
    """The properties of a kind of device that decide how an engine runs there."""

    overlaps: bool
    """Whether steps overlap with the host's work by default. On a CPU, the forward and the worker's
    Python would compete for the cores."""
    scattered_reads: bool
    """Whether scattered blocks are read at full speed, so that mirrors (contiguous copies of keys
    and values, ``engine/packing.py``) are not needed."""
    host_memory: bool
    """Whether weights and KV cache are in host memory, because the device is the CPU."""
    draft_costs: lengths.Costs


CPU = DeviceTraits(overlaps=False, scattered_reads=False, host_memory=True, draft_costs=lengths.CPU)
CUDA = DeviceTraits(
    overlaps=True, scattered_reads=True, host_memory=False, draft_costs=lengths.CUDA
)
OTHER = DeviceTraits(
    overlaps=True, scattered_reads=True, host_memory=False, draft_costs=lengths.CPU
)


def traits_of(device: torch.device) -> DeviceTraits:
    """The properties of a device."""
    return {"cpu": CPU, "cuda": CUDA}.get(device.type, OTHER)
