"""How an engine runs on each kind of device. Its parts ask this, not the device's name."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..speculation import lengths


class DeviceTraits(NamedTuple):
    """The properties of a kind of device that decide how an engine runs there."""

    overlaps: bool
    """Steps overlap with the host's work unless the settings say otherwise. On a CPU, the forward
    and the worker's Python would only take each other's time."""
    scattered_reads: bool
    """Scattered blocks are read at full speed, so that mirrors of keys and values are not kept."""
    host_memory: bool
    """The forward runs in the memory of the process, on the threads of torch."""
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
