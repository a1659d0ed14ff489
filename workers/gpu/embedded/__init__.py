"""The embedded model: a small Llama in the Tokenbus package, trained by ``train.py``."""

from __future__ import annotations

from pathlib import Path

NAME = "embedded"
"""The name under which workers serve the embedded model."""


def path() -> Path:
    """The folder from which ``from_pretrained`` loads the embedded model and its tokenizer."""
    return Path(__file__).parent / "model"
