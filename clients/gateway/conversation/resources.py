"""The parts of a gateway that prepare an answer. A client of the bus has them too."""

from __future__ import annotations

from typing import Protocol

from ..models import ModelTable
from ..templates import Templates


class Resources(Protocol):
    """The models and their templates."""

    models: ModelTable
    templates: Templates
