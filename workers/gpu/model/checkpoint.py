"""Finds the files of a model by its name: a folder, a GGUF file, or a model on a hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.hub import cached_file

from ....protocol.hub_names import GGUF, HubName, HubNameError
from .. import embedded


@dataclass(frozen=True)
class Checkpoint:
    """The arguments of transformers' ``from_pretrained`` that name a model."""

    place: str
    """A folder, or the id of a repository on a hub."""
    options: dict[str, Any] = field(default_factory=dict)
    """The revision of the repository, and the name of a GGUF file."""

    @property
    def weights_options(self) -> dict[str, Any]:
        """``options`` for loading the weights. Weights of a GGUF file become plain tensors, because
        the engine computes with plain tensors only."""
        if "gguf_file" not in self.options or not hasattr(transformers, "GgufConfig"):
            return self.options
        return self.options | {"quantization_config": transformers.GgufConfig(dequantize=True)}

    def fetched(self) -> Checkpoint:
        """Returns a checkpoint whose GGUF file is local. If the GGUF file is on a hub and not in
        the cache, it is downloaded. A checkpoint without a GGUF file is returned unchanged.

        If the file were not local, transformers would ignore the revision, and would read the
        tokenizer from the file in the branch ``main``. Raises OSError if the file cannot be
        downloaded.
        """
        file = self.options.get("gguf_file")
        if file is None or Path(self.place).is_dir():
            return self
        path = Path(cached_file(self.place, file, revision=self.options.get("revision")) or "")
        return Checkpoint(str(path.parent), {"gguf_file": path.name})


def find(name: str) -> Checkpoint:
    """The checkpoint of a model that has this name. Names on a hub are not looked up."""
    if name == embedded.NAME:
        return Checkpoint(str(embedded.path()))
    path = Path(name)
    if name.endswith(GGUF) and path.is_file():
        return Checkpoint(str(path.parent), {"gguf_file": path.name})
    if path.exists():
        return Checkpoint(name)
    try:
        hub = HubName.parse(name)
    except HubNameError:
        return Checkpoint(name)
    options = {"revision": hub.revision, "gguf_file": hub.file}
    return Checkpoint(hub.repository, {key: value for key, value in options.items() if value})
