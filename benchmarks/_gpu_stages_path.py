"""Stage 1 of ``gpu_check.py``: records versions, the attention backend and the number of graphs.

If the engine has fallen back to a slower path, the stage records a fault.
"""

from __future__ import annotations

import importlib.metadata
import platform

import torch
from _gpu_world import CheckFailed, World

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "pyzmq",
    "msgspec",
    "wasmtime",
    "llguidance",
)
PEERS = ("flash-attn", "flashinfer-python", "vllm", "sglang")


def run(world: World) -> None:
    """Records the versions, and which fast paths the engine uses for a model."""
    for name in (*PACKAGES, *PEERS):
        world.record(f"version_{name}", _version(name))
    world.record("version_python", platform.python_version())
    if world.device.type == "cuda":
        _describe_device(world)
    loaded = world.small()
    engine = world.engine(loaded)
    world.record("attention", engine.path.attention)
    world.record("graphs", engine.path.graphs)
    world.record("fused", loaded.decoder is not None)
    world.record("overlaps", engine.overlaps)
    for fallback in engine.path.fallbacks:
        world.fault(f"a fallback: {fallback}")
    world.expect(loaded.decoder is not None, "the model runs with transformers' modules")
    if not world.dry:
        world.expect(engine.path.graphs > 0, "no CUDA graph was captured")
        world.expect(engine.overlaps, "the steps do not overlap")


def _describe_device(world: World) -> None:
    if not torch.cuda.is_available():
        raise CheckFailed("torch does not find a CUDA device; use --dry to run on a CPU")
    found = torch.cuda.get_device_properties(0)
    world.record("device", found.name, capability=f"{found.major}.{found.minor}")
    world.record("device_gib", found.total_memory / 2**30)
    world.record("cuda", torch.version.cuda)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
