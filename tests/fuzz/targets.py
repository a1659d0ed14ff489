"""All fuzz targets, by name."""

from __future__ import annotations

from . import broker_core, client_session
from .codecs import CODECS
from .target import Target

TARGETS: dict[str, Target] = {
    **CODECS,
    "broker": broker_core.TARGET,
    "client": client_session.TARGET,
}
