"""The command ``tokenbus``."""

from .main import main

__all__ = ["main"]
