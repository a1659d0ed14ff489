"""New weights for a loaded model, read from safetensors files.

``read_weights`` reads and checks all weights of a folder into host memory, on any thread, while the
model runs. ``read_received`` does the same for a file that has arrived over the bus.
``NewWeights.copy_into`` then copies the weights into the model, between two steps. The model's
tensors keep their addresses, so that native code and CUDA graphs read the new weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
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
    """New weights do not fit the model, or cannot be read; the message names the tensor."""


@dataclass(slots=True, frozen=True)
class NewWeights:
    """Weights that fit a model, in host memory."""

    version: int
    source: str
    """The folder, or another origin of the weights."""
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


@dataclass(slots=True, frozen=True)
class _File:
    """A safetensors file."""

    path: Path
    name: str
    """The name of the file in errors."""
    private: bool = False
    """Whether no other process can change the file, so that its tensors need not be copied."""


def read_weights(loaded: LoadedModel, folder: str, version: int) -> NewWeights:
    """Reads the weights of a folder. Checks that their names, shapes, types and values fit the
    loaded model. The model does not change.

    Raises WeightsError.
    """
    own = own_tensors(loaded)
    return _read_files(own, _files(Path(folder)), folder, version)


def read_received(loaded: LoadedModel, path: Path, version: int, source: str) -> NewWeights:
    """Like ``read_weights``, for one file that only this process can change. ``source``: the origin
    of the weights, for errors and the log."""
    file = _File(path, source, private=True)
    return _read_files(own_tensors(loaded), _tensors_of([file]), source, version)


def _read_files(
    own: Mapping[str, torch.Tensor], files: Mapping[str, _File], source: str, version: int
) -> NewWeights:
    """Reads the tensors of the files. ``source``: a name for all files together."""
    _check_names(own, files, source)
    size = sum(tensor.numel() * tensor.element_size() for tensor in own.values())
    available = psutil.virtual_memory().available
    if size > available and not all(file.private for file in files.values()):
        raise WeightsError(
            f"the weights have {size} bytes, but only {available} bytes of memory are available on "
            "the worker's machine"
        )
    tensors: dict[str, torch.Tensor] = {}
    by_address: dict[Any, str] = {}
    for name, read in _read(own, files):
        tied = by_address.setdefault(place(own[name]), name)
        if tied == name:
            tensors[name] = read
        elif not torch.equal(tensors[tied], read):
            raise WeightsError(
                f"the tensor {name!r} is tied to {tied!r} in the model, but has other values"
            )
    whole = {name: tensors[by_address[place(tensor)]] for name, tensor in own.items()}
    return NewWeights(version, source, tensors, version_of(whole))


def own_tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The weights of the loaded model, by name. Raises WeightsError if the weights cannot be
    replaced."""
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


def _files(folder: Path) -> dict[str, _File]:
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
    return _tensors_of([_File(path, path.name) for path in paths])


def _tensors_of(files: Iterable[_File]) -> dict[str, _File]:
    """The file of each tensor, by the tensor's name."""
    found: dict[str, _File] = {}
    for file in files:
        try:
            with safe_open(file.path, framework="pt", device="cpu") as opened:
                names = list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {file.name!r}: {error}") from None
        for name in names:
            if name in found:
                raise WeightsError(
                    f"the tensor {name!r} is in {found[name].name} and in {file.name}; write it "
                    "to one file"
                )
            found[name] = file
    return found


def _plain(name: str) -> str:
    """Returns ``name`` if it is a file name without a folder. If it is not, raises WeightsError."""
    if os.path.basename(name) != name:
        raise WeightsError(f"{INDEX} names the file {name!r}; expected a file of the same folder")
    return name


def _check_names(own: Mapping[str, torch.Tensor], files: Mapping[str, _File], source: str) -> None:
    """Raises WeightsError if the files lack a tensor of the model, or have a tensor that the model
    does not have."""
    there = {place(own[name]) for name in files if name in own}
    for name, tensor in own.items():
        if place(tensor) not in there:
            raise WeightsError(
                f"the tensor {name!r} of the model is missing in {source!r}; expected all tensors "
                "of the model, under its own names"
            )
    for name, file in files.items():
        if name not in own:
            raise WeightsError(
                f"{file.name} has a tensor {name!r}, which the model does not have; expected only "
                "tensors of the model, under its own names"
            )


def _read(
    own: Mapping[str, torch.Tensor], files: Mapping[str, _File]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the files, in host memory. All shapes and types are checked before the first
    tensor is read."""
    by_file: dict[_File, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    for reads in (False, True):
        for file, names in by_file.items():
            try:
                with safe_open(file.path, framework="pt", device="cpu") as opened:
                    for name in names:
                        part = opened.get_slice(name)
                        _check_form(name, own[name], part.get_shape(), part.get_dtype(), file)
                        if reads:
                            yield name, _checked(name, opened.get_tensor(name), own[name], file)
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"cannot read {file.name!r}: {error}") from None


def _check_form(name: str, own: torch.Tensor, shape: Any, dtype: str, file: _File) -> None:
    if list(shape) != list(own.shape):
        raise WeightsError(
            f"the tensor {name!r} in {file.name} has the shape {list(shape)}; the model's has "
            f"{list(own.shape)}"
        )
    if dtype not in DTYPES:
        raise WeightsError(
            f"the tensor {name!r} in {file.name} has the type {dtype}; expected one of "
            f"{', '.join(sorted(DTYPES))}"
        )


def _checked(name: str, read: torch.Tensor, own: torch.Tensor, file: _File) -> torch.Tensor:
    """A tensor in the model's type. The tensor is copied if its file may change later."""
    if not (file.private and read.dtype == own.dtype):
        copied = torch.empty(read.shape, dtype=own.dtype)
        read = copied.copy_(read)
    if not torch.isfinite(read).all():
        raise WeightsError(
            f"the tensor {name!r} in {file.name} has values that are not finite in {own.dtype}"
        )
    return read


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that identifies the memory of a tensor. Tied weights have the same memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
