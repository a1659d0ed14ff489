"""``python -m tokenbus.workers.tool MODULE``: a tool worker, configured by the environment."""

from __future__ import annotations

import argparse
import logging
import sys

from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError
from ...transport.dealer import AddressError
from ..process import refuse, serve, settings_of
from .functions import load_tools
from .worker import ToolWorker

log = logging.getLogger(__name__)


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; returns the exit code."""
    parser = argparse.ArgumentParser("python -m tokenbus.workers.tool", allow_abbrev=False)
    parser.add_argument("module", help="module, or file that ends with .py, with the functions")
    args = parser.parse_args()
    try:
        settings = settings_of("tool", traced=False)
        tools = load_tools(args.module, settings.tool_timeout_s)
        worker = ToolWorker(settings, tools)
    except (SettingError, AddressError, KeyFault, TokenbusError, ValueError) as error:
        return refuse("tool", error)
    log.info("serves the tools %s", ", ".join(tools))
    return serve(worker)


if __name__ == "__main__":
    sys.exit(main())
