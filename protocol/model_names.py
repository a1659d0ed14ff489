"""Reads the settings ``served_model_name`` (further names of served models) and ``lora`` (names of
LoRA adapters)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


class AliasError(ValueError):
    """An entry of ``served_model_name`` is not valid; the message says how to correct it."""


class AdapterNameError(ValueError):
    """An entry of ``lora`` is not valid; the message says how to correct it."""


def adapter_folders(entries: Sequence[str], model: str = "") -> dict[str, str]:
    """The folders of LoRA adapters by name, from entries ``NAME=FOLDER``. Raises AdapterNameError
    if an entry is not valid, or if the setting ``model`` is ``auto``."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, folder = (part.strip() for part in entry.partition("="))
        if not name or not folder:
            raise AdapterNameError(f"{entry!r} is not a valid adapter; expected NAME=FOLDER")
        if name in found or name == model:
            raise AdapterNameError(f"the name {name!r} is in use; choose another")
        found[name] = folder
    if found and model == "auto":
        raise AdapterNameError("adapters belong to one model; name a model instead of 'auto'")
    return found


class Aliases:
    """Names that stand for models.

    An entry is ``NAME``, which stands for the default model, or ``NAME=MODEL``. The NAME may be a
    pattern with ``*`` and ``?``. If an entry has exactly the requested name, this entry applies. If
    no entry has the name, the first entry whose pattern matches applies. A requested name that is
    the MODEL of an entry is not replaced, unless an entry has exactly this name.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises AliasError for an entry that is not valid."""
        self._targets: dict[str, str] = {}
        for entry in entries:
            name, given, model = (part.strip() for part in entry.partition("="))
            if not name or (given and not model):
                raise AliasError(
                    f"{entry!r} is not a valid name; expected NAME or NAME=MODEL, for example "
                    "'claude-*=my-model'"
                )
            if name in self._targets:
                raise AliasError(f"the name {name!r} is given twice; give it once")
            self._targets[name] = model
        for name, model in self._targets.items():
            if self._targets.get(model, model) != model:
                raise AliasError(
                    f"{name!r} stands for {model!r}, which stands for another model; name the "
                    "model itself"
                )
        self._models = set(self._targets.values())

    @property
    def names(self) -> dict[str, str]:
        """The names and patterns, with their models. An empty model stands for the default
        model."""
        return dict(self._targets)

    def model(self, name: str) -> str:
        """The model for which ``name`` stands; ``name`` itself if it is not an alias."""
        found = self._targets.get(name)
        if found is not None:
            return found
        if not name or name in self._models:
            return name
        patterns = self._targets.items()
        return next((model for one, model in patterns if fnmatchcase(name, one)), name)
