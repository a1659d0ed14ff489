"""``python -m tokenbus.workers.controller [MODULE:NAME …]``: one controller worker.

Environment variables configure the worker. With names, it serves these Python controllers; without
names, it serves uploaded modules and the built-in constraints.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys

from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError
from ...transport.dealer import AddressError
from ..process import refuse, serve, settings_of
from .python import load_program
from .worker import ControllerWorker

log = logging.getLogger(__name__)


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; returns the exit code."""
    try:
        settings = settings_of("controller")
        programs = dict(map(load_program, sys.argv[1:]))
    except (SettingError, ValueError, TokenbusError) as error:
        return refuse("controller", error)
    if programs:
        first = shlex.quote(next(iter(programs)))
        log.info(
            "loaded %s; once registered, try: tokenbus controller run %s --prompt …",
            ", ".join(programs),
            first,
        )
    # One text is tokenized at a time, so the tokenizer's own threads would only cost time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        worker = ControllerWorker(settings, programs=programs)
    except (AddressError, KeyFault) as error:
        return refuse("controller", error)
    return serve(worker)


if __name__ == "__main__":
    sys.exit(main())
