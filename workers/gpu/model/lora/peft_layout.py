"""Reads LoRA adapters (Hu et al. 2021) in PEFT's layout: a folder with ``adapter_config.json`` and
``adapter_model.safetensors``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open

from .....protocol.decoders import convert, json_decoder
from ..weights import version_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = {
    "alora_invocation_tokens": "an activated LoRA",
    "arrow_config": "a mixture of adapters (Arrow)",
    "layer_replication": "replicated layers",
    "lora_bias": "biases",
    "modules_to_save": "retrained modules",
    "target_parameters": "updates of parameters that are not linear modules",
    "trainable_token_indices": "retrained embeddings",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}
"""Fields of the configuration that must be empty. The value is the feature that the field
configures."""
_INITIAL = ("eva", "gaussian", "orthogonal")
"""The values of ``init_lora_weights`` that leave the weights of the model unchanged. Other values,
such as ``pissa`` and ``loftq``, subtract the initial adapter from the weights or quantize them."""


class AdapterError(Exception):
    """The adapter cannot be served; the message says why."""


@contextmanager
def naming(adapter: str) -> Iterator[None]:
    """A context that adds the name of the adapter to each AdapterError raised in it."""
    try:
        yield
    except AdapterError as error:
        why = f"the LoRA adapter {adapter!r} cannot be served: {error}"
        raise AdapterError(why) from error.__cause__


class _Config(Struct):
    """The fields of ``adapter_config.json`` that determine the updates. The names of the tensors
    name the modules, so ``target_modules`` and ``layers_to_transform`` are not read.
    ``fan_in_fan_out`` is not read, because updates are not merged into the weights."""

    r: Annotated[int, Meta(ge=1)]
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Meta(ge=1)]] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, module: str) -> int:
        """The rank of a module's update."""
        return int(_value(self.rank_pattern or {}, module, self.r))

    def scale(self, module: str) -> float:
        """The factor of a module's update."""
        rank = self.rank(module)
        alpha = _value(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


@dataclass(slots=True, frozen=True)
class Update:
    """The update of a linear module: its output increases by ``b @ a @ input``."""

    a: torch.Tensor
    """``[rank, in]``"""
    b: torch.Tensor
    """``[out, rank]``, multiplied by the adapter's scale."""


@dataclass(slots=True, frozen=True)
class Adapter:
    """A LoRA adapter."""

    name: str
    updates: Mapping[str, Update]
    """The update of each linear module, by the path of the module within the model."""
    hash: str
    """The first 32 hexadecimal digits of a SHA-256 of all updates."""


def read_adapter(name: str, folder: Path) -> Adapter:
    """Reads an adapter. Raises AdapterError if a file cannot be read, or if the adapter changes
    more than linear modules."""
    with naming(name):
        updates = _read_updates(folder)
    hashed = {f"{module}.a": update.a for module, update in updates.items()}
    hashed |= {f"{module}.b": update.b for module, update in updates.items()}
    return Adapter(name, updates, version_of(hashed))


def _read_updates(folder: Path) -> dict[str, Update]:
    config = _read_config(folder / CONFIG)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _read_tensors(folder / WEIGHTS).items():
        found = _KEY.fullmatch(key)
        if found is None:
            raise AdapterError(
                f"its tensor {key!r} is not part of a linear module's update; expected names such "
                "as 'base_model.model.MODULE.lora_A.weight'"
            )
        halves.setdefault(found[1], {})[found[2]] = tensor
    if not halves:
        raise AdapterError(f"{folder / WEIGHTS} has no tensors")
    return {module: _update(module, both, config) for module, both in halves.items()}


def _read_config(path: Path) -> _Config:
    try:
        fields = json_decoder(dict[str, Any]).decode(path.read_bytes())
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise AdapterError(f"{path} is not valid: {error}") from None
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"its peft_type is {kind!r}; only 'LORA' is supported")
    for field, feature in _UNSUPPORTED.items():
        if fields.get(field):
            raise AdapterError(f"it has {feature} ({field}), which this engine does not support")
    if fields.get("bias", "none") != "none":
        raise AdapterError(f"its bias is {fields['bias']!r}; only 'none' is supported")
    begun = fields.get("init_lora_weights", True)
    if isinstance(begun, str) and begun not in _INITIAL:
        raise AdapterError(
            f"its init_lora_weights is {begun!r}, which also changes the weights of the model; "
            "convert it to a plain LoRA"
        )
    try:
        return convert(fields, _Config)
    except msgspec.ValidationError as error:
        raise AdapterError(f"{path} is not valid: {error}") from None


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"cannot read {path}: {error}") from None


def _update(module: str, halves: Mapping[str, torch.Tensor], config: _Config) -> Update:
    """The update of a module from its two tensors."""
    if len(halves) < 2:
        raise AdapterError(f"the update of {module} lacks lora_A or lora_B")
    a, b, rank = halves["A"], halves["B"], config.rank(module)
    if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
        raise AdapterError(
            f"the update of {module} has tensors of the shapes {list(a.shape)} and "
            f"{list(b.shape)}; expected a rank of {rank}"
        )
    # The tensors are views of the file, which may be overwritten while the adapter is served.
    return Update(a.clone(), b.float() * config.scale(module))


def _value(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's path, as in PEFT."""
    for pattern, value in patterns.items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise AdapterError(
                f"its pattern {pattern!r} is not a valid regular expression: {error}"
            ) from None
        if found:
            return value
    return default
