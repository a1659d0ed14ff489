"""New weights for a loaded model, read from a folder of safetensors files.

``read_weights`` reads and checks all weights into host memory, on any thread, while the model runs.
``NewWeights.copy_into`` then copies them into the model, between two steps. The model's tensors
keep their addresses, so that native code and CUDA graphs read the new weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from .loader import LoadedModel
from .weights import version_of

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
MAX_FILES = 4096
"""Maximum number of safetensors files of a folder."""
DTYPES = {"F64", "F32", "F16", "BF16"}
"""The types of weights that can be converted to the model's own type."""


class WeightsError(Exception):
    """The weights of a folder cannot replace those of the model; the message says why."""


@dataclass(slots=True, frozen=True)
class NewWeights:
    """Weights that fit a model, in host memory."""

    version: int
    folder: str
    tensors: Mapping[str, torch.Tensor]
    """The weights by name, in the model's types. If several weights are tied, only one of them is
    included."""
    weights: str
    """The hash of the model's weights after ``copy_into`` (``weights_version``)."""

    @torch.inference_mode()
    def copy_into(self, loaded: LoadedModel) -> None:
        """Replaces the weights of the model in place. No forward may run at the same time."""
        own = loaded.model.state_dict()
        for name, tensor in self.tensors.items():
            own[name].copy_(tensor)
        if loaded.device.type == "cuda":
            torch.cuda.synchronize(loaded.device)
        loaded.weights, loaded.version = self.weights, self.version


def read_weights(loaded: LoadedModel, folder: str, version: int) -> NewWeights:
    """Reads the weights of a folder, and checks their names, shapes, types and values against the
    loaded model, which does not change.

    Raises WeightsError.
    """
    own = _own_tensors(loaded)
    files = _files(Path(folder))
    _check_names(own, files, folder)
    size = sum(tensor.numel() * tensor.element_size() for tensor in own.values())
    available = psutil.virtual_memory().available
    if size > available:
        raise WeightsError(
            f"the weights have {size} bytes, but only {available} bytes of memory are available on "
            "the worker's machine"
        )
    tensors: dict[str, torch.Tensor] = {}
    by_address: dict[Any, str] = {}
    for name, read in _read(own, files):
        tied = by_address.setdefault(_place(own[name]), name)
        if tied == name:
            tensors[name] = read
        elif not torch.equal(tensors[tied], read):
            raise WeightsError(
                f"the tensor {name!r} is tied to {tied!r} in the model, but has other values"
            )
    whole = {name: tensors[by_address[_place(tensor)]] for name, tensor in own.items()}
    return NewWeights(version, folder, tensors, version_of(whole))


def _own_tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The weights of the loaded model, by name."""
    if loaded.ranks is not None:
        raise WeightsError(
            f"{loaded.name} is spread over several devices (tp), and its weights cannot be "
            "replaced; restart its worker with the new weights"
        )
    if not loaded.causal:
        raise WeightsError(
            f"{loaded.name} is an encoder, whose weights cannot be replaced; restart its worker "
            "with the new weights"
        )
    own: dict[str, torch.Tensor] = loaded.model.state_dict()
    for name, tensor in own.items():
        if type(tensor) is not torch.Tensor or not tensor.is_floating_point():
            raise WeightsError(
                f"the tensor {name!r} of {loaded.name} is quantized ({tensor.dtype}), so its "
                "weights cannot be replaced; restart its worker with the new weights"
            )
    return own


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a folder, by the tensor's name."""
    if not folder.is_dir():
        raise WeightsError(f"{str(folder)!r} is not a folder of this worker's machine")
    index = folder / INDEX
    try:
        if index.exists():
            if index.stat().st_size > MAX_INDEX_BYTES:
                raise WeightsError(
                    f"{INDEX} has more than {MAX_INDEX_BYTES} bytes; write a smaller index"
                )
            places = json.loads(index.read_bytes())["weight_map"]
            paths = [folder / _plain(name) for name in sorted(set(places.values()))]
        else:
            paths = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"cannot read {INDEX} of {str(folder)!r}: {error}") from None
    if not 0 < len(paths) <= MAX_FILES:
        raise WeightsError(
            f"{str(folder)!r} has {len(paths)} safetensors files; expected 1 to {MAX_FILES}"
        )
    found: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {str(path)!r}: {error}") from None
        for name in names:
            if name in found:
                raise WeightsError(
                    f"the tensor {name!r} is in {found[name].name} and in {path.name}; write it "
                    "to one file"
                )
            found[name] = path
    return found


def _plain(name: str) -> str:
    """Returns ``name`` if it is a file name without a folder. Raises WeightsError otherwise."""
    if os.path.basename(name) != name:
        raise WeightsError(f"{INDEX} names the file {name!r}; expected a file of the same folder")
    return name


def _check_names(own: Mapping[str, torch.Tensor], files: Mapping[str, Path], folder: str) -> None:
    """Raises WeightsError unless the files have each tensor of the model and no other. One of
    several tied tensors is enough."""
    there = {_place(own[name]) for name in files if name in own}
    for name, tensor in own.items():
        if _place(tensor) not in there:
            raise WeightsError(
                f"the tensor {name!r} of the model is missing in {folder!r}; expected all tensors "
                "of the model, under its own names"
            )
    for name, path in files.items():
        if name not in own:
            raise WeightsError(
                f"{path.name} has a tensor {name!r}, which the model does not have; expected only "
                "tensors of the model, under its own names"
            )


def _read(
    own: Mapping[str, torch.Tensor], files: Mapping[str, Path]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the files, as copies in host memory. All shapes and types are checked before
    the first tensor is read."""
    by_file: dict[Path, list[str]] = {}
    for name, path in files.items():
        by_file.setdefault(path, []).append(name)
    for reads in (False, True):
        for path, names in by_file.items():
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in names:
                        part = file.get_slice(name)
                        _check_form(name, own[name], part.get_shape(), part.get_dtype(), path)
                        if reads:
                            yield name, _copied(name, file.get_tensor(name), own[name], path)
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"cannot read {str(path)!r}: {error}") from None


def _check_form(name: str, own: torch.Tensor, shape: Any, dtype: str, path: Path) -> None:
    if list(shape) != list(own.shape):
        raise WeightsError(
            f"the tensor {name!r} in {path.name} has the shape {list(shape)}; the model's has "
            f"{list(own.shape)}"
        )
    if dtype not in DTYPES:
        raise WeightsError(
            f"the tensor {name!r} in {path.name} has the type {dtype}; expected one of "
            f"{', '.join(sorted(DTYPES))}"
        )


def _copied(name: str, read: torch.Tensor, own: torch.Tensor, path: Path) -> torch.Tensor:
    """A copy of a tensor in the model's type. The tensor is copied because the file may change
    later."""
    copied = torch.empty(read.shape, dtype=own.dtype)
    copied.copy_(read)
    if not torch.isfinite(copied).all():
        raise WeightsError(
            f"the tensor {name!r} in {path.name} has values that are not finite in {own.dtype}"
        )
    return copied


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies the memory of a tensor. Tied weights have the same memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
