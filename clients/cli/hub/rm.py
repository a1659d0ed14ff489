"""``tokenbus rm``: removes a model from the cache of huggingface_hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ....protocol.errors import TokenbusError
from ....protocol.hub_names import HubName
from ....protocol.settings import Settings
from ..exits import FAILED, OK
from ..options import add_connection
from .faults import HubFault, check_installed
from .pull import hub_name
from .served import Served


def add_command(commands: Any) -> None:
    """Adds ``rm``."""
    parser = commands.add_parser(
        "rm",
        allow_abbrev=False,
        help="remove a downloaded model",
        description="Removes a model from the cache of huggingface_hub. If NAME has a revision, "
        "only this revision is removed. A model that the running system serves is not removed.",
    )
    add_connection(parser)
    parser.add_argument(
        "hub_name", type=hub_name, metavar="NAME", help="ORG/NAME or ORG/NAME@REVISION"
    )
    parser.add_argument(
        "--force", action="store_true", help="remove the model without a question, even if served"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Removes the revisions that a name refers to."""
    check_installed()
    from huggingface_hub import constants

    from .cache import Cache

    name: HubName = args.hub_name
    if name.file:
        raise HubFault(f"only whole models are removed; use: tokenbus rm {name.repository}")
    cache = Cache(Path(constants.HF_HUB_CACHE).expanduser())
    models = cache.of(name)
    if not args.force:
        served = _served(settings, name)
        for model in models:
            if workers := served.workers_of(model):
                raise HubFault(
                    f"{model} is served by {', '.join(workers)}; stop them first, or use --force"
                )
    what = ", ".join(map(str, models))
    size = decimal(sum(model.size for model in models))
    if not args.force and sys.stdin.isatty() and not _confirmed(f"remove {what} ({size})?"):
        print("nothing was removed", file=sys.stderr)
        return FAILED
    print(f"removed {what}; {decimal(cache.remove(models))} are free again")
    return OK


def _served(settings: Settings, name: HubName) -> Served:
    try:
        return Served(settings)
    except TokenbusError as error:
        raise HubFault(
            f"a system at {settings.front_endpoint} may serve {name}, but it does not say which "
            f"models it serves: {error.message}; use --force to remove the model nevertheless"
        ) from None


def _confirmed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
