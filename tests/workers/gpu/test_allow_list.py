"""The names and paths of models that the allow-list admits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenbus.workers.gpu.model.allow_list import is_allowed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the folders ``models`` and ``evil``. The link ``models/link`` leads to
    ``evil``, and the link ``known`` leads to ``models``."""
    for name in ("models/good", "models/a/b", "evil"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "evil")
    (tmp_path / "known").symlink_to(tmp_path / "models")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "models/../evil",
        "models/link",
        "models/good/../../evil",
        "models/link/.",
        "known/../evil",
        "models/gone/../../evil",
    ],
)
@pytest.mark.parametrize("pattern", ["models/*", "known/*", "models/??*"])
def test_a_path_that_leads_out_of_the_folder_is_not_allowed(
    folder: Path, name: str, pattern: str
) -> None:
    assert not is_allowed(f"{folder}/{name}", [f"{folder}/{pattern}"])


@pytest.mark.parametrize(
    "name", ["models/good", "known/good", "models/../models/good", "models/a/b"]
)
@pytest.mark.parametrize("pattern", ["models/*", "known/*", "*"])
def test_a_path_in_the_folder_is_allowed(folder: Path, name: str, pattern: str) -> None:
    assert is_allowed(f"{folder}/{name}", [f"{folder}/{pattern}"])


def test_relative_paths_are_resolved_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert is_allowed("models/good", ["models/*"])
    assert is_allowed("models/good", ["mod*"])
    assert is_allowed("evil", ["*"])
    assert not is_allowed("models/../evil", ["models/*"])
    assert not is_allowed("models/../evil", ["mod*"])


def test_names_that_are_not_paths_are_compared_as_they_are(folder: Path) -> None:
    assert is_allowed("my-org/model", ["my-org/*"])
    assert is_allowed("embedded", ["embedded"])
    assert not is_allowed("embedded", ["my-org/*"])
    assert not is_allowed("my-org/../../model", ["my-org/*"])
    assert not is_allowed("my-org/\0", ["my-org/*"])
