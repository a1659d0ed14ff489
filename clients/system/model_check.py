"""Checks the models of a system before its processes start."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ...protocol.hub_names import GGUF, HubName, HubNameError
from ...protocol.model_names import adapter_folders
from ...protocol.model_paths import CONFIG, path_fault
from ...protocol.settings import Settings
from .faults import WRONG_SETTING, SystemFault

NAMED = ("embedded", "auto")
"""The values of the setting ``model`` that are neither a path nor a name on a hub."""
PATH_STARTS = ("/", "./", "../", "~")


def check_model(settings: Settings) -> None:
    """Raises SystemFault if a worker could not load the model or the draft model. A name on a hub
    is looked up only in the cache of this machine."""
    if settings.quantize != "none":
        _check_quantize(settings)
    if settings.lora:
        _check_adapters(settings)
    if not settings.model:
        raise SystemFault(
            "model: is empty; give 'embedded', 'auto', a path or a name on a hub", WRONG_SETTING
        )
    if settings.model == "auto" and not settings.allow:
        raise SystemFault(
            "model: 'auto' needs at least one --allow, for example --allow 'my-org/*'",
            WRONG_SETTING,
        )
    for setting in ("model", "draft_model"):
        model = getattr(settings, setting)
        fault = _fault(model, settings) if model and model not in NAMED else None
        if fault is not None:
            raise SystemFault(f"{setting}: {fault}", WRONG_SETTING)


def _fault(model: str, settings: Settings) -> str | None:
    """The reason why a worker cannot load a model; None if no reason is found."""
    lone_file = model.endswith(GGUF) and model.count("/") < 2
    if model.startswith(PATH_STARTS) or lone_file or os.path.exists(model):
        return path_fault(model)
    try:
        name = HubName.parse(model)
    except HubNameError as error:
        return f"{error}, or the path of a folder or a GGUF file"
    # The workers of a Ray cluster run on other machines, each with its own cache.
    if settings.ray or not settings.gpu_workers or _is_cached(name):
        return None
    pulled = name if "/" in name.repository else "ORG/NAME"
    return (
        f"{model!r} is neither a path nor a downloaded model; download it with "
        f"'tokenbus pull {pulled}', or give the path of a folder or a GGUF file"
    )


def _is_cached(name: HubName) -> bool:
    """Whether the cache of huggingface_hub has a model. True if the package is missing, because the
    worker reports the missing package."""
    if find_spec("huggingface_hub") is None:
        return True
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(
            name.repository,
            name.file or CONFIG,
            cache_dir=Path(constants.HF_HUB_CACHE).expanduser(),
            revision=name.revision or None,
        )
    except ValueError:  # A hub cannot have a model of this name.
        return False
    return isinstance(found, str)


def _check_adapters(settings: Settings) -> None:
    """Raises SystemFault if the workers could not load the LoRA adapters."""
    if settings.compile or settings.tp > 1:
        other = "compile" if settings.compile else "tp"
        raise SystemFault(
            f"lora: adapters cannot be combined with {other}; leave out one of them", WRONG_SETTING
        )
    for folder in adapter_folders(settings.lora).values():
        if not os.path.isdir(folder):
            raise SystemFault(f"lora: the folder {folder} does not exist", WRONG_SETTING)


def _check_quantize(settings: Settings) -> None:
    """Raises SystemFault if other settings contradict ``quantize``, or if torchao is not
    installed."""
    if settings.compile or settings.tp > 1:
        other = "compile" if settings.compile else "tp"
        raise SystemFault(
            f"quantize: {settings.quantize} cannot be combined with {other}; leave out one of them",
            WRONG_SETTING,
        )
    if find_spec("torchao") is None:
        raise SystemFault(
            "quantize: torchao is not installed; pip install 'tokenbus[quantize]' installs it",
            WRONG_SETTING,
        )
