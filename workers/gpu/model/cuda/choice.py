"""Chooses the attention of a model on its device: a kernel that reads blocks in place, or SDPA over
gathered blocks.

A kernel is tried before it is used: its results are compared with plain attention. A trial computes
several chunks; a chunk is the tokens that a step computes of one sequence. If several kernels work,
each is timed on the device, and the fastest one is chosen. The choice is stored for later models of
the same shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..kv_cache import BLOCK_SIZE, Kernel, Layout
from ..loader import LoadedModel
from . import stored_choices
from .kernels import KERNELS
from .trial import Trial, heads_per_key_head

log = logging.getLogger(__name__)

TRIALS = (((1, 1, 1), (5, 300, 4000)), ((3, 1, 40), (700, 257, 300)))
"""For each trial: the number of new tokens of each chunk, and the number of keys of each chunk."""
TIMED = (((1,) * 32, (1024,) * 32), ((1,), (8192,)), ((1024,), (1024,)))
"""The chunks of each timed run, as in ``TRIALS``: decodes, a long decode, and a prompt."""
WINDOW, CAP = 100, 20.0


def choose_layout(loaded: LoadedModel) -> Layout:
    """The layout of a model's keys and values on its device, with the attention that reads them."""
    if loaded.device.type != "cuda":
        return Layout(BLOCK_SIZE, "gather", f"the device is {loaded.device.type}")
    found: list[Kernel] = []
    reasons: list[str] = []
    for name, kernel in KERNELS.items():
        if reason := why_not(loaded, name):
            reasons.append(f"{kernel.TITLE}: {reason}")
        else:
            found.append(name)
    if reasons:
        log.info("%s: kernels that are not used: %s", loaded.name, "; ".join(reasons))
    if not found:
        return Layout(BLOCK_SIZE, "gather", "; ".join(reasons))
    chosen = found[0] if len(found) == 1 else _fastest(loaded, found)
    return Layout(KERNELS[chosen].BLOCK_SIZE, chosen)


def why_not(loaded: LoadedModel, kernel: Kernel) -> str:
    """The reason why a kernel cannot be used for a model: the kernel does not support the model, or
    its trial failed. Empty if the kernel can be used."""
    if reason := KERNELS[kernel].why_not(loaded):
        return reason
    try:
        for shape in set(loaded.layers.values()):
            for case in TRIALS:
                trial = Trial(loaded, shape, kernel, case)
                trial.check(None, None)
                trial.check(WINDOW, CAP if loaded.soft_caps else None)
    except Exception as error:
        return f"a trial failed: {error}"
    return ""


def _fastest(loaded: LoadedModel, kernels: Sequence[Kernel]) -> Kernel:
    """The fastest of several kernels: the stored choice, or else the kernel with the smallest sum
    of times over all layer shapes."""
    key = stored_choices.key_of(loaded, heads_per_key_head(loaded), kernels)
    found = stored_choices.load(key)
    if found is not None and found in kernels:
        log.info(
            "%s: %s is used, the fastest in an earlier measurement",
            loaded.name,
            KERNELS[found].TITLE,
        )
        return found
    shapes = sorted(set(loaded.layers.values()))
    try:
        times = {
            kernel: sum(
                Trial(loaded, shape, kernel, case).seconds() for shape in shapes for case in TIMED
            )
            for kernel in kernels
        }
    except RuntimeError as error:
        # A measurement can fail, for example if the device is out of memory. The first kernel is
        # then used, because all of these kernels have given right results.
        log.warning("%s: its kernels cannot be timed: %s", loaded.name, error)
        return kernels[0]
    fastest = min(times, key=lambda kernel: times[kernel])
    log.info(
        "%s: %s is used, the fastest on the %s: %s",
        loaded.name,
        KERNELS[fastest].TITLE,
        torch.cuda.get_device_name(loaded.device),
        ", ".join(f"{KERNELS[k].TITLE} {1e6 * seconds:.0f} µs" for k, seconds in times.items()),
    )
    stored_choices.store(key, fastest)
    return fastest
