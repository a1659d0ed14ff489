"""The parts of a gateway that prepare an answer. ``clients/chats.py`` has the same parts for a
Python client."""

from __future__ import annotations

from typing import Protocol

from ..models import ModelTable
from ..templates import Templates


class Resources(Protocol):
    """The models and their templates."""

    models: ModelTable
    templates: Templates
