"""The embedded model: a small Llama that comes with Tokenbus, trained by ``train.py`` beside it."""

from __future__ import annotations

from pathlib import Path

NAME = "embedded"
"""The name under which it is served."""


def path() -> Path:
    """The folder that ``from_pretrained`` loads the embedded model and its tokenizer from."""
    return Path(__file__).parent / "model"
