"""``python -m tokenbus.workers.controller [MODULE:NAME …]``: runs a controller worker.

Environment variables configure the worker. If arguments are given, the worker serves only the
Python controllers that they name. Without arguments, the worker serves uploaded modules and
scripts, and the built-in controllers.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys

from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, Settings
from ...transport.dealer import AddressError
from ..process import refuse, serve, settings_of
from .guests.runtime import ProcessRuntime
from .guests.setup import Setup
from .python import load_program
from .runtime import GuestRuntime, ThreadRuntime
from .wasm.sandbox import make_engine
from .worker import ControllerWorker, limits_of

log = logging.getLogger(__name__)


def main() -> int:
    """Runs the worker. SIGINT or SIGTERM drains it, and it then ends. Returns the exit code."""
    try:
        settings = settings_of("controller")
        served = _served(settings, sys.argv[1:]) if sys.argv[1:] else None
    except (SettingError, ValueError, TokenbusError) as error:
        return refuse("controller", error)
    # The tokenizers library starts threads to tokenize several texts in one call. Here each call
    # has only one text, so the threads would only cost time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        worker = ControllerWorker(settings, served=served)
    except (AddressError, KeyFault, ValueError) as error:
        return refuse("controller", error)
    return serve(worker)


def _served(settings: Settings, specs: list[str]) -> GuestRuntime:
    """Loads the Python controllers that ``specs`` name, such as ``module:Name``. Returns the
    runtime that runs them. Raises RequestError if a controller cannot be loaded."""
    limits = limits_of(settings)
    served: GuestRuntime
    if settings.guest_processes:
        served = ProcessRuntime(Setup(limits, specs), settings.guest_processes)
    else:
        served = ThreadRuntime(make_engine(limits), dict(map(load_program, specs)))
    log.info(
        "loaded %s; once registered, try: tokenbus controller run %s --prompt …",
        ", ".join(served.names),
        shlex.quote(next(iter(served.names))),
    )
    return served


if __name__ == "__main__":
    sys.exit(main())
