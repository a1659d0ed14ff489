"""``tokenbus tool serve``: a tool worker for a running system."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ...protocol.python_command import python_command
from ...protocol.settings import Settings, environment
from .controller import wait_notice
from .module_files import FileFault


def add_command(commands: Any) -> None:
    """Adds ``tool`` and its action."""
    parser = commands.add_parser(
        "tool",
        allow_abbrev=False,
        help="serve functions that programs call",
        description="Tools: functions that programs of the bus call by name.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve",
        allow_abbrev=False,
        help="run a tool worker",
        description="Adds a worker to a running system. The worker serves those functions of a "
        "Python module or file that are marked with @tool, or else all its public functions.",
    )
    serve.add_argument(
        "module", nargs="?", metavar="FILE|MODULE", help="file that ends with .py, or module"
    )
    serve.add_argument(
        "--mcp",
        dest="mcp_command",
        metavar="COMMAND",
        help="serve the tools of this MCP server instead",
    )
    serve.add_argument(
        "--run-dir", dest="run_dir", metavar="DIR", help="run directory of the system"
    )
    serve.add_argument("--back", metavar="ADDRESS", help="broker's address for workers")
    serve.set_defaults(run=_serve)


def _serve(args: argparse.Namespace, settings: Settings) -> int:
    """Replaces this process by the worker. The worker then receives the signals and sets the exit
    code."""
    if (args.module is None) == (args.mcp_command is None):
        raise FileFault("give a file or a module with functions, or --mcp COMMAND")
    served = [args.module] if args.module is not None else ["--mcp", args.mcp_command]
    command = python_command("tokenbus.workers.tool", *served)
    wait_notice(settings)
    os.execve(sys.executable, command, os.environ | environment(settings))
