"""``tokenbus api-key``: creates an API key for the gateways."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from ...protocol.keys import OwnKey
from ...protocol.settings import Settings
from ..gateway.users.keys import OPERATOR, hash_of, new_key
from .exits import WRONG_USAGE

Subparsers = Any


def add_command(subparsers: Subparsers) -> None:
    """Adds ``api-key``."""
    parser = subparsers.add_parser(
        "api-key",
        allow_abbrev=False,
        help="make an API key for the gateways",
        description="Prints a new API key and adds its hash to the file that the gateways read "
        "with --api-keys. The key is not stored, so it cannot be printed again.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the key's holder")
    parser.add_argument(
        "--file",
        default="api-keys",
        metavar="FILE",
        help="file for the hash; created if it does not exist (default: ./api-keys)",
    )
    rights = parser.add_mutually_exclusive_group()
    rights.add_argument(
        "--operator",
        action="store_true",
        help="the key may pause models and update weights over HTTP",
    )
    rights.add_argument(
        "--tenant",
        metavar="FILE",
        help="key file of a tenant of the bus, to whom requests with this API key are attributed",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, settings: Settings) -> int:
    if not re.fullmatch(r"[^\s#]\S{0,99}", args.name):
        print(
            f"tokenbus: {args.name!r} is not a valid name; use up to 100 characters without "
            "spaces; the first must not be '#'",
            file=sys.stderr,
        )
        return WRONG_USAGE
    key = new_key()
    path = Path(args.file)
    right = f" {OPERATOR}" if args.operator else ""
    if args.tenant is not None:
        OwnKey.read(Path(args.tenant))  # Raises KeyFault, which main reports.
        right = f" {os.path.relpath(args.tenant, path.parent)}"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{args.name} {hash_of(key)}{right}\n")
    except OSError as error:
        print(f"tokenbus: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(key)
    print(
        f"tokenbus: wrote the hash of the key to {path}; gateways accept the key after a restart "
        f"with --api-keys {path}",
        file=sys.stderr,
    )
    return 0
