"""Downloads a model of a hub into the cache of huggingface_hub."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from glob import escape
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from rich.filesize import decimal

from ....protocol.hub_names import GGUF, HubName
from .faults import HubFault, check_endpoint, explained

WEIGHTS = ".safetensors"
OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Patterns of the downloaded files other than weights: the configuration, the tokenizer, the chat
template, and the code that ``--trust-remote-code`` runs."""
FOLDERS = ("1_Pooling", "additional_chat_templates")
"""The folders of a repository that a worker reads."""
COPY = "consolidated"
"""Prefix of the names of files that are not downloaded: a second copy of the weights in Mistral's
own format."""


@dataclass(frozen=True)
class Download:
    """A model to download, with the number of its files that are missing in the cache."""

    name: HubName
    commit: str
    files: tuple[str, ...]
    """The paths of all files of the model, including those that the cache has."""
    missing: int
    """Number of missing files."""
    missing_bytes: int


class Hub:
    """A hub, and the folder into which its models are downloaded."""

    def __init__(self, endpoint: str = "", cache: str = "") -> None:
        """The defaults are those of huggingface_hub: the variables ``HF_ENDPOINT`` and
        ``HF_HUB_CACHE``. Raises HubFault if the hub's address is not valid."""
        self.endpoint = endpoint or constants.ENDPOINT
        check_endpoint(self.endpoint)
        self.cache = Path(cache or constants.HF_HUB_CACHE).expanduser()
        self._api = HfApi(endpoint=self.endpoint, library_name="tokenbus")

    def missing(self, name: HubName) -> Download:
        """Finds the files of a model, and the number of files that must be downloaded. Raises
        HubFault if the hub does not have the model, or if the repository does not contain weights
        that a worker can load."""
        with explained(name, self.endpoint):
            found = self._api.model_info(name.repository, revision=name.revision or None)
            commit = found.sha or name.revision
            tree = self._api.list_repo_tree(name.repository, recursive=True, revision=commit)
            paths = [item.path for item in tree if isinstance(item, RepoFile)]
        files = wanted(name, paths)
        with explained(name, self.endpoint), _without_progress():
            # With a commit as the revision, huggingface_hub does not change the branches and tags
            # in the cache.
            plan = snapshot_download(
                name.repository,
                revision=commit,
                endpoint=self.endpoint,
                cache_dir=self.cache,
                allow_patterns=[escape(file) for file in files],
                dry_run=True,
            )
        sizes = [one.file_size or 0 for one in plan if one.will_download]
        return Download(name, commit, tuple(files), len(sizes), sum(sizes))

    def download(self, wanted: Download) -> Path:
        """Downloads the missing files; returns the folder of the model in the cache.

        If the connection breaks, the download continues where it stopped. Raises HubFault if the
        disk does not have room for the files, or if the hub cannot be reached again.
        """
        self._check_room(wanted)
        name = wanted.name
        download = partial(
            snapshot_download,
            name.repository,
            endpoint=self.endpoint,
            cache_dir=self.cache,
            allow_patterns=[escape(file) for file in wanted.files],
            library_name="tokenbus",
        )
        shows = sys.stderr.isatty()
        with explained(name, self.endpoint), nullcontext() if shows else _without_progress():
            folder = download(revision=wanted.commit)
            if name.revision != wanted.commit:
                # The cached branch or tag is updated to the commit only now, when all files are
                # complete.
                download(revision=name.revision or None)
        return Path(folder)

    def _check_room(self, wanted: Download) -> None:
        folder = next(one for one in (self.cache, *self.cache.parents) if one.exists())
        free = shutil.disk_usage(folder).free
        if wanted.missing_bytes > free:
            raise HubFault(
                f"{wanted.name} needs {decimal(wanted.missing_bytes)}, but the disk of "
                f"{self.cache} has {decimal(free)} free; free some space, or set HF_HUB_CACHE "
                "to a folder of another disk"
            )


@contextmanager
def _without_progress() -> Iterator[None]:
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def wanted(name: HubName, paths: Collection[str]) -> list[str]:
    """The files of a repository that a worker needs to load the model. Raises HubFault if the
    repository does not have weights that a worker can load."""
    if name.file:
        found = [path for path in paths if path == name.file]
        if not found:
            raise HubFault(f"{name.repository} has no file {name.file!r}; {_ggufs(paths)}")
        return found
    own = [path for path in paths if path.rpartition("/")[0] in ("", *FOLDERS)]
    weights = [path for path in own if path.endswith(WEIGHTS) and not path.startswith(COPY)]
    if not weights:
        raise HubFault(f"{name.repository} has no safetensors files; {_ggufs(paths)}")
    others = [path for path in own if any(fnmatch(path, pattern) for pattern in OTHERS)]
    return sorted({*weights, *others})


def _ggufs(paths: Collection[str]) -> str:
    """The end of an error message. It lists the GGUF files of a repository. Each of these files can
    be pulled alone."""
    files = sorted(path for path in paths if path.endswith(GGUF))
    if not files:
        return "a worker loads only safetensors and GGUF files"
    return f"pull one of its GGUF files as ORG/NAME/FILE: {', '.join(files)}"
