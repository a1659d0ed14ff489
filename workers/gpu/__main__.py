"""``python -m tokenbus.workers.gpu``: one GPU worker, set by the environment."""

from __future__ import annotations

import logging
import os
import signal
import sys

from ...protocol.settings import SettingError, load


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; the exit code."""
    try:
        settings = load()
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
        )
    except (SettingError, ValueError) as error:
        print(f"tokenbus gpu worker: {error}", file=sys.stderr)
        return 2
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # After the settings: a wrong one is reported without the seconds that importing torch takes.
    from .worker import GpuWorker

    worker = GpuWorker(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: worker.stop(signal.Signals(n).name))
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
