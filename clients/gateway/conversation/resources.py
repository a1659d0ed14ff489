"""The objects that the preparation of an answer needs. ``Gateway`` has them for HTTP requests, and
``Chats`` in ``clients/chats.py`` has them for a Python client."""

from __future__ import annotations

from typing import Protocol

from ..models import ModelTable
from ..templates import Templates


class Resources(Protocol):
    """The models of the bus, and the renderer of their templates."""

    models: ModelTable
    templates: Templates
