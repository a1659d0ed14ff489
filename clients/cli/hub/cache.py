"""The models in the cache of huggingface_hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CacheNotFound, HFCacheInfo, scan_cache_dir

from ....protocol.hub_names import HubName
from .faults import HubFault

MAIN = "main"
"""The revision that a name without a revision refers to."""


@dataclass(frozen=True)
class CachedModel:
    """One revision of a model in the cache."""

    repository: str
    commit: str
    refs: tuple[str, ...]
    """The branches and tags that refer to the commit."""
    size: int
    """Size of the revision's files in bytes. Files that belong to other revisions too are
    included."""
    folder: Path

    def is_named(self, name: HubName) -> bool:
        """Whether ``name`` refers to this revision."""
        revision = name.revision or MAIN
        return self.repository == name.repository and (
            revision in self.refs or self.commit == revision
        )

    def __str__(self) -> str:
        return f"{self.repository}@{', '.join(self.refs) or self.commit[:8]}"


class Cache:
    """A snapshot of the models in the cache of huggingface_hub."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the folder of the cache, which need not exist."""
        self._folder = folder
        self._scanned: HFCacheInfo | None = None
        try:
            self._scanned = scan_cache_dir(folder)
        except (CacheNotFound, ValueError):
            pass
        self.models = self._models()
        """The models, sorted by name."""

    @property
    def faults(self) -> list[str]:
        """One line for each folder of the cache that cannot be read. For example, a download may
        have been interrupted before its first file was complete."""
        return [str(warning) for warning in self._scanned.warnings] if self._scanned else []

    def of(self, name: HubName) -> list[CachedModel]:
        """The cached revisions that ``name`` refers to. If the name has a revision, only this
        revision. If it has none, all revisions of the model. The revision in a name is a branch, a
        tag, or the first digits of a commit. Raises HubFault if the model or the revision is not in
        the cache, or if several commits begin with these digits."""
        found = [model for model in self.models if model.repository == name.repository]
        if name.revision:
            exact = [model for model in found if model.is_named(name)]
            found = exact or [m for m in found if m.commit.startswith(name.revision)]
        if not found or (name.revision and len(found) > 1):
            what = "several commits that match" if found else "no model"
            raise HubFault(
                f"the cache {self._folder} has {what} {name}; `tokenbus models` lists its models"
            )
        return found

    def remove(self, models: list[CachedModel]) -> int:
        """Removes revisions of models; returns the number of freed bytes. Files that belong to
        other revisions too are kept."""
        assert self._scanned is not None
        strategy = self._scanned.delete_revisions(*(model.commit for model in models))
        strategy.execute()
        return strategy.expected_freed_size

    def _models(self) -> list[CachedModel]:
        if self._scanned is None:
            return []
        found = [
            CachedModel(
                repo.repo_id,
                revision.commit_hash,
                tuple(sorted(revision.refs)),
                revision.size_on_disk,
                revision.snapshot_path,
            )
            for repo in self._scanned.repos
            if repo.repo_type == "model"
            for revision in repo.revisions
        ]
        return sorted(found, key=lambda model: (model.repository, model.commit))
