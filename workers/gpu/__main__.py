"""``python -m tokenbus.workers.gpu``: runs a GPU worker. Environment variables configure the
worker."""

from __future__ import annotations

import gc
import importlib
import sys

from ...protocol import logs
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError
from ...transport.dealer import AddressError
from ..process import refuse, serve, settings_of
from .cpu import prepare_environment


def main() -> int:
    """Runs the worker. SIGINT or SIGTERM drains it, and it then ends. Returns the exit code."""
    try:
        settings = settings_of("gpu")
    except (SettingError, ValueError) as error:
        return refuse("gpu", error)
    prepare_environment(settings.threads)
    # Importing torch takes seconds, so invalid settings are reported before the import.
    # Imported modules are never freed, so garbage collection is off during the imports, which
    # then take 3.9 s instead of 4.5 s. ``gc.freeze`` excludes the imported objects from later
    # collections.
    gc.disable()
    importlib.import_module("torch")  # torch installs its own log handlers.
    logs.take_over("torch")
    from .worker import GpuWorker

    logs.take_over("transformers")
    gc.freeze()
    gc.enable()

    try:
        worker = GpuWorker(settings)
    except (AddressError, KeyFault) as error:
        return refuse("gpu", error)
    return serve(worker)


if __name__ == "__main__":
    sys.exit(main())
