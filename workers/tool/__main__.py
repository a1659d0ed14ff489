"""``python -m tokenbus.workers.tool [MODULE] [--mcp COMMAND]``: a tool worker, configured by the
environment."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from ...protocol.errors import Code, RequestError, TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, Settings
from ...transport.dealer import AddressError
from ..process import refuse, serve, settings_of
from .functions import load_tools
from .worker import ToolWorker, running_loop


def main() -> int:
    """Runs the worker until SIGINT or SIGTERM, which drain it; returns the exit code."""
    parser = argparse.ArgumentParser("python -m tokenbus.workers.tool", allow_abbrev=False)
    parser.add_argument(
        "module", nargs="?", help="module, or file that ends with .py, with the functions"
    )
    parser.add_argument("--mcp", metavar="COMMAND", help="MCP server whose tools are served")
    args = parser.parse_args()
    if (args.module is None) == (args.mcp is None):
        parser.error("give a module, or --mcp COMMAND")
    try:
        settings = settings_of("tool", traced=False)
        worker = _worker(settings, args.module, args.mcp)
    except (SettingError, AddressError, KeyFault, TokenbusError, ValueError) as error:
        return refuse("tool", error)
    return serve(worker)


def _worker(settings: Settings, module: str | None, command: str | None) -> ToolWorker:
    """The worker for a module or an MCP server. Raises RequestError if the tools cannot be loaded,
    and AddressError or KeyFault if an address or a key in the settings is not valid."""
    timeout_s = settings.tool_timeout_s
    if module is not None:
        return ToolWorker(settings, load_tools(module, timeout_s))
    if importlib.util.find_spec("mcp") is None:
        raise RequestError(
            Code.INVALID_FIELD, "mcp is not installed; use pip install 'tokenbus[tools]'"
        )
    from .mcp_server import McpServer

    loop = running_loop()
    worker: ToolWorker | None = None

    def ended(why: str) -> None:
        if worker is not None:
            worker.fail(why)

    tools = McpServer(command or "", timeout_s, ended).start(loop)
    worker = ToolWorker(settings, tools, loop)
    return worker


if __name__ == "__main__":
    sys.exit(main())
