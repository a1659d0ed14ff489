"""Checks whether a file or a folder can contain a model."""

from __future__ import annotations

from pathlib import Path

from .hub_names import GGUF

GGUF_MAGIC = b"GGUF"
"""The first bytes of a file in llama.cpp's format."""
CONFIG = "config.json"


def path_fault(text: str) -> str | None:
    """The reason why a worker cannot load a model from a path; None if the path passes all
    checks."""
    try:
        return _fault(Path(text), text)
    except OSError as error:
        return f"{text} cannot be read: {error.strerror}"


def _fault(path: Path, text: str) -> str | None:
    """Like ``path_fault``. Raises OSError if the file system refuses the path."""
    if path.is_dir():
        return _folder_fault(path, text)
    if not path.exists():
        return f"the {'file' if text.endswith(GGUF) else 'folder'} {text} does not exist"
    if not text.endswith(GGUF):
        return f"{text} is a file; expected a folder, or a file that ends with {GGUF}"
    with path.open("rb") as file:
        head = file.read(len(GGUF_MAGIC))
    if not head:
        return f"the file {text} is empty; download it again"
    if head != GGUF_MAGIC:
        return f"the file {text} is not a GGUF file: it begins with {head!r}, not {GGUF_MAGIC!r}"
    return None


def _folder_fault(path: Path, text: str) -> str | None:
    if (path / CONFIG).is_file():
        return None
    found = min((one.name for one in path.glob(f"*{GGUF}")), default=None)
    right = "expected a folder with the files of a model from a hub"
    if found is not None:
        right = f"expected the path of one of its GGUF files, such as {path / found}"
    return f"the folder {text} has no {CONFIG}; {right}"
