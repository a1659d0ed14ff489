"""``python -m tokenbus.workers.state``: the state worker, configured by the environment.

With ``--standby``, if another state worker uses the folder, this worker waits until the other
worker ends, and then uses the folder.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time

from ...protocol.health_file import STANDBY, HealthFile
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, Settings
from ...transport.dealer import AddressError
from ..process import STOPS, refuse, serve, settings_of
from .folder import FolderError, FolderInUseError
from .worker import StateWorker

log = logging.getLogger(__name__)

STANDBY_S = 0.1
"""Interval at which a standby worker checks whether the folder is free, in seconds."""


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser("python -m tokenbus.workers.state", allow_abbrev=False)
    parser.add_argument(
        "--standby",
        action="store_true",
        help="while another state worker has the folder, wait until it ends, and take over",
    )
    args = parser.parse_args()
    try:
        settings = settings_of("state", traced=False)
    except (SettingError, ValueError) as error:
        return refuse("state", error)
    try:
        worker = _when_free(settings) if args.standby else StateWorker(settings)
    except (FolderError, AddressError, KeyFault) as error:
        return refuse("state", error)
    if worker is None:
        return 0
    return serve(worker)


def _when_free(settings: Settings) -> StateWorker | None:
    """Waits until the folder is free, and returns the worker; None if a signal ends the wait.

    At most one worker has the folder's lock and writes. When this worker ends for any reason, the
    kernel releases the lock. SIGINT and SIGTERM stay blocked when this function returns a worker;
    ``serve`` unblocks them. A signal during the takeover thus stops the worker.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    health = HealthFile(settings)
    waits = False
    while True:
        try:
            return StateWorker(settings)
        except FolderInUseError as error:
            if not waits:
                log.info("standing by: %s", error)
            waits = True
            health.touch(STANDBY, time.monotonic())
        if signal.sigtimedwait(STOPS, STANDBY_S):
            return None


if __name__ == "__main__":
    sys.exit(main())
