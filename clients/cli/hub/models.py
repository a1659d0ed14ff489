"""``tokenbus models``: the models in the cache of huggingface_hub, and the models that a running
system serves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ....protocol.settings import Settings
from ..exits import OK
from ..options import add_connection
from ..top import FILE_WIDTH
from .faults import check_installed
from .served import Served

if TYPE_CHECKING:
    from .cache import Cache


class Listed(msgspec.Struct):
    """A model or a revision of a model, as one line of the output of ``tokenbus models``."""

    model: str
    commit: str
    """The revision; empty if the model is not in the cache of this machine."""
    refs: list[str]
    """The branches and tags that refer to the revision."""
    size: int | None
    """Size of the files in bytes; None if they are not on this machine."""
    path: str
    workers: list[str]
    """The workers that serve the model."""


def add_command(commands: Any) -> None:
    """Adds ``models``."""
    parser = commands.add_parser(
        "models",
        allow_abbrev=False,
        help="list the downloaded and the served models",
        description="Lists the models in the cache of huggingface_hub, and the models that the "
        "workers of a running system have loaded.",
    )
    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Prints the models."""
    check_installed()
    from huggingface_hub import constants

    from .cache import Cache

    cache = Cache(Path(constants.HF_HUB_CACHE).expanduser())
    served = Served(settings)
    found = listed(cache, served)
    if not served.broker_runs:
        print(
            f"tokenbus: no broker answers at {settings.front_endpoint}, so only the downloaded "
            "models are listed",
            file=sys.stderr,
        )
    for fault in cache.faults:
        print(f"tokenbus: {fault}", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode(found).decode())
        return OK
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model", "revision", "size", "workers"):
        table.add_column(name, no_wrap=True, justify="right" if name == "size" else "left")
    for one in found:
        revision = " ".join((one.commit[:8], *one.refs))
        size = "" if one.size is None else decimal(one.size)
        table.add_row(one.model, revision, size, ", ".join(one.workers))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(table if found else f"no models are in {constants.HF_HUB_CACHE}", soft_wrap=True)
    return OK


def listed(cache: Cache, served: Served) -> list[Listed]:
    """The models in the cache, and after them the served models that are not in the cache."""
    # Imported only here, because importing a command must not import modules of workers.
    from ....workers.gpu import embedded

    lines = []
    in_cache: set[str] = set()
    for model in cache.models:
        names = served.names_of(model)
        in_cache.update(names)
        workers = [worker for name in names for worker in served.by_model[name]]
        folder = str(model.folder)
        lines.append(
            Listed(model.repository, model.commit, list(model.refs), model.size, folder, workers)
        )
    for name, workers in served.by_model.items():
        if name not in in_cache:
            path = embedded.path() if name == embedded.NAME else Path(name)
            size = size_of(path)
            lines.append(Listed(name, "", [], size, "" if size is None else str(path), workers))
    return lines


def size_of(path: Path) -> int | None:
    """Size of a file, or of the files of a folder, in bytes; None if it does not exist."""
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        return None
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
