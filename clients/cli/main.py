"""Parses the command line and runs one command; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, Settings, load
from ...transport.dealer import AddressError
from ..system import add_commands as add_system_commands
from . import (
    api_key,
    controller,
    drain,
    generate,
    grammar,
    interactive,
    keys,
    lmtp,
    record,
    replay,
    score,
    status,
    template,
    tool,
    top,
    weights,
)
from .exits import INTERRUPTED, WRONG_USAGE, report
from .hub import models, pull, rm
from .hub.faults import HubFault
from .module_files import FileFault
from .usage import Parser

Command = Callable[[argparse.Namespace, Settings], int]

FIRST = """\
first steps:
  tokenbus up                                 run a whole system here, until Ctrl-C
  tokenbus pull Qwen/Qwen3-0.6B               download a model, for up --model NAME
  tokenbus generate 'def add(a, b):'          stream the continuation of a prompt
  tokenbus client                             read prompts from the terminal
  tokenbus score 'import ' 'os'               print the log-probabilities of a text
  tokenbus controller run my.c                generate under a controller
  tokenbus tool serve my.py                   serve functions to programs
  tokenbus grammar check c my.c               check a text against a grammar
  tokenbus template check MODEL               show the effect of a chat template
  tokenbus status                             show workers and their load
  tokenbus top                                show workers, streams and rates, updated live

A flag overrides its environment variable TOKENBUS_*, which overrides tokenbus.toml.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unavailable, 4 refused, 5 timed out, 130 Ctrl-C."""


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="tokenbus",
        description="A message bus that serves language models.",
        epilog=FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tokenbus {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_system_commands(commands)
    streams = (interactive, generate, score, record, replay, lmtp)
    hub = (pull, models, rm)
    for module in (
        status,
        top,
        drain,
        weights,
        *hub,
        *streams,
        controller,
        tool,
        grammar,
        template,
        api_key,
        keys,
    ):
        module.add_command(commands)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokenbus")
    except PackageNotFoundError:
        return "of a source tree"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = build_parser().parse_args(argv)
    try:
        names = {field.name for field in msgspec.structs.fields(Settings)}
        settings = load(**{k: v for k, v in vars(args).items() if k in names})
    except SettingError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return WRONG_USAGE
    command: Command = args.run
    try:
        code = command(args, settings)
        sys.stdout.flush()
        return code
    except TokenbusError as error:
        return report(error)
    except HubFault as fault:
        print(f"tokenbus: {fault}", file=sys.stderr)
        return fault.exit_code
    except (AddressError, FileFault, KeyFault) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return WRONG_USAGE
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        print(f"tokenbus: the input is not valid UTF-8 at byte {byte:#x}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The output's reader has closed the pipe. Python would report the error again at exit, so
        # further output is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
