"""``python -m tokenbus.workers.controller [MODULE:NAME …]``: one controller worker.

Set by the environment. With names, it serves these Python controllers; without, uploaded modules
and the built-in constraints.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys

from ...protocol import logs, tracing
from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, load
from ...transport.dealer import AddressError
from .python import load_program
from .worker import ControllerWorker

log = logging.getLogger(__name__)


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; the exit code."""
    try:
        settings = load()
        logs.set_up(settings, "controller")
        tracing.start("controller")
        programs = dict(map(load_program, sys.argv[1:]))
    except (SettingError, ValueError, TokenbusError) as error:
        return _refuse(error)
    if programs:
        first = shlex.quote(next(iter(programs)))
        log.info(
            "loaded %s; once registered, try: tokenbus controller run %s --prompt …",
            ", ".join(programs),
            first,
        )
    # One text at a time is tokenized: threads of the tokenizer's own would only be in the way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        worker = ControllerWorker(settings, programs=programs)
    except (AddressError, KeyFault) as error:
        return _refuse(error)
    signal.signal(signal.SIGINT, lambda *_: worker.stop("SIGINT"))
    # supervisord sends it before a restart too.
    signal.signal(signal.SIGTERM, lambda *_: worker.stop("SIGTERM", restarts=True))
    return worker.run()


def _refuse(error: Exception) -> int:
    print(f"tokenbus controller worker: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
