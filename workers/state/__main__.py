"""``python -m tokenbus.workers.state``: the state worker, configured by the environment."""

from __future__ import annotations

import signal
import sys

from ...protocol import logs
from ...protocol.settings import SettingError, load
from ...transport.dealer import AddressError
from .folder import FolderError
from .worker import StateWorker


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM; returns the exit code."""
    try:
        settings = load()
        logs.set_up(settings, "state")
    except (SettingError, ValueError) as error:
        return _refuse(error)
    try:
        worker = StateWorker(settings)
    except (FolderError, AddressError) as error:
        return _refuse(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: worker.stop(signal.Signals(n).name))
    return worker.run()


def _refuse(error: Exception) -> int:
    print(f"tokenbus state worker: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
