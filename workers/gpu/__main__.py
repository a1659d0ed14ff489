"""``python -m tokenbus.workers.gpu``: one GPU worker, set by the environment."""

from __future__ import annotations

import os
import signal
import sys

from ...protocol import logs
from ...protocol.settings import SettingError, load
from ...transport.dealer import AddressError


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; the exit code."""
    try:
        settings = load()
        logs.set_up(settings, "gpu")
    except (SettingError, ValueError) as error:
        return _refuse(error)
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # After the settings: a wrong one is reported without the seconds that importing torch takes.
    from .worker import GpuWorker

    try:
        worker = GpuWorker(settings)
    except AddressError as error:
        return _refuse(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: worker.stop(signal.Signals(n).name))
    return worker.run()


def _refuse(error: Exception) -> int:
    print(f"tokenbus gpu worker: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
