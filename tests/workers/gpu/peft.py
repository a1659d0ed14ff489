"""Random LoRA adapters in PEFT's layout, and models into which they are merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn")
MLP = ("gate_proj", "up_proj", "down_proj", "c_fc", "c_proj")
HEAD = ("lm_head",)
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    model: Any,
    modules: Sequence[str] = ATTENTION,
    seed: int = 0,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """Writes an adapter of a model with random updates of all modules that have these names.
    ``strength``: the size of an update, relative to the weights. ``config``: fields of
    ``adapter_config.json``."""
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name not in modules:
            continue
        rank = fields.get("rank_pattern", {}).get(name, fields["r"])
        weight = module.weight if isinstance(module, Linear) else module.weight.t()
        spread = strength * weight.float().std().item() / rank**0.5
        a = torch.randn(rank, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], rank, generator=generator) * spread
        tensors |= {f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merged(model: Any, folder: Path) -> Any:
    """The model with weights ``W + scale * B @ A``, which replace ``W``."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, a in tensors.items():
        path = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if not key.endswith(".lora_A.weight"):
            continue
        name = path.rpartition(".")[2]
        alpha = fields.get("alpha_pattern", {}).get(name, fields["lora_alpha"])
        rank = fields.get("rank_pattern", {}).get(name, fields["r"])
        scale = alpha / (rank**0.5 if fields.get("use_rslora") else rank)
        update = scale * tensors[key.replace("lora_A", "lora_B")] @ a
        module = model.get_submodule(path)
        module.weight += update if isinstance(module, Linear) else update.t()
    return model
