"""All fuzz targets, by name."""

from __future__ import annotations

from . import broker_core, client_session, wasm_guests, wasm_modules
from .codecs import CODECS
from .gateway import GATEWAY
from .target import Target

TARGETS: dict[str, Target] = {
    **CODECS,
    **GATEWAY,
    "broker": broker_core.TARGET,
    "client": client_session.TARGET,
    "wasm": wasm_modules.TARGET,
    "wasm_native": wasm_guests.NATIVE,
    "wasm_aici": wasm_guests.AICI,
}
