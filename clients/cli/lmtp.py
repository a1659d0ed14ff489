"""``tokenbus lmtp --stdio``: LMTP on standard input and output, one message per line.

The command is for programs that can start a process but have no ZeroMQ library.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from ...protocol.endpoints import separate
from ...protocol.keys import own_key
from ...protocol.settings import Settings
from .exits import OK
from .options import add_connection


def add_command(commands: Any) -> None:
    """Adds ``lmtp``."""
    parser = commands.add_parser(
        "lmtp",
        allow_abbrev=False,
        help="LMTP on standard input and output, one message per line",
        description=(
            "Each line of the input is a message, <TYPE> <JSON>, such as GENERATE "
            '{"stream_id": 1, "prompt": "def add(a, b):"}. Each line of the output has the same '
            "form. After the end of the input, the command waits until all streams have ended."
        ),
    )
    parser.add_argument("--stdio", action="store_true", required=True, help="transport; required")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Sends and prints messages until the input and every stream have ended.

    Raises ConnectionLostError if the broker does not answer.
    """
    from .line_pipe import LinePipe

    front = separate(settings.front_endpoint)[0]
    pipe = LinePipe(front, settings.command_timeout_s, own_key(settings, "client"))
    asyncio.run(pipe.serve())
    return OK
