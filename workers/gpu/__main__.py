"""``python -m tokenbus.workers.gpu``: one GPU worker, set by the environment."""

from __future__ import annotations

import importlib
import signal
import sys

from ...protocol import logs, tracing
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, load
from ...transport.dealer import AddressError
from .cpu import prepare_environment


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; the exit code."""
    try:
        settings = load()
        logs.set_up(settings, "gpu")
        tracing.start("gpu")
    except (SettingError, ValueError) as error:
        return _refuse(error)
    prepare_environment(settings.threads)
    # After the settings: a wrong one is reported without the seconds that importing torch takes.
    importlib.import_module("torch")  # It sets up logs of its own.
    logs.take_over("torch")
    from .worker import GpuWorker

    logs.take_over("transformers")

    try:
        worker = GpuWorker(settings)
    except (AddressError, KeyFault) as error:
        return _refuse(error)
    signal.signal(signal.SIGINT, lambda *_: worker.stop("SIGINT"))
    # supervisord sends it before a restart too.
    signal.signal(signal.SIGTERM, lambda *_: worker.stop("SIGTERM", restarts=True))
    return worker.run()


def _refuse(error: Exception) -> int:
    print(f"tokenbus gpu worker: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
