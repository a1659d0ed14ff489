"""Stores which attention kernels were chosen on this machine. The file is in the user's cache
folder.

A choice depends on the card, the driver, the versions of libraries, the available kernels, and the
type and shapes of a model's keys. If any of these differs, the kernels are timed again. A file that
cannot be read is ignored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from .....protocol.decoders import json_decoder
from ....whole_files import write_whole
from ..kv_cache import Kernel
from ..loader import LoadedModel
from .kernels import KERNELS

log = logging.getLogger(__name__)

MAX_CHOICES = 256
"""Maximum number of choices in the file; the oldest are dropped first."""
DRIVER = Path("/proc/driver/nvidia/version")
LIBRARIES = ("torch", "triton", "flash_attn_3")

_chosen: dict[str, Kernel] = {}
"""The choices of this process, which are used if the file cannot be written."""


def path() -> Path:
    """The file: ``tokenbus/attention.json`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "tokenbus" / "attention.json"


def key_of(loaded: LoadedModel, group: int, kernels: Sequence[Kernel]) -> str:
    """A key that contains everything on which the times of ``kernels`` depend. ``group``: number of
    query heads for each key head."""
    parts = {
        "card": torch.cuda.get_device_name(loaded.device),
        "driver": _driver(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "dtype": str(loaded.dtype),
        "group": group,
        "layers": sorted(set(loaded.layers.values())),
        "block sizes": {kernel: KERNELS[kernel].BLOCK_SIZE for kernel in kernels},
    }
    return msgspec.json.encode(parts).decode()


def load(key: str) -> Kernel | None:
    """The stored choice; None if no choice is stored."""
    return _chosen.get(key) or _read().get(key)


def store(key: str, kernel: Kernel) -> None:
    """Stores a choice. The file is replaced atomically, so that a reader finds either the old file
    or the new file."""
    _chosen[key] = kernel
    choices = {k: v for k, v in _read().items() if k != key} | {key: kernel}
    kept = dict(list(choices.items())[-MAX_CHOICES:])
    try:
        file = path()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.encode(kept), synced=False)
    except (OSError, RuntimeError) as error:
        log.info("the choice of attention kernel cannot be stored for later processes: %s", error)


def _read() -> dict[str, Kernel]:
    try:
        return json_decoder(dict[str, Kernel]).decode(path().read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, msgspec.MsgspecError) as error:
        log.info("the stored choices of attention kernels are ignored: %s", error)
        return {}


def _driver() -> str:
    """The version of the card's driver; empty if the system does not show it."""
    try:
        return DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
