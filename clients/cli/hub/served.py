"""The models that a running system serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....protocol.endpoints import separate
from ....protocol.hub_names import HubName, HubNameError
from ....protocol.settings import Settings
from ..brokers import Brokers
from ..own_system import listens

if TYPE_CHECKING:
    from .cache import CachedModel


class Served:
    """The models that a system's GPU workers have loaded; empty if no system runs."""

    def __init__(self, settings: Settings) -> None:
        """Raises TokenbusError if a system runs but does not answer."""
        self.by_model: dict[str, list[str]] = {}
        """Maps the name of each served model to the names of its workers."""
        self.broker_runs = any(map(listens, separate(settings.front_endpoint)))
        if not self.broker_runs:
            return
        with Brokers(settings) as brokers:
            for worker in brokers.status().workers:
                for model in worker.models if worker.role == "gpu" else ():
                    self.by_model.setdefault(model, []).append(worker.name)

    def names_of(self, model: CachedModel) -> list[str]:
        """The names under which a revision of a model is served."""
        return [name for name in self.by_model if _is(name, model)]

    def workers_of(self, model: CachedModel) -> list[str]:
        """The workers that serve a revision of a model."""
        return [worker for name in self.names_of(model) for worker in self.by_model[name]]


def _is(name: str, model: CachedModel) -> bool:
    """Whether the served model with the name ``name`` is the cached revision ``model``."""
    if Path(name).is_relative_to(model.folder):
        return True
    try:
        return model.is_named(HubName.parse(name))
    except HubNameError:
        return False
