"""Names of models on a hub: ``ORG/NAME``, optionally with a file or a revision."""

from __future__ import annotations

import re

from msgspec import Struct

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
GGUF = ".gguf"
"""The suffix of files that contain a whole model in llama.cpp's format."""


class HubNameError(ValueError):
    """A text is not the name of a model on a hub. The error's message says which form is
    expected."""


class HubName(Struct, frozen=True):
    """A model on a hub: ``ORG/NAME``, ``ORG/NAME@REVISION`` or ``ORG/NAME/FILE.gguf``."""

    repository: str
    """The id of the repository, for example ``Qwen/Qwen3-0.6B``."""
    revision: str = ""
    """A branch, a tag or a commit; if empty, the branch ``main``."""
    file: str = ""
    """The path of a GGUF file in the repository; if empty, the model is the repository's
    safetensors files."""

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Raises HubNameError if the text is not the name of a model on a hub."""
        name, at, revision = text.partition("@")
        repository, file = name, ""
        if name.endswith(GGUF) and name.count("/") >= 2:
            org, repo, file = name.split("/", 2)
            repository = f"{org}/{repo}"
        if not _REPOSITORY.fullmatch(repository) or (at and not revision) or ".." in text:
            raise HubNameError(
                f"{text!r} is not the name of a model on a hub; expected ORG/NAME, "
                "ORG/NAME@REVISION or ORG/NAME/FILE.gguf"
            )
        return cls(repository, revision, file)

    def __str__(self) -> str:
        path = f"{self.repository}/{self.file}" if self.file else self.repository
        return f"{path}@{self.revision}" if self.revision else path
