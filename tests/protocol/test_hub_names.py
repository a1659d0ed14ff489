"""Names of models on a hub."""

from __future__ import annotations

import pytest
from tokenbus.protocol.hub_names import HubName, HubNameError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2", HubName("gpt2")),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name/a.Q4_0.gguf", HubName("org/name", "", "a.Q4_0.gguf")),
        ("org/name/deep/a.gguf@v1", HubName("org/name", "v1", "deep/a.gguf")),
        ("org/name.gguf", HubName("org/name.gguf")),
    ],
)
def test_a_name_has_a_repository_a_file_and_a_revision(text: str, name: HubName) -> None:
    assert HubName.parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize("text", ["", "/a/b", "./a", "a/b/c", "a@", "../a", "a b", "a/../b.gguf"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(HubNameError, match="expected ORG/NAME"):
        HubName.parse(text)
