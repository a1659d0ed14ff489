"""``python -m tokenbus.workers.controller``: one controller worker, set by the environment."""

from __future__ import annotations

import logging
import signal
import sys

from ...protocol.settings import SettingError, load
from .worker import ControllerWorker


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; the exit code."""
    try:
        settings = load()
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
        )
    except (SettingError, ValueError) as error:
        print(f"tokenbus controller worker: {error}", file=sys.stderr)
        return 2
    worker = ControllerWorker(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: worker.stop(signal.Signals(n).name))
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
