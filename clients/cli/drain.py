"""``tokenbus drain``: moves the streams of a worker to other workers, then ends the worker."""

from __future__ import annotations

import argparse
from typing import Any

from ...protocol.settings import Settings
from ..operator import Operator
from .exits import OK, counted
from .options import add_connection, client_for


def add_command(commands: Any) -> None:
    """Adds ``drain``."""
    parser = commands.add_parser(
        "drain",
        allow_abbrev=False,
        help="move the streams of a worker to other workers, then end the worker",
        description="Drains a worker: it accepts no further requests, and other workers continue "
        "its streams. If no other worker can continue a stream, the worker finishes the stream "
        "itself, within drain_s seconds. Then the worker ends.",
    )
    add_connection(parser)
    parser.add_argument("worker", metavar="WORKER", help="worker name, as tokenbus status shows it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Drains one worker and waits until the worker has ended."""
    with client_for(settings) as client:
        requests = Operator(client).drain_worker(args.worker)
    print(f"{args.worker} has left; it had {counted(requests, 'request')}")
    return OK
