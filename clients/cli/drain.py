"""``tokenbus drain``: makes a worker leave, which hands its streams over to others."""

from __future__ import annotations

import argparse
from typing import Any

from ...protocol.settings import Settings
from .exits import OK
from .options import add_connection, client_for


def add_command(commands: Any) -> None:
    """Adds ``drain``."""
    parser = commands.add_parser(
        "drain",
        allow_abbrev=False,
        help="have a worker hand its streams over and leave",
        description="The worker takes no more requests. What it has goes on at other workers; "
        "where none can take it, the worker finishes it, within drain_s. Then it ends.",
    )
    add_connection(parser)
    parser.add_argument("worker", metavar="WORKER", help="its name, as tokenbus status shows it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Drains one worker, and waits until it has left."""
    with client_for(settings) as client:
        requests = client.drain_worker(args.worker)
    print(f"{args.worker} has left; it had {requests} requests")
    return OK
