"""``python -m tokenbus.workers.tool [MODULE] [--mcp COMMAND] [--number N]``: a tool worker.
Environment variables set its settings."""

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
        "module", nargs="?", help="module, or .py file, whose functions are served as tools"
    )
    parser.add_argument("--mcp", metavar="COMMAND", help="MCP server whose tools are served")
    parser.add_argument(
        "--number",
        metavar="N",
        type=int,
        help="serve one element of the settings 'tools' and 'mcp'; N counts from 0, first through "
        "'tools', then through 'mcp'",
    )
    args = parser.parse_args()
    if sum(each is not None for each in (args.module, args.mcp, args.number)) != 1:
        parser.error("give a module, --mcp COMMAND or --number N")
    try:
        settings = settings_of("tool", traced=False)
        if args.number is not None:
            args.module, args.mcp = _numbered(settings, args.number)
        worker = _worker(settings, args.module, args.mcp)
    except (SettingError, AddressError, KeyFault, TokenbusError, ValueError) as error:
        return refuse("tool", error)
    return serve(worker)


def _numbered(settings: Settings, number: int) -> tuple[str | None, str | None]:
    """The module or the command with this number. Raises SettingError if no element has this
    number."""
    served: list[tuple[str | None, str | None]] = [
        *((module, None) for module in settings.tools),
        *((None, command) for command in settings.mcp),
    ]
    if not 0 <= number < len(served):
        raise SettingError(
            f"tools: the settings 'tools' and 'mcp' have {len(served)} elements together, numbered "
            f"from 0; the number {number} of this process is not valid; in supervisord.conf, set "
            f"numprocs of tool-worker to {len(served)}"
        )
    return served[number]


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
