"""Writes folders with new weights for a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model


def changed(tensors: Mapping[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """Weights with random noise added."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        found[name] = (tensor + 0.05 * noise.to(tensor.dtype)).contiguous()
    return found


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes weights to a folder; returns the path of the folder."""
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return str(folder)


def embedded_tensors() -> dict[str, torch.Tensor]:
    """The weights of the embedded model."""
    return load_file(embedded.path() / "model.safetensors")


def write_embedded(folder: Path, seed: int = 1) -> str:
    """Writes changed weights of the embedded model; returns the path of the folder."""
    return write(folder, changed(embedded_tensors(), seed))


def started_with(folder: str) -> LoadedModel:
    """The embedded model, loaded with the weights of a folder."""
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (Path(folder) / name).write_bytes((embedded.path() / name).read_bytes())
    return load_model(folder)
